"""Which requests were seen, and what became of them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from async_wsync.engines.failure import Failure

__all__ = ["Outcome", "RequestLog"]

_KEPT = 256


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended."""

    value: Any = None
    failure: Failure | None = None


class RequestLog:
    """Outcomes by request id. Pending ones are all kept, of the settled ones the latest few hundred.

    Outcomes hold text and plain values only: an exception would keep its frames' tensors alive.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: set[str] = set()
        self._settled: OrderedDict[str, Outcome] = OrderedDict()

    def open(self, request_id: str) -> bool:
        """Note a new request; False where it was seen before."""
        with self._lock:
            if request_id in self._pending or request_id in self._settled:
                return False
            self._pending.add(request_id)
            return True

    def settle(self, request_id: str, *, value: Any = None, error: BaseException | None = None) -> None:
        outcome = Outcome(value=value, failure=None if error is None else Failure.of(error))
        with self._lock:
            self._pending.discard(request_id)
            self._settled[request_id] = outcome
            while len(self._settled) > _KEPT:
                self._settled.popitem(last=False)

    def follow(self, request_id: str, future: Future[Any]) -> None:
        """Settle the request_id as ``future`` does."""

        def settle(done: Future[Any]) -> None:
            error = done.exception()
            self.settle(request_id, value=None if error is not None else done.result(), error=error)

        future.add_done_callback(settle)

    def look_up(self, request_id: str) -> tuple[bool, Outcome | None]:
        """Whether the request is known, and its outcome if it has one."""
        with self._lock:
            outcome = self._settled.get(request_id)
            return outcome is not None or request_id in self._pending, outcome
