"""How long an event loop was kept from coming round."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self

__all__ = ["LoopGapMeter"]


class LoopGapMeter:
    """``with LoopGapMeter() as meter:`` on a running loop; ``meter.longest`` is in seconds.

    A timer asks to be called every ``interval`` seconds; how much later it is called is the gap. Starts no task.
    """

    def __init__(self, *, interval: float = 0.002) -> None:
        self._interval = interval
        self._longest = 0.0
        self._due = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<LoopGapMeter longest {self._longest * 1e3:.1f} ms>"

    @property
    def longest(self) -> float:
        """The longest gap since the start or the last `reset`."""
        return self._longest

    def reset(self) -> float:
        """Start over; returns the longest gap so far."""
        longest, self._longest = self._longest, 0.0
        return longest

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._arm(self._loop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # A gap that is still open when the block ends counts too.
        self._longest = max(self._longest, time.monotonic() - self._due)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = time.monotonic() + self._interval
        self._timer = loop.call_later(self._interval, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._longest = max(self._longest, time.monotonic() - self._due)
        self._arm(loop)
