"""Which requests were seen, and what became of them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from async_wsync.engines.failure import Failure
from async_wsync.errors import EngineFailed
from async_wsync.runtime.foreign_code import contained

__all__ = ["Outcome", "RequestLog"]

_KEPT = 256


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended."""

    value: Any = None
    failure: Failure | None = None

    @classmethod
    def of(cls, future: Future[Any]) -> Outcome:
        """That of a future that is done."""
        error = future.exception()
        return cls(value=future.result()) if error is None else cls(failure=Failure.of(error))


class RequestLog:
    """Outcomes by request id. Pending ones are all kept, of the settled ones the latest few hundred.

    Outcomes hold text and plain values only: an exception would keep its frames' tensors alive. ``changed`` is
    notified of each.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._pending: set[str] = set()
        self._settled: OrderedDict[str, Outcome] = OrderedDict()

    def open(self, request_id: str) -> bool:
        """Note a new request; False if it was seen before."""
        with self._changed:
            if request_id in self._pending or request_id in self._settled:
                return False
            self._pending.add(request_id)
            return True

    def settle(self, request_id: str, outcome: Outcome) -> None:
        with self._changed:
            self._pending.discard(request_id)
            self._settled[request_id] = outcome
            while len(self._settled) > _KEPT:
                self._settled.popitem(last=False)
            self._changed.notify_all()

    def run(self, request_id: str, act: Callable[[], Any]) -> Future[Any] | None:
        """Call ``act`` unless the request was seen before, and note what it returns or raises.

        If it returns a future, the future's end is noted, and the future is returned.
        """
        if not self.open(request_id):
            return None
        try:
            with contained():
                value = act()
        except Exception as error:
            self.settle(request_id, Outcome(failure=Failure.of(error)))
            return None
        if not isinstance(value, Future):
            self.settle(request_id, Outcome(value=value))
            return None
        value.add_done_callback(lambda done: self.settle(request_id, Outcome.of(done)))
        return value

    def outcome(self, request_id: str) -> Outcome | None:
        """None while the request is under way; a failure if nothing is known of it."""
        with self._changed:
            if request_id in self._pending:
                return None
            if request_id in self._settled:
                return self._settled[request_id]
        return Outcome(failure=Failure.of(EngineFailed(f"request {request_id} is not known here")))
