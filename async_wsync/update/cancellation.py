"""How an update is stopped from outside: its caller is cancelled, its time is up, or the broadcaster is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from async_wsync.errors import Cancelled, PhaseTimeout
from async_wsync.runtime.engine_calls import Interrupt
from async_wsync.types import Timeouts
from async_wsync.update.history import UpdateHistory

__all__ = ["Cancellation"]

_LEAVE_SHARE = 0.75  # of the close limit: what an update that was cancelled before it touched anything may still take
_SETTLE_SHARE = 0.25  # of the drain: what a cancelled update keeps of it for settling, if it cannot finish


class Cancellation:
    """Of one update. Its waits race against ``interrupt``; ``stop`` is asked for at each bucket.

    ``committed``: the lock is ours, so that the update goes to an end whatever becomes of its caller.
    """

    def __init__(self, timeouts: Timeouts, *, on_cancel: Literal["finish", "stop"], history: UpdateHistory) -> None:
        self.interrupt = Interrupt()
        self.committed = False
        self.stop: Cancelled | None = None
        self._limits = timeouts
        self._on_cancel = on_cancel
        self._history = history
        self._drain = timeouts.drain
        self._drained_by: float | None = None  # since the caller was cancelled
        self._timers: list[asyncio.TimerHandle] = []

    @property
    def was_asked(self) -> bool:
        return self._drained_by is not None

    @property
    def ends_it(self) -> bool:
        """The update is being stopped: no attempt is to begin."""
        return self.interrupt.reason is not None or self.stop is not None

    @contextmanager
    def within_total(self) -> Iterator[None]:
        """Interrupt what is inside at ``Timeouts.total``. No timer is left behind."""
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(self._limits.total, lambda: self.interrupt.fire(self._out_of_time())))
        try:
            yield
        finally:
            for timer in self._timers:
                timer.cancel()

    def _out_of_time(self) -> PhaseTimeout:
        limit, phase = self._limits.total, self._history.phase
        return PhaseTimeout(
            f"the update took longer than {limit:g} s (Timeouts.total), in {phase}",
            phase=phase,
            field="total",
            seconds=limit,
        )

    def drain_left(self) -> float:
        """Seconds for what is under way to settle."""
        if self._drained_by is None:
            return self._limits.drain
        return max(self._drained_by - asyncio.get_running_loop().time(), _SETTLE_SHARE * self._drain)

    def ask(self, task: asyncio.Task[Any]) -> None:
        """The caller was cancelled. Before anything was touched, leave; after that, finish or stop within ``drain``."""
        loop = asyncio.get_running_loop()
        limits, started = self._limits, self._history.started
        # What may still be under way before an engine was paused is joins, of a group that will not be.
        self._drain = drain = limits.drain if started else min(limits.drain, _LEAVE_SHARE * limits.close)
        self._drained_by = loop.time() + drain
        if not self.committed:
            task.cancel()
            return
        if not started:
            self.interrupt.fire(Cancelled("the update was cancelled before any engine was paused"))
            return
        if self._on_cancel == "stop":
            self.stop = Cancelled("the update was cancelled and stopped at a bucket boundary (on_cancel='stop')")
        late = Cancelled(f"the update was cancelled and could not end within {drain:g} s (Timeouts.drain)")
        self._timers.append(loop.call_later((1 - _SETTLE_SHARE) * drain, self.interrupt.fire, late))
