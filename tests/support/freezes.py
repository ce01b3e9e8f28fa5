"""Updates with one engine of three frozen in one phase, and who is named: the frozen one, and nobody else."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from async_wsync import EngineState, Timeouts, UpdateFailed, WeightBroadcaster
from async_wsync.testing import Fault
from tests.support.fleet import LIMITS, NAMES, NUM_BUCKETS, Rig, a_source

#: The phases of an update, by the verb that an engine is asked in it.
PHASES = ("join", "check", "pause", "flush", "begin", "receive", "end", "publish", "resume")


@dataclass
class Freezes:
    """What a sweep found."""

    COLUMNS: ClassVar[str] = "| frozen in | runs | hit | wrong | slowest |"

    what: str
    runs: int = 0
    fired: int = 0
    slowest: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def check(self, right: bool, what: str) -> None:
        if not right:
            self.wrong.append(what)

    def row(self) -> str:
        return f"| {self.what} | {self.runs} | {self.fired} | {len(self.wrong)} | {self.slowest:.2f} s |"


def limits_of(phase: str, seconds: float) -> Timeouts:
    """Every phase has this limit; connecting, which may wait for a name server, only where it is the one looked at."""
    each = dict.fromkeys(("pause", "flush", "begin", "bucket", "end", "resume"), seconds)
    settling = min(seconds, 1.5)
    connect = seconds if phase == "join" else LIMITS.connect
    return replace(LIMITS, **each, connect=connect, drain=settling, close=settling)


async def freeze_sweep(
    rig: Rig, phase: str, *, seconds: float, times: int, dropping: bool = False, first: int = 0, **options: Any
) -> Freezes:
    """Freeze one engine in ``phase`` and look who is at fault; ``dropping``: the others must get the version."""
    figures = Freezes(f"{phase}, limits {seconds:g} s{', drop' if dropping else ''}")
    for turn in range(first, first + times):
        victim = NAMES[turn % len(NAMES)]
        await rig.ready()
        await rig.script(victim, _fault(phase, turn))
        broadcaster = rig.broadcaster(
            timeouts=limits_of(phase, seconds), on_engine_failure="drop" if dropping else "raise", **options
        )
        started = time.monotonic()
        failure: UpdateFailed | None = None
        dropped: tuple[str, ...] = ()
        try:
            try:
                dropped = (await broadcaster.update_weights(a_source(1), version=rig.next_version())).dropped
            except UpdateFailed as error:
                failure = error
            took = time.monotonic() - started
            frozen = is_frozen(rig.pids[victim])
        finally:
            rig.kill(victim, signal.SIGCONT)
        figures.runs += 1
        figures.fired += frozen
        figures.slowest = max(figures.slowest, took)
        where = f"{victim} in {phase}, run {turn}"
        if dropping:
            figures.check(failure is None and dropped == (victim,), f"{where}: {failure or dropped}")
        else:
            figures.check(failure is not None and failure.at_fault == (victim,), f"{where}: {failure}")
        _check_states(broadcaster, victim, figures, where, dropping)
        await broadcaster.aclose()
    return figures


def _fault(phase: str, turn: int) -> Fault:
    if turn % 2 and phase in ("join", "receive"):
        # A moment later: while it joins, when it has greeted, say; while a bucket arrives, or the next one.
        bucket, step = (0, 0.001) if phase == "receive" else (None, 0.004)
        return Fault(do="stop", at=phase, bucket=bucket, seconds=step * turn)
    return Fault(do="stop", at=phase, bucket=turn % NUM_BUCKETS if phase == "receive" else None)


def _check_states(broadcaster: WeightBroadcaster, victim: str, figures: Freezes, where: str, dropping: bool) -> None:
    states = broadcaster.engine_states
    figures.check(states[victim] is EngineState.LOST, f"{where}: {victim} is {states[victim]}")
    others = {states[name] for name in NAMES if name != victim}
    figures.check(EngineState.LOST not in others, f"{where}: {states}")
    if dropping:
        figures.check(others == {EngineState.CURRENT}, f"{where}: {states}")


def is_frozen(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
