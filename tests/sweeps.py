"""Replaying an update with a fault at every point of it, and what must hold after each: short in the default tests,
in full in the chaos run."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from async_wsync import BroadcastLock, EngineDied, EngineState, ModuleSource, Timeouts, UpdateFailed, WeightBroadcaster
from async_wsync.sources.stream import StagedBucket
from async_wsync.testing import CANCEL_KINDS, CancelKind, LoopGapMeter, cancel_at_every_await, kill_at_every_event
from async_wsync.types import EventHook, UpdateEvent
from tests.ray.fleet import LIMITS, NAMES, Rig, a_model, until, update_tasks

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


@dataclass
class Figures:
    """What a sweep measured. ``gap`` and ``control_gap``: the longest of this loop, and of an idle process's, in s."""

    COLUMNS: ClassVar[str] = "| fault | runs | hit | wrong | slowest | loop gap | an idle process's |"

    what: str
    runs: int = 0
    fired: int = 0
    slowest: float = 0.0
    gap: float = 0.0
    control_gap: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def check(self, right: bool, what: str) -> None:
        if not right:
            self.wrong.append(what)

    def row(self) -> str:
        return (
            f"| {self.what} | {self.runs} | {self.fired} | {len(self.wrong)} | {self.slowest:.2f} s "
            f"| {self.gap * 1e3:.0f} ms | {self.control_gap * 1e3:.0f} ms |"
        )

    def line(self) -> str:
        verdict = "all right" if not self.wrong else f"{len(self.wrong)} WRONG"
        gaps = f"gap {self.gap * 1e3:.0f} ms (idle process {self.control_gap * 1e3:.0f} ms)"
        return f"{self.what}: {self.fired} of {self.runs} runs hit, {verdict}, slowest {self.slowest:.2f} s, {gaps}"


@asynccontextmanager
async def measured_gaps(figures: Figures) -> AsyncIterator[LoopGapMeter]:
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
    assert control.stdin is not None
    assert control.stdout is not None
    control.stdin.write(b"\n")
    await control.stdout.readline()
    try:
        with LoopGapMeter() as meter:
            yield meter
        control.stdin.write(b"\n")
        figures.control_gap = float(await control.stdout.readline())
    finally:
        gc.unfreeze()
        logging.disable(logging.NOTSET)
        control.stdin.close()
        await control.wait()


# ------------------------------------------------------------------------------- cancellation


async def cancel_sweep(
    rig: Rig,
    lock: BroadcastLock,
    *,
    kinds: Sequence[CancelKind] = CANCEL_KINDS,
    at: Iterable[int] | None = None,
    on_cancel: Any = "finish",
    names: Sequence[str] = NAMES[:2],
    look_for_leaks_every: int = 25,
) -> Figures:
    """Cancel a clean update at each of its awaits; after each, all must be at rest and the next update must work."""
    figures = Figures(f"cancel, on_cancel={on_cancel!r}, {'/'.join(kinds)}")
    at = None if at is None else list(at)
    source, healing = ModuleSource(a_model(1)), ModuleSource(a_model(2))
    async with (
        measured_gaps(figures) as meter,
        rig.broadcaster(names, lock=lock, on_cancel=on_cancel) as broadcaster,
    ):
        await broadcaster.update_weights(healing, version=rig.next_version())

        def update() -> Any:
            meter.reset()
            return broadcaster.update_weights(source, version=rig.next_version())

        async for run in cancel_at_every_await(update, kinds=kinds, at=at):
            figures.gap = max(figures.gap, meter.longest)
            figures.runs += 1
            figures.fired += run.fired
            figures.slowest = max(figures.slowest, run.seconds)
            where = f"{run.kind} at await {run.at} of {run.awaits}"
            figures.check(run.outcome not in ("hung", "raised"), f"{where}: {run.outcome} {run.error!r}")
            figures.check(run.cancelling == 0, f"{where}: cancelling {run.cancelling}")
            figures.check(not update_tasks(), f"{where}: tasks left: {update_tasks()}")
            status = await lock.status(timeout=60)
            figures.check(not status["held"] and not status["waiters"], f"{where}: lock {status}")
            await _agree(rig, broadcaster, names, figures, where)
            if figures.runs % look_for_leaks_every == 0:
                gc.collect()
                left = [o for o in gc.get_objects() if isinstance(o, StagedBucket) and o.wire]
                figures.check(not left, f"{where}: {len(left)} buckets still referenced")
            await broadcaster.update_weights(healing, version=rig.next_version())
            current = set(broadcaster.current_engines()) == set(names)
            figures.check(current, f"{where}: the next update left {broadcaster.engine_states}")
    return figures


async def _agree(rig: Rig, broadcaster: WeightBroadcaster, names: Iterable[str], figures: Figures, where: str) -> None:
    """The engines are current or torn, never unknown, and see it as the broadcaster does."""
    for name in names:
        believed, (state, version) = broadcaster.engine_states[name], await rig.state(name)
        if believed is EngineState.TORN and state == "current":
            # A bucket was announced, of which no byte has reached it.
            figures.check(not await rig.serves(name), f"{where}: {name} is believed torn, and serves")
            continue
        figures.check(state == believed.value, f"{where}: {name} is {state}, the broadcaster believes {believed}")
        figures.check(state in ("current", "torn"), f"{where}: {name} is {state}")
        figures.check(
            state != "current" or version == broadcaster.version,
            f"{where}: {name} {version}, not {broadcaster.version}",
        )
        figures.check(await rig.serves(name) is (state == "current"), f"{where}: {name} is {state}, serving wrong")


