"""Sweeps over a changing fleet, a number of times each: `tests/ray` runs them in short, `tests/chaos` in full."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from async_wsync import BroadcastLock, WeightBroadcaster
from async_wsync.protocols import EventHook
from async_wsync.rounds.round import UpdateRound
from async_wsync.testing import Fault, kill_at_every_event
from async_wsync.types import UpdateEvent
from tests.support.changing_fleet import (
    BUCKET_BYTES,
    LIMITS,
    Engines,
    Samples,
    SparePool,
    checksum,
    is_free,
    keep_sampling,
    resources,
    source,
)
from tests.support.lock_scenarios import Figures
from tests.support.round_sources import SourceActor

SETTINGS: dict[str, Any] = {"timeouts": LIMITS, "progress": False, "bucket_bytes": BUCKET_BYTES}


class _Telling:
    """Passes events on to whoever is set, so that one broadcaster can serve many replays."""

    def __init__(self) -> None:
        self.hook: EventHook | None = None

    def __call__(self, event: UpdateEvent) -> None:
        if self.hook is not None:
            self.hook(event)


async def drop_sweep(*, victims: Iterable[str], points: Iterable[int] | None) -> Figures:
    """kill -9 of each victim at each event of an update with ``on_engine_failure="drop"``; then its replacement catches
    up without a word to the others."""
    victims, points = list(victims), None if points is None else list(points)
    pool = SparePool(total=None if points is None else len(points) * len(victims))
    engines = await Engines.start(3)
    lock = BroadcastLock.create(name=f"lock-{uuid.uuid4().hex[:8]}", ttl=8.0)
    telling = _Telling()
    figures = Figures("engine j killed at the i-th event, drop: seconds from the kill to the end of the update")
    version = 1
    good = runs = 0
    async with WeightBroadcaster(
        engines.adapters(), lock=lock, on_engine_failure="drop", on_event=telling, **SETTINGS
    ) as casting:
        await casting.update_weights(source(version), version=version)

        async def scenario(on_event: EventHook, victim: str) -> Any:
            nonlocal version
            version += 1
            telling.hook = on_event
            try:
                return await casting.update_weights(source(version), version=version)
            finally:
                telling.hook = None

        async for run in kill_at_every_event(scenario, victims, engines.kill, at=points):
            if not run.fired:
                continue
            runs += 1
            assert run.error is None, (run.at, run.event, run.error)
            figures.seconds.append(run.seconds_after)
            survivors = [name for name in engines.handles if name != run.victim]
            assert set(survivors) <= set(casting.current_engines()), (run.at, run.event, casting)
            late = {"resumed", "update_finished"}
            assert run.value.dropped == (run.victim,) or (run.event is not None and run.event.kind in late)
            assert all([await engines.holds(name, version) for name in survivors]), (run.at, run.event)
            assert await is_free(lock, within=0.5)
            await casting.replace_engine(run.victim, await engines.put(run.victim, await pool.take()))
            moment = time.time()
            assert await casting.catch_up(source(version)) is not None
            assert await engines.holds(run.victim, version)
            for name in survivors:
                assert not await engines.verbs_since(name, moment), (run.at, run.event)
            good += 1
    figures.repeats = runs
    figures.facts["survivors current"] = f"{good} of {runs}"
    await lock.shutdown()
    engines.close()
    pool.close()
    return figures


async def replace_many(*, times: int) -> Figures:
    """Replace an engine over and over; how much this process, the source, has grown by."""
    engines, pool = await Engines.start(2), SparePool(2, total=1 + times)
    figures = Figures("engines replaced one after another: growth of the source", repeats=times)
    async with WeightBroadcaster(engines.adapters(), lock=None, **SETTINGS) as casting:
        await casting.update_weights(source(1), version=1)
        await _replace(casting, engines, pool, 2)  # the first time opens what stays open
        before = resources()
        members = len(casting.engine_states)
        for turn in range(times):
            began = time.monotonic()
            await _replace(casting, engines, pool, 3 + turn)
            figures.seconds.append(time.monotonic() - began)
        await asyncio.sleep(0.5)
        after = resources()
        assert len(casting.engine_states) == members
        assert len(casting.current_engines()) == members
    figures.facts = {key: after[key] - before[key] for key in ("fds", "threads")}
    engines.close()
    pool.close()
    return figures


async def _replace(casting: WeightBroadcaster, engines: Engines, pool: SparePool, version: int) -> None:
    old = engines.handles["e1"]
    await casting.replace_engine("e1", await engines.put("e1", await pool.take()))
    ray.kill(old)
    await casting.update_weights(source(version), version=version)
    assert await engines.holds("e1", version)


# --------------------------------------------------------------------------------------- several sources


@dataclass
class Rounds:
    """Engines, two source actors, and the lock and round that they share."""

    engines: Engines
    lock: BroadcastLock
    round: UpdateRound
    sources: list[Any]
    scope: str = "update"
    version: int = 0
    whole: dict[int, str] = field(default_factory=dict)

    @classmethod
    async def start(cls, num_engines: int, *, ttl: float = 8.0) -> Rounds:
        name = uuid.uuid4().hex[:8]
        lock = BroadcastLock.create(name=f"lock-{name}", ttl=ttl)
        round_ = UpdateRound.create(name=f"round-{name}", num_sources=2)
        sources = [SourceActor.remote(i, lock, round_) for i in range(2)]
        rounds = cls(await Engines.start(num_engines), lock, round_, sources)
        for index in range(2):
            await rounds.connect(index)
        return rounds

    async def connect(self, index: int, names: Sequence[str] | None = None) -> None:
        names = list(names or self.engines.handles)
        handles = [self.engines.handles[name] for name in names]
        await self.sources[index].connect.remote(handles, names, lock_scope=self.scope)

    async def replace_source(self, index: int) -> None:
        self.sources[index] = SourceActor.remote(index, self.lock, self.round)
        await self.connect(index)

    def next_version(self) -> int:
        """The next version, whose model has it as its seed."""
        self.version += 1
        self.whole[self.version] = checksum(self.version)
        return self.version

    async def update(self) -> list[dict[str, Any]]:
        version = self.next_version()
        return list(await asyncio.gather(*(s.update.remote(version, version) for s in self.sources)))

    async def hold_current(self) -> bool:
        return all([await self.engines.holds(name, self.version) for name in self.engines.handles])

    async def close(self) -> None:
        for source_ in self.sources:
            ray.kill(source_)
        self.engines.close()
        await self.lock.shutdown()


async def source_kill_sweep(*, points: Iterable[int] | None) -> Figures:
    """kill -9 of each source of a two-source round at each of its events; ``seconds``: until the other has ended."""
    rounds = await Rounds.start(2)
    figures = Figures("source killed at its i-th event of a round: seconds until the other one knows")
    # A round knows its sources from the first update on; one that never came is only waited for.
    assert [o["error"] for o in await rounds.update()] == [None, None]
    healed = 0
    for victim in (0, 1):
        for at in itertools.count(1) if points is None else points:
            version = rounds.next_version()
            other = rounds.sources[1 - victim].update.remote(version, version)
            try:
                await rounds.sources[victim].update.remote(version, version, kill_at=at)
                await other
                break  # it told of fewer events than that
            except ray.exceptions.RayActorError:
                died = time.monotonic()
            outcome = await other
            figures.seconds.append(time.monotonic() - died)
            figures.repeats += 1
            kept = {"current"} if outcome["error"] is None else set(outcome["states"].values())
            assert kept in ({"current"}, {"torn"}), (victim, at, outcome)
            await rounds.replace_source(victim)
            outcomes = await rounds.update()
            assert [o["error"] for o in outcomes] == [None, None], (victim, at, outcomes)
            healed += await rounds.hold_current()
    figures.facts["healed"] = f"{healed} of {figures.repeats}"
    await rounds.close()
    return figures


async def opposite_orders(*, times: int) -> Figures:
    """Two sources connect to the same engines in opposite order, over and over; a deadlock is a TimeoutError."""
    rounds = await Rounds.start(2)
    figures = Figures("two sources connect in opposite order: seconds for both", repeats=times)
    names = list(rounds.engines.handles)
    for _ in range(times):
        await asyncio.gather(*(s.close.remote() for s in rounds.sources))
        began = time.monotonic()
        both = asyncio.gather(rounds.connect(0, names), rounds.connect(1, names[::-1]))
        await asyncio.wait_for(both, timeout=LIMITS.lock + LIMITS.connect)
        figures.seconds.append(time.monotonic() - began)
    figures.facts["deadlocks"] = 0
    await rounds.close()
    return figures


# ------------------------------------------------------------------------------------------ random chaos

FAULTS = ("kill engine", "stop engine", "engine error", "cancel", "kill source", "kill lock server")
STEADY_ENGINES, STEADY_SOURCE = ("e0", "e1"), 0  # never killed, so that their growth can be told


@dataclass
class Chaos:
    """Updates by two sources to four engines that generate all the while, with a fault now and then."""

    rounds: Rounds
    pool: SparePool
    draw: random.Random
    samples: Samples = field(default_factory=Samples)
    samplers: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    hangs: int = 0
    leaks: int = 0
    failed: int = 0

    def sample(self, name: str) -> None:
        handle = self.rounds.engines.handles[name]
        self.samplers[name] = asyncio.create_task(keep_sampling(name, handle, self.samples, pause=0.05))

    async def update(self) -> list[Any]:
        """One update by both sources, however each of them ends."""
        version = self.rounds.next_version()
        began = time.monotonic()
        updates = [s.update.remote(version, version) for s in self.rounds.sources]
        outcomes = await asyncio.gather(*updates, return_exceptions=True)
        self.hangs += time.monotonic() - began > LIMITS.total + 2.0
        self.failed += any(isinstance(o, Exception) or o["error"] for o in outcomes)
        return outcomes

    async def faulty_update(self, fault: str) -> None:
        engines = self.rounds.engines
        delay = self.draw.uniform(0.0, 0.25)
        victim = self.draw.choice(("e2", "e3"))
        update = asyncio.create_task(self.update())
        await asyncio.sleep(delay)
        self.done[fault] = self.done.get(fault, 0) + 1
        match fault:
            case "kill engine":
                engines.kill(victim)
            case "stop engine":
                with engines.stopped(victim):
                    await update
            case "engine error":
                await engines.handles[victim].set_script.remote([Fault(do="raise_before", at="receive")])
            case "cancel":
                await self.draw.choice(self.rounds.sources).cancel.remote()
            case "kill source":
                ray.kill(self.rounds.sources[1 - STEADY_SOURCE])
            case "kill lock server":
                status = await self.rounds.lock.status()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(status["server_pid"], signal.SIGKILL)
        await update
        await self.repair(fault, victim)

    async def repair(self, fault: str, victim: str) -> None:
        """What an orchestrator does: put new processes in the places of dead ones."""
        if fault == "kill engine":
            adapter_of = self.rounds.engines
            await adapter_of.put(victim, await self.pool.take())
            await asyncio.gather(*(s.replace.remote(victim, adapter_of.handles[victim]) for s in self.rounds.sources))
            self.sample(victim)
        elif fault == "kill source":
            await self.rounds.replace_source(1 - STEADY_SOURCE)
        elif fault == "engine error":
            await self.rounds.engines.handles[victim].set_script.remote([])
        wait = 30.0 if fault == "kill lock server" else 1.0
        self.leaks += not await is_free(self.rounds.lock, within=wait)

    async def resources_at_rest(self) -> list[dict[str, int]]:
        """After an update that reached everybody: with all groups and connections there, however the last one ended."""
        outcomes = await self.update()
        assert [o["error"] for o in outcomes] == [None, None], outcomes
        assert await self.rounds.hold_current()
        await asyncio.sleep(0.5)
        steady = [self.rounds.engines.handles[name] for name in STEADY_ENGINES]
        return list(
            await asyncio.gather(
                *(engine.resources.remote() for engine in steady),
                self.rounds.sources[STEADY_SOURCE].resources.remote(),
            )
        )


async def random_chaos(*, updates: int, every: int, seed: int) -> Figures:
    """``updates`` updates, each ``every``-th with a fault at a random moment; see `FAULTS`."""
    chaos = Chaos(await Rounds.start(4, ttl=3.0), SparePool(), random.Random(seed))
    figures = Figures(f"random chaos, seed {seed}: seconds an update", repeats=updates)
    for name in chaos.rounds.engines.handles:
        chaos.sample(name)
    before: list[dict[str, int]] | None = None
    for turn in range(1, updates + 1):
        began = time.monotonic()
        if turn % every:
            await chaos.update()
        else:
            await chaos.faulty_update(FAULTS[turn // every % len(FAULTS)])
        figures.seconds.append(time.monotonic() - began)
        if turn == max(updates // 4, 1):
            before = await chaos.resources_at_rest()
    after = await chaos.resources_at_rest()
    assert before is not None
    for sampler in chaos.samplers.values():
        sampler.cancel()
    await asyncio.gather(*chaos.samplers.values(), return_exceptions=True)
    growth = [100.0 * (b["rss"] - a["rss"]) / a["rss"] for a, b in zip(before, after, strict=True)]
    figures.facts = {
        "faults": sum(chaos.done.values()),
        "updates failed": chaos.failed,
        "samples": chaos.samples.count,
        "torn samples": len(chaos.samples.torn(chaos.rounds.whole)),
        "hangs": chaos.hangs,
        "lock leaks": chaos.leaks,
        "RSS growth %": round(max(growth), 1),
        **{key: max(b[key] - a[key] for a, b in zip(before, after, strict=True)) for key in ("fds", "threads")},
        "tasks": after[-1]["tasks"] - before[-1]["tasks"],
    }
    await chaos.rounds.close()
    chaos.pool.close()
    return figures
