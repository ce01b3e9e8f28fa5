"""However a source's part in a round ends, it ends soon, and each source knows what the engines hold."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import ray
import torch

from async_wsync import BroadcastLock, EngineState, StateDictSource, TorchEngine, UpdateFailed, WeightBroadcaster
from async_wsync.errors import RoundFailed
from async_wsync.rounds.round import UpdateRound
from async_wsync.runtime.object_refs import await_ref
from async_wsync.testing import Fault, cancel_at_every_await
from async_wsync.types import UpdateEvent
from tests.support.fleet import LIMITS, Rig, a_model
from tests.support.waiting import until

ENGINES = ("e0", "e1")
FAST = replace(LIMITS, drain=2.0)
#: Promised is 1 s, and the drain to who is cancelled; the rest is for a busy machine. A wait that is not broken off
#: lasts as long as the lock is held, and would run into the test's own limit.
AT_ONCE = 10.0


def part(seed: int, index: int, count: int) -> dict[str, torch.Tensor]:
    state = a_model(seed).state_dict()
    return {name: tensor for name, tensor in state.items() if int(name.split(".")[0]) % count == index}


@dataclass
class Sources:
    """Broadcasters of one round, in one process. The first to be started leads."""

    rig: Rig
    lock: BroadcastLock
    round: UpdateRound
    broadcasters: list[WeightBroadcaster]
    events: list[list[str]]

    def start(self, index: int, version: int, *, alone: int | None = None) -> asyncio.Task[Any]:
        """``alone``: the one source that brings all tensors."""
        count = len(self.broadcasters) if alone is None else 1
        tensors = part(version, index, count) if alone in (None, index) else {}
        return asyncio.create_task(self.update_of(index, version, tensors), name=f"source {index}")

    async def update_of(self, index: int, version: int, tensors: dict[str, torch.Tensor] | None = None) -> Any:
        mine = part(version, index, len(self.broadcasters)) if tensors is None else tensors
        return await self.broadcasters[index].update_weights(StateDictSource(mine), version=version, round=self.round)

    async def phase(self) -> str:
        return str((await self.round.status()).get("phase"))

    async def gathering(self) -> None:
        async def gathers() -> bool:
            return await self.phase() == "gathering"

        await until(gathers)

    async def waits_for_the_lock(self, index: int) -> None:
        async def queued() -> bool:
            return any(f"source-{index} update" in w["label"] for w in (await self.lock.status())["waiters"])

        await until(queued)

    async def update(self, version: int) -> None:
        """One update that succeeds, whatever was before."""
        tasks = [self.start(index, version) for index in range(len(self.broadcasters))]
        await asyncio.gather(*tasks)
        for broadcaster in self.broadcasters:
            assert set(broadcaster.engine_states.values()) == {EngineState.CURRENT}
            assert broadcaster.version == version
        for name in ENGINES:
            assert await self.rig.holds(name, a_model(version))

    async def know_the_truth(self) -> None:
        """No source at rest takes an engine for whole on a version that it does not hold, or for being updated."""
        for broadcaster in self.broadcasters:
            for name, outcome in broadcaster._fleet.roster.outcomes().items():
                assert outcome.state in (EngineState.CURRENT, EngineState.TORN), (broadcaster, outcome)
                if outcome.state is EngineState.CURRENT:
                    assert outcome.version is not None
                    assert await self.rig.holds(name, a_model(outcome.version)), (broadcaster, outcome)


@asynccontextmanager
async def sources(rig: Rig, count: int = 2, **options: Any) -> AsyncIterator[Sources]:
    name = uuid.uuid4().hex[:6]
    lock = BroadcastLock.create(name=f"lock-{name}")
    round_ = UpdateRound.create(name=f"round-{name}", num_sources=count)
    events: list[list[str]] = [[] for _ in range(count)]

    def told(index: int) -> Any:
        def tell(event: UpdateEvent) -> None:
            events[index].append(event.kind)

        return tell

    broadcasters = [
        rig.broadcaster(ENGINES, lock=lock, timeouts=FAST, name=f"source-{index}", on_event=told(index), **options)
        for index in range(count)
    ]
    try:
        yield Sources(rig, lock, round_, broadcasters, events)
    finally:
        for broadcaster in broadcasters:
            await broadcaster.aclose()
        await lock.shutdown()
        ray.kill(round_._link.handle)


@asynccontextmanager
async def held(lock: BroadcastLock) -> AsyncIterator[None]:
    """The lock, as somebody else's: a task of its own, so that nobody waits for itself."""
    leave = asyncio.Event()
    ready = asyncio.Event()

    async def hold() -> None:
        async with lock.hold(label="another"):
            ready.set()
            await leave.wait()

    task = asyncio.create_task(hold())
    await ready.wait()
    try:
        yield
    finally:
        leave.set()
        await task


