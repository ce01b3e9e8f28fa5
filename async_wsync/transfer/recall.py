"""Results kept for the next call with the same arguments, where hashing these would cost as much as the work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from functools import wraps
from typing import Any, ParamSpec, TypeVar

__all__ = ["recall"]

P = ParamSpec("P")
T = TypeVar("T")


def recall(keep: int, key: Callable[P, Hashable]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator: of the last ``keep`` calls with different keys, the results are kept, but for futures that failed.

    ``key`` of the arguments may use `id`, as they are kept with the result, so that no other object gets their ids.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        kept: deque[tuple[Hashable, Any, T]] = deque(maxlen=keep)

        @wraps(function)
        def recalling(*args: P.args, **kwargs: P.kwargs) -> T:
            which = key(*args, **kwargs)
            for known, _, result in tuple(kept):
                if known == which and not _failed(result):
                    return result
            result = function(*args, **kwargs)
            kept.append((which, (args, kwargs), result))
            return result

        return recalling

    return decorate


def _failed(result: object) -> bool:
    return isinstance(result, Future) and result.done() and result.exception() is not None
