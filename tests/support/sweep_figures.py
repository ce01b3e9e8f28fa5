"""What a sweep measures, held against what is promised. A point that was only late is tried once more, and says so."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import ClassVar

from async_wsync.testing import LoopGapMeter

CONTROL = """
import asyncio, sys
from async_wsync.runtime.loop_gap import LoopGapMeter

async def main():
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    with LoopGapMeter() as meter:
        while await reader.readline():
            print(meter.reset(), flush=True)

asyncio.run(main())
"""


@dataclass(frozen=True)
class Promised:
    """Seconds. ``first_failure``: from an error's cause until it comes out (G4). ``loop_gap``: how long the loop may
    be held, above what an idle process sees in the same moments (G7). ``settling``: what an update that hits a limit
    may take beyond that limit and ``drain`` (G9)."""

    first_failure: float = 1.0
    loop_gap: float = 0.020
    settling: float = 0.5

    def times(self, factor: float) -> Promised:
        return Promised(self.first_failure * factor, self.loop_gap * factor, self.settling * factor)


PROMISED = Promised()
#: For a machine that does other things meanwhile.
BUSY = Promised(first_failure=15.0, loop_gap=0.5, settling=5.0)


class Points:
    """The numbers ``at``, or all from 1, each of them twice if `again` was called for it."""

    def __init__(self, at: Iterable[int] | None = None) -> None:
        self._at = None if at is None else list(at)
        self._again = False
        self.second = False

    def __iter__(self) -> Iterator[int]:
        for point in itertools.count(1) if self._at is None else self._at:
            self.second = False
            yield point
            if self._again:
                self._again, self.second = False, True
                yield point

    def again(self) -> None:
        self._again = True


@dataclass
class Verdict:
    """What one replay came to. ``late``: what took longer than promised; ``wrong``: all else that should not be."""

    where: str
    seconds: float = 0.0
    gap: float = 0.0
    idle_gap: float = 0.0
    wrong: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)

    def check(self, right: bool, what: str) -> None:
        if not right:
            self.wrong.append(f"{self.where}: {what}")

    def took(self, seconds: float, *, limit: float) -> None:
        self.seconds = seconds
        if seconds > limit:
            self.late.append(f"{self.where}: {seconds:.2f} s, above {limit:.2f}")

    def held_the_loop(self, gaps: tuple[float, float], *, limit: float) -> None:
        self.gap, self.idle_gap = gaps
        if self.gap > limit + self.idle_gap:
            idle = f"{limit * 1e3:.0f} above an idle process's {self.idle_gap * 1e3:.0f}"
            self.late.append(f"{self.where}: the loop was held for {self.gap * 1e3:.0f} ms, more than {idle}")


@dataclass
class Figures:
    """What a sweep measured. ``gap`` and ``idle_gap``: the longest of this loop and of an idle process's, in the run
    in which they were furthest apart, in s. ``retried``: what was late at a first try and in time at the second."""

    COLUMNS: ClassVar[str] = "| fault | runs | hit | wrong | late once | slowest | loop gap | an idle process's |"

    what: str
    runs: int = 0
    fired: int = 0
    slowest: float = 0.0
    gap: float = 0.0
    idle_gap: float = 0.0
    wrong: list[str] = field(default_factory=list)
    retried: list[str] = field(default_factory=list)
    _late: list[str] = field(default_factory=list)

    def settle(self, verdict: Verdict, points: Points, *, hit: bool = True) -> None:
        """Count a replay in. If it was late only, its point is tried again, and has to be hit again, in time."""
        self.runs += 1
        self.fired += hit
        self.wrong += verdict.wrong
        if verdict.late and not points.second:
            self._late = verdict.late
            points.again()
            return
        if points.second:
            confirmed = bool(verdict.late) or not hit
            (self.wrong if confirmed else self.retried).extend([*self._late, *verdict.late])
        self.slowest = max(self.slowest, verdict.seconds)
        if verdict.gap - verdict.idle_gap >= self.gap - self.idle_gap:
            self.gap, self.idle_gap = verdict.gap, verdict.idle_gap

    def row(self) -> str:
        return (
            f"| {self.what} | {self.runs} | {self.fired} | {len(self.wrong)} | {len(self.retried)} "
            f"| {self.slowest:.2f} s | {self.gap * 1e3:.0f} ms | {self.idle_gap * 1e3:.0f} ms |"
        )


class Gaps:
    """This loop's gaps and those of a process that does nothing, over the same stretch of time."""

    def __init__(self, meter: LoopGapMeter, control: asyncio.subprocess.Process) -> None:
        self._meter = meter
        self._control = control

    async def begin(self) -> None:
        await self._ask()
        self._meter.reset()

    async def end(self) -> tuple[float, float]:
        """The longest of each since `begin`."""
        return self._meter.longest, await self._ask()

    async def _ask(self) -> float:
        assert self._control.stdin is not None
        assert self._control.stdout is not None
        self._control.stdin.write(b"\n")
        return float(await self._control.stdout.readline())


@asynccontextmanager
async def measured_gaps() -> AsyncIterator[Gaps]:
    """Meters this loop and, beside it, the loop of a process that does nothing: the machine's own share.

    What torch and Ray have allocated by now is kept out of Python's garbage collections: one full collection of it
    was measured to take 0.25 s, whoever causes it.
    """
    gc.collect()
    gc.freeze()
    logging.disable(logging.WARNING)  # pytest keeps every record, and with it the frames of the failures
    control = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CONTROL, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        with LoopGapMeter() as meter:
            gaps = Gaps(meter, control)
            await gaps.begin()
            yield gaps
    finally:
        gc.unfreeze()
        logging.disable(logging.NOTSET)
        assert control.stdin is not None
        control.stdin.close()
        await control.wait()