# ------------------------------------------------------------------------------- kills and stops

STOP_LIMITS = Timeouts(
    connect=3, lock=30, pause=2, flush=2, begin=2, bucket=2, idle=10, end=2, resume=2, drain=1.5, close=1
)
#: What a stopped engine may cost: the limit of its phase, and 2 s.
STOP_BOUND = 2.0 + 2.0


async def fault_sweep(
    rig: Rig,
    lock: BroadcastLock,
    *,
    number: int = signal.SIGKILL,
    victims: Iterable[str] = NAMES,
    at: Iterable[int] | None = None,
    soon: float = 1.0,
) -> Figures:
    """Kill (or stop) an engine at each event of an update; survivors must be whole or torn and paused, and heal."""
    killing = number == signal.SIGKILL
    figures = Figures("kill -9" if killing else "SIGSTOP")
    at = None if at is None else list(at)
    limits = LIMITS if killing else STOP_LIMITS
    old, new = ModuleSource(a_model(1)), ModuleSource(a_model(2))
    hooks: list[EventHook] = []
    versions = [0, 0]

    def on_event(event: UpdateEvent) -> None:
        if hooks and event.version == versions[1]:
            hooks[0](event)

    async with (
        measured_gaps(figures) as meter,
        rig.broadcaster(lock=lock, timeouts=limits, on_event=on_event, num_buffers=1) as broadcaster,
    ):

        async def scenario(hook: EventHook, victim: str) -> Any:
            versions[:] = [rig.next_version(), rig.next_version()]
            await broadcaster.update_weights(old, version=versions[0])
            hooks[:] = [hook]
            meter.reset()
            try:
                return await broadcaster.update_weights(new, version=versions[1])
            finally:
                figures.gap = max(figures.gap, meter.longest)
                hooks.clear()

        def strike(name: str) -> None:
            rig.kill(name, number)

        async for run in kill_at_every_event(scenario, victims, strike, at=at):
            figures.runs += 1
            if not run.fired:
                figures.check(run.error is None, f"a clean update failed: {run.error}")
                continue
            figures.fired += 1
            assert run.event is not None
            figures.slowest = max(figures.slowest, run.seconds_after)
            bucket = "" if run.event.bucket is None else f" {run.event.bucket}"
            where = f"{run.victim} at {run.event.kind}{bucket}"
            bound = soon if killing else STOP_BOUND
            figures.check(run.seconds_after <= bound, f"{where}: {run.seconds_after:.2f} s")
            _check_error(run, figures, where)
            held = (await lock.status(timeout=60))["held"]
            figures.check(not held, f"{where}: lock held")
            await _check_survivors(rig, broadcaster, run.victim, versions, figures, where)
            await _bring_back(rig, broadcaster, run.victim, killing)
            await _heal(broadcaster, old, rig, figures, where)
            await rig.ready()
    return figures


def _check_error(run: Any, figures: Figures, where: str) -> None:
    if run.error is None:
        late = run.event.kind in ("resumed", "update_finished", "published")
        figures.check(late, f"{where}: nobody noticed")
        return
    named = isinstance(run.error, UpdateFailed) and run.error.at_fault == (run.victim,)
    figures.check(named, f"{where}: {type(run.error).__name__} {getattr(run.error, 'at_fault', None)}: {run.error}")
    died = isinstance(run.error.__cause__, EngineDied) or run.victim in str(run.error.__cause__)
    figures.check(died, f"{where}: cause {run.error.__cause__!r}")


async def _check_survivors(
    rig: Rig, broadcaster: WeightBroadcaster, victim: str, versions: list[int], figures: Figures, where: str
) -> None:
    for name in NAMES:
        if name == victim:
            continue
        state, version = await rig.state(name)
        serves, believed = await rig.serves(name), broadcaster.engine_states[name]
        # Where a bucket was announced we must believe the engine torn, though no byte may have reached it.
        whole = state == "current" and version in versions and serves is (believed is not EngineState.TORN)
        torn = state == "torn" and not serves and believed is EngineState.TORN
        figures.check(whole or torn, f"{where}: {name} {state} {version} serves={serves}, believed {believed}")


async def _bring_back(rig: Rig, broadcaster: WeightBroadcaster, victim: str, killing: bool) -> None:
    if killing:
        await broadcaster.replace_engine(victim, await rig.revive(victim))
    else:
        rig.kill(victim, signal.SIGCONT)


async def _heal(broadcaster: WeightBroadcaster, source: ModuleSource, rig: Rig, figures: Figures, where: str) -> None:
    """The next update works. An engine that was stopped may still be busy with what it was asked then."""

    async def works() -> bool:
        try:
            await broadcaster.update_weights(source, version=rig.next_version(), verify="engines")
        except UpdateFailed as failure:
            figures.check(not isinstance(failure.__cause__, EngineDied), f"{where}: next update: {failure}")
            return False
        return set(broadcaster.engine_states.values()) == {EngineState.CURRENT}

    await until(works)
