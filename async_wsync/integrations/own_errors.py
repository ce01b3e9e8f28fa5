"""Errors that are also instances of the exception that an engine raised.

Code that called an engine through `ray.get` catches the engine's own classes, since Ray raises a task's failure as an
instance of both its own and theirs. What replaces such a call must do the same.
"""

from __future__ import annotations

import pickle
from functools import lru_cache
from typing import Any

from async_wsync.errors import EngineFailed

__all__ = ["as_its_cause"]


def as_its_cause(error: EngineFailed) -> EngineFailed:
    """``error`` as an instance of its ``__cause__``'s class too: same message, facts, notes and cause.

    ``error`` itself where it has no cause, is of its class already, or the class cannot be combined with ours. An exit
    or a cancellation at the engine never becomes one here.
    """
    cause = error.__cause__
    if not isinstance(cause, Exception) or isinstance(error, type(cause)):
        return error
    try:
        ours: Any = type(error)
        theirs: Any = type(cause)
        both: Any = _both(ours, theirs)
        dual: EngineFailed = both.__new__(both)
    except TypeError:  # a class that is final, or is only made with arguments
        return error
    BaseException.__init__(dual, *error.args)
    # A class of theirs may keep its facts as attributes; ours come first.
    dual.__dict__.update({**vars(cause), **vars(error)})
    dual.__cause__ = cause
    return dual


@lru_cache(maxsize=256)
def _both(ours: type[EngineFailed], theirs: type[Exception]) -> type[EngineFailed]:
    def text(self: EngineFailed) -> str:
        return str(self.args[0]) if self.args else ""  # a KeyError would show its repr

    def reduce(self: EngineFailed) -> tuple[Any, ...]:
        return _rebuilt, (ours, self.args, vars(self), _if_it_travels(self.__cause__))

    name = f"{ours.__name__}({theirs.__name__})"
    return type(name, (ours, theirs), {"__module__": ours.__module__, "__str__": text, "__reduce__": reduce})


def _rebuilt(ours: type[EngineFailed], args: tuple[Any, ...], facts: dict[str, Any], cause: Any) -> EngineFailed:
    error = ours(*args)
    error.__dict__.update(facts)
    error.__cause__ = cause
    return as_its_cause(error)


def _if_it_travels(cause: BaseException | None) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(cause))  # many exceptions pickle but can't be rebuilt
    except Exception:  # whatever a foreign class does
        return None
    return cause
