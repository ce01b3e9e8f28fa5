"""Replaying an update with a fault at every point of it, and what must hold after each: some points in the default
tests and the gate, all of them in the chaos run."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from async_wsync import BroadcastLock, EngineDied, EngineState, ModuleSource, Timeouts, UpdateFailed, WeightBroadcaster
from async_wsync.protocols import EventHook
from async_wsync.sources.bucket_stream import StagedBucket
from async_wsync.testing import CANCEL_KINDS, CancelKind, KillRun, cancel_at_every_await, kill_at_every_event
from async_wsync.transfer.checksum import combined_digest, model_digests
from async_wsync.types import UpdateEvent
from tests.support.changing_fleet import Samples, keep_sampling
from tests.support.fleet import LIMITS, NAMES, Rig, a_model, update_tasks
from tests.support.sweep_figures import Figures, Points, Promised, Verdict, measured_gaps
from tests.support.waiting import until

#: For engines that are stopped: each phase 2 s.
STOP_LIMITS = Timeouts(
    connect=3, lock=30, pause=2, flush=2, begin=2, bucket=2, idle=10, end=2, resume=2, drain=1.5, close=1
)
STOP_PHASE = 2.0
PART = ("1.", "3.")


@dataclass(frozen=True)
class Setting:
    """What is swept over. ``partial``: the update under test sends two layers of five, with ``strict=False``.
    ``generating``: the engines, whose actors are single-threaded, generate all the while."""

    topology: str = "shared"
    partial: bool = False
    generating: bool = False

    def __str__(self) -> str:
        words = ["partial"] * self.partial + ["generating"] * self.generating
        return ", ".join(([] if self.topology == "shared" else [self.topology]) + words)


SETTINGS = (Setting(), Setting(topology="per_engine"), Setting(partial=True), Setting(generating=True))


@dataclass
class Subject:
    """Engines under a setting, the versions that were sent to them, and the checksum that each version stands for."""

    rig: Rig
    setting: Setting
    names: Sequence[str]
    whole: dict[int, str] = field(default_factory=dict)
    samples: Samples = field(default_factory=Samples)
    _samplers: list[asyncio.Task[None]] = field(default_factory=list)

    def full(self, broadcaster: WeightBroadcaster, **options: Any) -> Coroutine[Any, Any, Any]:
        """An update with the weights that engines have before the one under test, and after their healing."""
        version = self.rig.next_version()
        self.whole[version] = combined_digest(model_digests(a_model(2).state_dict()))
        return broadcaster.update_weights(ModuleSource(a_model(2)), version=version, **options)

    def tested(self, broadcaster: WeightBroadcaster) -> Coroutine[Any, Any, Any]:
        """The update under test."""
        version, part = self.rig.next_version(), PART if self.setting.partial else ("",)
        state, new = a_model(2).state_dict(), a_model(1)
        state |= {name: tensor for name, tensor in new.state_dict().items() if name.startswith(part)}
        self.whole[version] = combined_digest(model_digests(state))
        source = ModuleSource(new, include=lambda name: name.startswith(part))
        return broadcaster.update_weights(source, version=version, strict=not self.setting.partial)

    def sample(self, name: str) -> None:
        """The engine generates until it dies; so does one that takes its place."""
        if self.setting.generating:
            sampling = keep_sampling(name, self.rig.handles[name], self.samples, pause=0.01, seconds=0.02)
            self._samplers.append(asyncio.create_task(sampling))

    async def end_samples(self) -> None:
        for sampler in self._samplers:
            sampler.cancel()
        ends = await asyncio.gather(*self._samplers, return_exceptions=True)
        failures = [end for end in ends if isinstance(end, Exception)]
        assert not failures, failures

    async def agrees(self, name: str, believed: EngineState, verdict: Verdict) -> None:
        """The engine is current, with the bytes of its version, or torn and paused; the broadcaster knows which."""
        (state, version), sample = await self.rig.state(name), await self.rig.sample(name)
        if believed is EngineState.TORN and state == "current":
            # A bucket was announced, of which no byte has reached it.
            verdict.check(sample is None, f"{name} is believed torn, and serves")
            return
        verdict.check(state == believed.value, f"{name} is {state}, the broadcaster believes {believed}")
        verdict.check(state in ("current", "torn"), f"{name} is {state}")
        verdict.check((sample is not None) is (state == "current"), f"{name} is {state}, serving {sample}")
        if state == "current" and sample is not None:
            verdict.check(sample == (version, self.whole.get(version or 0)), f"{name} is torn, and says {version}")

    async def heals(self, broadcaster: WeightBroadcaster, verdict: Verdict) -> None:
        """The next update works, at once. If not, one after it, so that the sweep can go on."""

        async def works() -> bool:
            try:
                await self.full(broadcaster, verify="engines")
            except UpdateFailed as failure:
                verdict.check(False, f"the next update: {failure}")
                return False
            states = set(broadcaster.engine_states.values())
            verdict.check(states == {EngineState.CURRENT}, f"the next update left {broadcaster.engine_states}")
            return states == {EngineState.CURRENT}

        await until(works)


@asynccontextmanager
async def subject(rig: Rig, setting: Setting, names: Sequence[str], figures: Figures) -> AsyncIterator[Subject]:
    subject = Subject(rig, setting, names)
    for name in names:
        subject.sample(name)
    try:
        yield subject
    finally:
        await subject.end_samples()
    # Before the first of these updates they hold what an earlier test has left.
    torn = [sample for sample in subject.samples.torn(subject.whole) if sample[0] in subject.whole]
    figures.wrong += [f"generated from a mix: {sample}" for sample in torn]
    assert subject.samples.count or not setting.generating


# ------------------------------------------------------------------------------- cancellation


async def cancel_sweep(
    rig: Rig,
    lock: BroadcastLock,
    *,
    kinds: Sequence[CancelKind] = CANCEL_KINDS,
    at: Iterable[int] | None = None,
    on_cancel: Any = "finish",
    names: Sequence[str] = NAMES[:2],
    setting: Setting = Setting(),
    promised: Promised,
    look_for_leaks_every: int = 25,
) -> Figures:
    """Cancel a clean update at each of its awaits; after each, all must be at rest and the next update must work."""
    figures = Figures(f"cancel {'/'.join(kinds)}, {on_cancel!r}" + (f", {setting}" if str(setting) else ""))
    points = Points(at)
    async with (
        measured_gaps() as gaps,
        rig.broadcaster(names, lock=lock, on_cancel=on_cancel, topology=setting.topology) as broadcaster,
        subject(rig, setting, names, figures) as fleet,
    ):
        await fleet.full(broadcaster)
        await gaps.begin()

        async for run in cancel_at_every_await(lambda: fleet.tested(broadcaster), kinds=kinds, at=points):
            verdict = Verdict(f"{run.kind} at await {run.at} of {run.awaits}", seconds=run.seconds)
            verdict.held_the_loop(await gaps.end(), limit=promised.loop_gap)
            verdict.check(run.outcome not in ("hung", "raised"), f"{run.outcome} {run.error!r}")
            verdict.check(run.cancelling == 0, f"cancelling {run.cancelling}")
            verdict.check(not update_tasks(), f"tasks left: {update_tasks()}")
            status = await lock.status(timeout=60)
            verdict.check(not status["held"] and not status["waiters"], f"lock {status}")
            for name in names:
                await fleet.agrees(name, broadcaster.engine_states[name], verdict)
            if figures.runs % look_for_leaks_every == look_for_leaks_every - 1:
                gc.collect()
                left = [o for o in gc.get_objects() if isinstance(o, StagedBucket) and o.wire]
                verdict.check(not left, f"{len(left)} buckets still referenced")
            await fleet.heals(broadcaster, verdict)
            figures.settle(verdict, points, hit=run.fired)
            await gaps.begin()
    return figures


# ------------------------------------------------------------------------------- kills and stops


async def fault_sweep(
    rig: Rig,
    lock: BroadcastLock,
    *,
    number: int = signal.SIGKILL,
    victims: Iterable[str] = NAMES,
    at: Iterable[int] | None = None,
    setting: Setting = Setting(),
    promised: Promised,
) -> Figures:
    """Kill (or stop) an engine at each event of an update; survivors must be whole or torn and paused, and heal."""
    killing = number == signal.SIGKILL
    figures = Figures(("kill -9" if killing else "SIGSTOP") + (f", {setting}" if str(setting) else ""))
    limits = LIMITS if killing else STOP_LIMITS
    bound = promised.first_failure if killing else STOP_PHASE + limits.drain + promised.settling
    hooks: list[EventHook] = []
    measured = (0.0, 0.0)
    points = Points(at)

    def on_event(event: UpdateEvent) -> None:
        if hooks:
            hooks[0](event)

    async with (
        measured_gaps() as gaps,
        rig.broadcaster(
            lock=lock, timeouts=limits, on_event=on_event, num_buffers=1, topology=setting.topology
        ) as broadcaster,
        subject(rig, setting, NAMES, figures) as fleet,
    ):

        async def scenario(hook: EventHook, victim: str) -> Any:
            nonlocal measured
            await fleet.full(broadcaster)
            await gaps.begin()
            hooks[:] = [hook]
            try:
                return await fleet.tested(broadcaster)
            finally:
                measured = await gaps.end()
                hooks.clear()

        def strike(name: str) -> None:
            rig.kill(name, number)

        async for run in kill_at_every_event(scenario, victims, strike, at=points):
            bucket = "" if run.event is None or run.event.bucket is None else f" {run.event.bucket}"
            verdict = Verdict(f"{run.victim} at {run.event.kind}{bucket}" if run.event else "a clean update")
            verdict.held_the_loop(measured, limit=promised.loop_gap)
            if not run.fired:
                verdict.check(run.error is None, f"failed: {run.error}")
            else:
                verdict.took(run.seconds_after, limit=bound)
                _check_error(run, verdict)
                verdict.check(not (await lock.status(timeout=60))["held"], "lock held")
                for name in NAMES:
                    if name != run.victim:
                        await fleet.agrees(name, broadcaster.engine_states[name], verdict)
                if killing:
                    await broadcaster.replace_engine(run.victim, await rig.revive(run.victim))
                    fleet.sample(run.victim)
                else:
                    rig.kill(run.victim, signal.SIGCONT)
                await fleet.heals(broadcaster, verdict)
                await rig.ready()
            figures.settle(verdict, points, hit=run.fired)
    return figures


def _check_error(run: KillRun[str], verdict: Verdict) -> None:
    assert run.event is not None
    if run.error is None:
        late = run.event.kind in ("resumed", "update_finished", "published")
        verdict.check(late, "nobody noticed")
        return
    named = isinstance(run.error, UpdateFailed) and run.error.at_fault == (run.victim,)
    verdict.check(named, f"{type(run.error).__name__} {getattr(run.error, 'at_fault', None)}: {run.error}")
    died = isinstance(run.error.__cause__, EngineDied) or run.victim in str(run.error.__cause__)
    verdict.check(died, f"cause {run.error.__cause__!r}")