async def seconds_of(task: asyncio.Task[Any]) -> float:
    began = time.monotonic()
    await asyncio.wait([task], timeout=60)
    assert task.done()
    return time.monotonic() - began


async def both_in_the_middle(fleet: Sources, version: int) -> list[asyncio.Task[Any]]:
    """The leader sends, its second bucket takes a while, and the follower waits for the lock."""
    await fleet.rig.script("e1", Fault(do="delay", bucket=1, seconds=0.5))
    fired = len(await fleet.rig.fired("e1"))
    leader = fleet.start(0, version)
    await fleet.gathering()
    follower = fleet.start(1, version)

    async def slow() -> bool:
        return len(await fleet.rig.fired("e1")) > fired

    await until(slow)
    await fleet.waits_for_the_lock(1)
    return [leader, follower]


# ------------------------------------------------------------------------ what the sources know afterwards


async def test_a_follower_cancelled_before_its_first_turn_knows_that_the_leader_has_sent(rig: Rig) -> None:
    async with sources(rig) as fleet:
        await fleet.update(1)
        leader, follower = await both_in_the_middle(fleet, 2)
        follower.cancel()
        assert await seconds_of(follower) < AT_ONCE
        assert follower.cancelled()
        assert set(fleet.broadcasters[1].engine_states.values()) == {EngineState.TORN}
        with pytest.raises(UpdateFailed, match="source-1"):
            await leader
        await fleet.know_the_truth()
        await fleet.update(3)


async def test_a_source_without_tensors_that_is_cancelled_leaves_no_engine_updating(rig: Rig) -> None:
    async with sources(rig) as fleet:
        await fleet.update(1)
        await rig.script("e1", Fault(do="delay", bucket=1, seconds=0.5))
        leader = fleet.start(0, 2, alone=0)
        await fleet.gathering()
        follower = fleet.start(1, 2, alone=0)
        await until(lambda: set(fleet.broadcasters[1].engine_states.values()) == {EngineState.UPDATING})
        follower.cancel()
        await seconds_of(follower)
        assert set(fleet.broadcasters[1].engine_states.values()) == {EngineState.TORN}
        with pytest.raises(UpdateFailed, match="source-1"):
            await leader
        await fleet.update(3)


async def test_a_source_whose_joining_was_cut_short_fails_the_round_for_the_others(rig: Rig) -> None:
    """The round has let it in, and its answer found nobody."""
    async with sources(rig) as fleet:
        await fleet.update(1)
        leader = fleet.start(0, 2)
        await fleet.gathering()
        pid = await _pid_of(fleet.round)
        os.kill(pid, signal.SIGSTOP)
        try:
            follower = fleet.start(1, 2)
            await asyncio.sleep(0.5)
            follower.cancel()
            await asyncio.sleep(0.1)
        finally:
            os.kill(pid, signal.SIGCONT)
        await asyncio.wait([leader, follower], timeout=AT_ONCE)
        assert follower.cancelled()
        with pytest.raises(UpdateFailed, match="source-1"):
            await leader
        await fleet.know_the_truth()
        await fleet.update(3)


async def _pid_of(round_: UpdateRound) -> int:
    await round_.status()
    return int(await await_ref(round_._link.handle.__ray_call__.remote(lambda _: os.getpid())))


@pytest.mark.parametrize("role", ["leader", "follower"])
async def test_a_source_cancelled_at_any_await_leaves_no_source_in_error_about_an_engine(rig: Rig, role: str) -> None:
    async with sources(rig) as fleet:
        await fleet.update(1)
        versions = itertools.count(2)
        other: asyncio.Task[Any] | None = None

        async def victim() -> Any:
            nonlocal other
            version = next(versions)
            if role == "follower":
                other = fleet.start(0, version)
                await fleet.gathering()
                return await fleet.update_of(1, version)
            asyncio.get_running_loop().call_later(0.05, start_follower, version)
            return await fleet.update_of(0, version)

        def start_follower(version: int) -> None:
            nonlocal other
            other = fleet.start(1, version)

        outcomes = []
        points = [*range(6, 60, 8), *range(60, 240, 30)]
        async for run in cancel_at_every_await(victim, kinds=["once"], at=points, limit=30):
            assert run.outcome in ("cancelled", "returned"), run
            outcomes.append(run.outcome)
            while other is None:
                await asyncio.sleep(0.01)
            while not other.done():
                if await fleet.phase() == "gathering":
                    other.cancel()  # alone, and would wait as long as for the lock
                await asyncio.wait([other], timeout=0.1)
            assert other.cancelled() or isinstance(other.exception(), UpdateFailed | None), run
            other = None
            await fleet.know_the_truth()
            await fleet.update(next(versions))
        assert outcomes.count("cancelled") >= 5


