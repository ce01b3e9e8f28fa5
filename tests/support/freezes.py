"""Updates with one engine of three frozen in one phase, and who is named: the frozen one, and nobody else."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
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


#: What an engine's outcome calls a phase, if it is not the verb.
_CALLED = {"join": "connect"}

#: Seconds beside the limits: of the phases before, of a busy machine; and of another attempt, without the engine.
_BESIDE, _ANOTHER = 2.0, 1.0


def limits_of(phase: str, seconds: float) -> Timeouts:
    """Every phase has this limit; connecting, which may wait for a name server, only if it is the one looked at."""
    each = dict.fromkeys(("pause", "flush", "begin", "bucket", "end", "resume"), seconds)
    settling = min(seconds, 1.5)
    connect = seconds if phase == "join" else max(seconds, 10.0)
    return replace(LIMITS, **each, connect=connect, drain=settling, close=settling)


def longest(limits: Timeouts, *, dropping: bool) -> float:
    """Seconds that an update with a frozen engine may take: its limit, then the calls under way and the recovery."""
    return limits.begin + 2 * limits.drain + _BESIDE + dropping * _ANOTHER


async def freeze_sweep(
    rig: Rig, phase: str, *, seconds: float, times: int, dropping: bool = False, first: int = 0, **options: Any
) -> Freezes:
    """Freeze one engine in ``phase`` and look who is at fault; ``dropping``: the others must get the version.

    A hit is an engine that is frozen at the end, and that is said to be silent in ``phase``; or later, if it froze a
    moment after the call came. ``first``: the number of the first run, which says who freezes and how.
    """
    figures = Freezes(f"{phase}, limits {seconds:g} s{', drop' if dropping else ''}")
    for turn in range(first, first + times):
        victim = NAMES[turn % len(NAMES)]
        await rig.ready()
        fault, limits = _fault(phase, turn), limits_of(phase, seconds)
        await rig.script(victim, fault)
        broadcaster = rig.broadcaster(timeouts=limits, on_engine_failure="drop" if dropping else "raise", **options)
        started = time.monotonic()
        failure: UpdateFailed | None = None
        dropped: tuple[str, ...] = ()
        try:
            try:
                report = await broadcaster.update_weights(a_source(1), version=rig.next_version())
                dropped, outcome = report.dropped, report.engines[victim]
            except UpdateFailed as error:
                failure, outcome = error, error.outcomes[victim]
            took = time.monotonic() - started
            frozen = is_frozen(rig.pids[victim])
        finally:
            rig.kill(victim, signal.SIGCONT)
        figures.runs += 1
        figures.fired += frozen and (fault.seconds > 0 or outcome.phase == _CALLED.get(phase, phase))
        figures.slowest = max(figures.slowest, took)
        where = f"{victim} in {phase}, run {turn}"
        limit = longest(limits, dropping=dropping)
        figures.check(took <= limit, f"{where}: it took {took:.2f} s, more than {limit:g} s")
        if dropping:
            figures.check(failure is None and dropped == (victim,), f"{where}: {failure or dropped}")
        else:
            figures.check(failure is not None and failure.at_fault == (victim,), f"{where}: {failure}")
        _check_states(broadcaster, victim, figures, where, dropping)
        await broadcaster.aclose()
    return figures


def added(parts: Iterable[Freezes]) -> list[Freezes]:
    """Parts of one sweep as one, in the order of the first of each."""
    whole: dict[str, Freezes] = {}
    for part in parts:
        sum_ = whole.setdefault(part.what, Freezes(part.what))
        sum_.runs += part.runs
        sum_.fired += part.fired
        sum_.slowest = max(sum_.slowest, part.slowest)
        sum_.wrong += part.wrong
    return list(whole.values())


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
