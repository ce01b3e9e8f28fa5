"""The serving gate: nothing generates from weights that are changing, torn, or paused."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from async_wsync.errors import EngineNotServing

__all__ = ["Serving", "ServingGate"]

_ASYNC_POLL_INTERVAL = 0.005


class ServingGate:
    """Counts who is inside, and lets nobody in while it is shut.

    ``why_shut`` tells why the weights must not be used, or None; it is asked under ``changed``, the condition
    that guards all state of the receiver and is notified whenever something about it changes.
    """

    def __init__(self, changed: threading.Condition, *, why_shut: Callable[[], str | None]) -> None:
        self._changed = changed
        self._why_shut = why_shut
        self._inside = 0
        self.paused = False
        self.abort_requested = False

    @property
    def inside(self) -> int:
        """How many are generating now."""
        return self._inside

    def reason(self) -> str | None:
        """Why nobody may enter, or None."""
        return "paused" if self.paused else self._why_shut()

    def enter(self, wait: float = 0.0) -> None:
        """Come in, after waiting up to ``wait`` seconds for the gate to open; `EngineNotServing` otherwise."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.reason() is None, timeout=max(wait, 0.0)):
                raise self.refusal(wait)
            self._inside += 1

    def try_enter(self) -> bool:
        with self._changed:
            if self.reason() is not None:
                return False
            self._inside += 1
            return True

    def refusal(self, waited: float) -> EngineNotServing:
        reason = self.reason() or "shut"
        after = f" (waited {waited:g} s)" if waited > 0 else ""
        return EngineNotServing(f"the engine does not serve now, it is {reason}{after}", state=reason)

    def leave(self) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def wait_until_empty(self, until: float, *, still_wanted: Callable[[], None]) -> bool:
        """Wait for those inside to leave, until ``until`` (time.monotonic()); False if some have not.

        ``still_wanted`` is called under the condition before each wait and may raise to stop waiting.
        """
        with self._changed:
            while self._inside:
                still_wanted()
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True


class Serving:
    """Entering the gate, as a context manager: ``with`` in threads, ``async with`` on an event loop."""

    def __init__(self, gate: ServingGate, version: Callable[[], int | None], wait: float) -> None:
        self._gate = gate
        self._version = version
        self._wait = wait

    def __enter__(self) -> int | None:
        self._gate.enter(self._wait)
        return self._version()

    def __exit__(self, *_: object) -> None:
        self._gate.leave()

    async def __aenter__(self) -> int | None:
        until = time.monotonic() + self._wait
        while not self._gate.try_enter():
            if time.monotonic() >= until:
                raise self._gate.refusal(self._wait)
            # The gate opens in another thread, and a loop must not wait for a condition.
            await asyncio.sleep(_ASYNC_POLL_INTERVAL)
        return self._version()

    async def __aexit__(self, *_: object) -> None:
        self._gate.leave()