# ------------------------------------------------------------------------ how soon it ends


@pytest.mark.parametrize("role", ["leader", "follower"])
async def test_a_source_that_waits_for_the_lock_of_a_round_leaves_at_once_when_cancelled(rig: Rig, role: str) -> None:
    async with sources(rig) as fleet:
        await fleet.update(1)
        index = 0 if role == "leader" else 1
        if role == "leader":
            async with held(fleet.lock):
                tasks = [fleet.start(0, 2)]
                await fleet.gathering()
                tasks.append(fleet.start(1, 2))
                await fleet.waits_for_the_lock(0)
                tasks[0].cancel()
                assert await seconds_of(tasks[0]) < AT_ONCE
                assert await seconds_of(tasks[1]) < AT_ONCE
        else:
            tasks = await both_in_the_middle(fleet, 2)
            tasks[1].cancel()
            assert await seconds_of(tasks[1]) < AT_ONCE
            assert await seconds_of(tasks[0]) < AT_ONCE
        assert tasks[index].cancelled()
        with pytest.raises(UpdateFailed):
            await tasks[1 - index]
        await fleet.know_the_truth()
        await fleet.update(3)


@asynccontextmanager
async def leader_waits_to_close(fleet: Sources, version: int) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """All parts are sent, and the leader waits for the lock, which somebody else has got in between."""
    await fleet.rig.script("e1", Fault(do="delay", bucket=1, seconds=0.5))
    tasks = await both_in_the_middle(fleet, version)
    async with held(fleet.lock):  # queued behind the follower
        await fleet.waits_for_the_lock(0)
        yield tasks


async def test_a_leader_that_waits_for_the_lock_to_close_ends_within_the_drain_when_cancelled(rig: Rig) -> None:
    async with sources(rig) as fleet:
        await fleet.update(1)
        async with leader_waits_to_close(fleet, 2) as (leader, follower):
            leader.cancel()
            assert await seconds_of(leader) < AT_ONCE
            assert leader.cancelled()
            assert await seconds_of(follower) < AT_ONCE
        with pytest.raises(UpdateFailed, match="source-0"):
            await follower
        for broadcaster in fleet.broadcasters:
            assert set(broadcaster.engine_states.values()) == {EngineState.TORN}
        await fleet.update(3)


async def test_the_failure_of_another_source_ends_the_wait_for_the_lock(rig: Rig) -> None:
    """Whoever waits: a leader to close, or, before, a leader to open."""
    async with sources(rig) as fleet:
        await fleet.update(1)
        async with leader_waits_to_close(fleet, 2) as (leader, follower):
            follower.cancel()
            assert await seconds_of(leader) < AT_ONCE
        with pytest.raises(UpdateFailed, match="source-1"):
            await leader
        async with held(fleet.lock):
            tasks = [fleet.start(0, 3)]
            await fleet.gathering()
            tasks.append(fleet.start(1, 3))
            await fleet.waits_for_the_lock(0)
            fleet.events[0].clear()
            tasks[1].cancel()
            assert await seconds_of(tasks[0]) < AT_ONCE
        with pytest.raises(UpdateFailed, match="source-1"):
            await tasks[0]
        assert "lock_acquired" not in fleet.events[0]
        await fleet.update(4)


# ------------------------------------------------------------------------ who never comes


class Unready(StateDictSource):
    """A source whose manifest takes ``seconds`` and then fails."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__({})
        self.seconds = seconds
        self.asked = threading.Event()

    def manifest(self) -> Any:
        self.asked.set()
        time.sleep(self.seconds)
        raise RuntimeError("no manifest")


class Mute(TorchEngine):
    """An engine that this source can't reach."""

    async def hello(self, call: Any) -> Any:
        raise RuntimeError("no route")


async def never_comes(fleet: Sources, how: str, version: int) -> str:
    """The second source fails before it has joined its round; returns the reason that the others are to be told."""
    broadcaster = fleet.broadcasters[1]
    if how == "hello":
        await broadcaster.replace_engine("e1", Mute(fleet.rig.handles["e1"], name="e1"))
        with pytest.raises(UpdateFailed, match="no route"):
            await fleet.update_of(1, version)
        await broadcaster.replace_engine("e1", fleet.rig.engines(["e1"])[0])
        return "no route"
    source = Unready(0.0 if how == "manifest" else 1.0)
    task = asyncio.create_task(broadcaster.update_weights(source, version=version, round=fleet.round))
    await until(source.asked.is_set)
    if how == "cancel":
        task.cancel()
        assert await seconds_of(task) < AT_ONCE
        assert task.cancelled()
        return "cancelled"
    if how == "close":
        await broadcaster.aclose()
    with pytest.raises(UpdateFailed):
        await task
    if how == "close":
        await broadcaster.connect()
        return "was closed"
    return "no manifest"


