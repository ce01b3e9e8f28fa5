"""How long an event loop was kept from coming round."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import NamedTuple, Self

__all__ = ["NOTED", "Gap", "LoopGapMeter"]

NOTED = 0.005  # seconds


class Gap(NamedTuple):
    """From when to when the loop was due and did not come round, by time.monotonic(), and for how much of it, in
    seconds, this process had a CPU, all its threads together."""

    start: float
    end: float
    cpu: float


class LoopGapMeter:
    """``with LoopGapMeter() as meter:`` on a running loop; ``meter.longest`` is in seconds.

    A timer asks to be called every ``interval`` seconds; how much later it is called is the gap. Starts no task.
    """

    def __init__(self, *, interval: float = 0.002) -> None:
        self._interval = interval
        self._gaps: list[Gap] = []
        self._cpu = 0.0
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

    @property
    def gaps(self) -> list[Gap]:
        """Those of `NOTED` seconds and more since the start or the last `reset`."""
        return list(self._gaps)

    def reset(self) -> float:
        """Start over; returns the longest gap so far."""
        longest, self._longest = self._longest, 0.0
        self._gaps.clear()
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
        self._note()  # a gap that is still open when the block ends counts too

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._cpu = time.process_time()
        self._due = time.monotonic() + self._interval
        self._timer = loop.call_later(self._interval, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._note()
        self._arm(loop)

    def _note(self) -> None:
        now = time.monotonic()
        self._longest = max(self._longest, now - self._due)
        if now - self._due >= NOTED:
            self._gaps.append(Gap(self._due, now, time.process_time() - self._cpu))