@pytest.mark.parametrize("how", ["manifest", "hello", "cancel", "close"])
async def test_a_source_that_fails_before_it_has_joined_ends_the_round_for_who_waits(rig: Rig, how: str) -> None:
    async with sources(rig) as fleet:
        await fleet.update(1)
        first = fleet.start(0, 2)
        await fleet.gathering()
        why = await never_comes(fleet, how, 2)
        assert await seconds_of(first) < AT_ONCE
        with pytest.raises(UpdateFailed, match=f"(?s)source 'source-1': .*{why}") as caught:
            await first
        assert isinstance(caught.value.__cause__, RoundFailed)
        assert not caught.value.started
        assert set(fleet.broadcasters[0].engine_states.values()) == {EngineState.CURRENT}
        await fleet.update(2)


@pytest.mark.parametrize("how", ["manifest", "hello", "cancel", "close"])
async def test_who_comes_after_a_source_that_failed_before_it_joined_is_told_so_once(rig: Rig, how: str) -> None:
    async with sources(rig) as fleet:
        await fleet.update(1)
        why = await never_comes(fleet, how, 2)
        first = fleet.start(0, 2)
        assert await seconds_of(first) < AT_ONCE
        with pytest.raises(UpdateFailed, match=f"(?s)source 'source-1': .*{why}") as caught:
            await first
        assert not caught.value.started
        assert set(fleet.broadcasters[0].engine_states.values()) == {EngineState.CURRENT}
        await fleet.update(2)


async def test_a_call_that_waits_for_its_brother_in_a_round_fails_only_its_own_version(rig: Rig) -> None:
    async with sources(rig) as fleet:
        await fleet.update(1)
        leader, follower = await both_in_the_middle(fleet, 2)
        queued = fleet.start(1, 3)  # behind its own update to version 2
        await asyncio.sleep(0.05)
        queued.cancel()
        await asyncio.gather(leader, follower)
        assert await seconds_of(queued) < AT_ONCE
        assert queued.cancelled()
        with pytest.raises(UpdateFailed, match="source 'source-1': it was cancelled"):
            await fleet.start(0, 3)
        await fleet.update(3)


# ------------------------------------------------------------------------ who does not fit


async def refused(fleet: Sources, tasks: list[asyncio.Task[Any]], match: str) -> None:
    began = time.monotonic()
    await asyncio.wait(tasks, timeout=AT_ONCE)
    assert all(task.done() for task in tasks), time.monotonic() - began
    for task in tasks:
        with pytest.raises(UpdateFailed, match=match) as caught:
            await task
        assert isinstance(caught.value.__cause__, RoundFailed)


async def test_sources_with_other_engines_than_the_first_end_the_round_for_all(rig: Rig) -> None:
    async with sources(rig, 3) as fleet:
        await fleet.update(1)
        await fleet.broadcasters[1].remove_engines(["e1"])
        tasks = []
        for index in range(3):
            tasks.append(fleet.start(index, 2))
            await asyncio.sleep(0.3)
        await refused(fleet, tasks, r"'source-1' sends to \['e0'\], but 'source-0' to \['e0', 'e1'\]")
        assert set(fleet.broadcasters[0].engine_states.values()) == {EngineState.CURRENT}
        await fleet.broadcasters[1].add_engines(rig.engines(["e1"]))
        await fleet.update(2)


async def test_a_source_with_another_version_ends_the_round_for_all(rig: Rig) -> None:
    async with sources(rig) as fleet:
        first = fleet.start(0, 7)
        await fleet.gathering()
        await refused(fleet, [first, fleet.start(1, 8)], "'source-1' brings version 8, but 'source-0' version 7")
        await fleet.update(9)


async def test_two_sources_of_one_name_end_the_round_for_all(rig: Rig) -> None:
    async with sources(rig) as fleet:
        twin = rig.broadcaster(ENGINES, lock=fleet.lock, timeouts=FAST, name="source-0")
        first = fleet.start(0, 1)
        await fleet.gathering()
        second = asyncio.create_task(twin.update_weights(StateDictSource(part(1, 1, 2)), version=1, round=fleet.round))
        await refused(fleet, [first, second], "two sources call themselves 'source-0'")
        await twin.aclose()
        await fleet.update(2)


async def test_a_round_made_for_another_number_of_sources_ends_for_all(rig: Rig) -> None:
    async with sources(rig) as fleet:
        first = fleet.start(0, 1)
        await fleet.gathering()
        fleet.round = UpdateRound.create(name=fleet.round.name, num_sources=3)
        await refused(fleet, [first, fleet.start(1, 1)], "made the round for 3 sources, but it exists for 2")
