"""What can go wrong at engines, sources and groups, made to happen: what comes out, how soon, and what is left."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import ray
import torch

from async_wsync import (
    BroadcastLock,
    EngineDied,
    EngineFailed,
    EngineState,
    EngineTimeout,
    IterableSource,
    PhaseTimeout,
    RendezvousError,
    SourceError,
    TorchEngine,
    WeightBroadcaster,
)
from async_wsync.groups.rendezvous import Rendezvous
from async_wsync.testing import Fault, LoopGapMeter, PortSquatter, start_engine
from async_wsync.types import Call, GroupSpec
from tests.support.cluster import RayCluster
from tests.support.fleet import (
    BUCKET_BYTES,
    LIMITS,
    SOON,
    Events,
    Rig,
    a_model,
    a_source,
    call,
    failure_of,
    has_fired,
    heals,
    is_free,
    received,
    set_limits,
)
from tests.support.waiting import until

# ---------------------------------------------------- first failure wins


async def test_an_engines_own_error_comes_out_long_before_the_groups_timeout(rig: Rig, lock: BroadcastLock) -> None:
    limits = replace(LIMITS, bucket=20)
    await rig.script("e0", Fault(do="raise_before", bucket=1, error=KeyError("lm_head")))
    async with rig.broadcaster(lock=lock, timeouts=limits, num_buffers=1) as broadcaster:
        failure, seconds = await failure_of(broadcaster.update_weights(a_source(1), version=rig.next_version()))
        assert await rig.fired("e0") == ["raise_before at receive"]
        assert seconds < SOON
        cause = failure.__cause__
        assert isinstance(cause, EngineFailed)
        assert isinstance(cause.__cause__, KeyError)
        assert (cause.engine, cause.phase, cause.bucket) == ("e0", "receive", 1)
        assert failure.at_fault == ("e0",)
        assert {o.state for o in failure.outcomes.values()} == {EngineState.TORN}
        assert "lm_head" in str(failure)
        assert re.search(r"e1 +torn", str(failure))
        assert await is_free(lock)
        await heals(rig, broadcaster)


async def test_a_failure_in_the_middle_tears_and_pauses_and_the_next_update_heals(rig: Rig) -> None:
    events = Events()
    async with rig.broadcaster(["e0", "e1"], on_event=events, num_buffers=1) as broadcaster:
        before = await broadcaster.update_weights(a_source(1), version=rig.next_version())
        # Late, so that the other engine has acknowledged the bucket by then.
        await rig.script("e1", Fault(do="raise_after", bucket=2, error=ValueError("bad scale"), seconds=0.3))
        failure, _ = await failure_of(broadcaster.update_weights(a_source(2), version=rig.next_version()))
        assert await rig.fired("e1") == ["raise_after at receive"]
        assert [o.last_bucket for o in failure.outcomes.values()] == [2, 1]
        assert failure.bucket == 2
        for name in ("e0", "e1"):
            assert failure.outcomes[name].state is EngineState.TORN
            assert (await rig.state(name))[0] == "torn"
            assert not await rig.serves(name)
        assert broadcaster.version == before.version
        assert broadcaster.current_engines() == ()
        assert events.kinds().count("engine_torn") == 2
        assert events.kinds()[-1] == "update_failed"
        await heals(rig, broadcaster)


@pytest.mark.parametrize(
    "answer",
    [{"success": False, "message": "no space"}, (False, "no space"), None, False],
    ids=["success False", "tuple", "None", "False"],
)
@pytest.mark.parametrize("at", ["begin", "receive", "publish"])
async def test_an_answer_that_means_failure_is_one(rig: Rig, answer: Any, at: str) -> None:
    await rig.script("e0", Fault(do="answer", at=at, answer=answer))
    async with rig.broadcaster(["e0"]) as broadcaster:
        failure, seconds = await failure_of(broadcaster.update_weights(a_source(1), version=rig.next_version()))
        assert await rig.fired("e0") == [f"answer at {at}"]
        assert broadcaster.version is None
        assert failure.at_fault == ("e0",)
        assert seconds < SOON
        if isinstance(answer, dict | tuple):
            assert "no space" in str(failure)


async def test_a_failure_after_the_last_bucket_publishes_nothing(rig: Rig) -> None:
    async with rig.broadcaster(["e0", "e1"]) as broadcaster:
        first = await broadcaster.update_weights(a_source(1), version=rig.next_version())
        await rig.script("e1", Fault(do="raise_before", at="end"))
        await failure_of(broadcaster.update_weights(a_source(2), version=rig.next_version()))
        assert await rig.fired("e1") == ["raise_before at end"]
        assert broadcaster.version == first.version
        assert set(broadcaster.engine_states.values()) == {EngineState.TORN}
        assert [await rig.serves(name) for name in ("e0", "e1")] == [False, False]
        assert "publish" not in [s.verb for s in (await rig.seen("e0"))[-4:]]
        await heals(rig, broadcaster)


async def test_a_source_that_fails_says_so_and_whole_engines_go_on(rig: Rig, lock: BroadcastLock) -> None:
    state = a_model(1).state_dict()
    manifest = a_source(1).manifest()

    def breaking(after: int) -> Iterator[tuple[str, torch.Tensor]]:
        for i, (name, tensor) in enumerate(state.items()):
            if i == after:
                raise ZeroDivisionError("the trainer broke")
            yield name, tensor

    async with rig.broadcaster(["e0", "e1"], lock=lock) as broadcaster:
        await broadcaster.update_weights(a_source(1), version=rig.next_version())
        for after, state_after in ((0, EngineState.CURRENT), (6, EngineState.TORN)):
            source = IterableSource(breaking(after), manifest=manifest)
            failure, _ = await failure_of(broadcaster.update_weights(source, version=rig.next_version()))
            assert isinstance(failure.__cause__, SourceError)
            assert isinstance(failure.__cause__.__cause__, ZeroDivisionError)
            assert set(broadcaster.engine_states.values()) == {state_after}
            assert await rig.serves("e0") is (state_after is EngineState.CURRENT)
            assert failure.at_fault == ()
            assert await is_free(lock)
        await heals(rig, broadcaster)


async def test_a_source_that_stalls_is_bounded_by_idle(rig: Rig) -> None:
    import threading

    gate = threading.Event()
    manifest, state = a_source(1).manifest(), a_model(1).state_dict()

    def stalling() -> Iterator[tuple[str, torch.Tensor]]:
        gate.wait(30)
        yield from state.items()

    limits = replace(LIMITS, idle=0.5, close=1)
    async with rig.broadcaster(["e0"], timeouts=limits) as broadcaster:
        source = IterableSource(stalling, manifest=manifest)
        failure, seconds = await failure_of(broadcaster.update_weights(source, version=rig.next_version()))
        gate.set()
        assert isinstance(failure.__cause__, PhaseTimeout)
        assert failure.__cause__.field == "idle"
        assert "Timeouts.idle" in str(failure)
        assert 0.5 <= seconds < SOON
        await heals(rig, broadcaster)


# ----------------------------------------------------------------- hangs


async def test_an_engine_killed_with_a_bucket_on_its_way_is_named_at_once(rig: Rig, lock: BroadcastLock) -> None:
    async with rig.broadcaster(lock=lock) as broadcaster:
        await broadcaster.update_weights(a_source(1), version=rig.next_version())
        await rig.script("e1", Fault(do="exit", bucket=1))
        failure, seconds = await failure_of(broadcaster.update_weights(a_source(2), version=rig.next_version()))
        assert isinstance(failure.__cause__, EngineDied)
        assert failure.at_fault == ("e1",)
        assert seconds < SOON
        assert [o.state.value for o in failure.outcomes.values()] == ["torn", "lost", "torn"]
        assert await is_free(lock)
        # Nobody replaced it: the next update notices before it even asks for the lock.
        async with lock.hold(label="somebody else", timeout=30):
            update = broadcaster.update_weights(a_source(2), version=rig.next_version())
            unreachable, _ = await asyncio.create_task(failure_of(update))
        assert unreachable.phase == "hello"
        assert unreachable.at_fault == ("e1",)
        await broadcaster.replace_engine("e1", await rig.revive("e1"))
        assert broadcaster.engine_states["e1"] is EngineState.STALE
        assert "e1" not in broadcaster.current_engines()
        await heals(rig, broadcaster)


async def test_a_stopped_engine_costs_the_bucket_limit_and_is_quarantined(rig: Rig, lock: BroadcastLock) -> None:
    limits = replace(LIMITS, bucket=1.5, drain=2.0)
    events = Events()
    await rig.script("e1", Fault(do="stop", bucket=1))
    async with rig.broadcaster(lock=lock, timeouts=limits, on_event=events) as broadcaster:
        with LoopGapMeter() as meter:
            try:
                failure, seconds = await failure_of(broadcaster.update_weights(a_source(2), version=rig.next_version()))
            finally:
                rig.kill("e1", signal.SIGCONT)
        assert await rig.fired("e1") == ["stop at receive"]
        assert isinstance(failure.__cause__, EngineTimeout)
        assert failure.at_fault == ("e1",)
        assert failure.__cause__.field in ("bucket", "drain")
        assert [o.state.value for o in failure.outcomes.values()] == ["torn", "lost", "torn"]
        assert seconds < limits.bucket + limits.drain + SOON
        assert [e.engine for e in events if e.kind == "engine_lost"] == ["e1"]
        assert await is_free(lock)
        assert meter.longest < 0.5
        # It runs again, answers the next hello, and is healed like the others. Give it time: it was asked a lot.
        set_limits(broadcaster, LIMITS)
        await heals(rig, broadcaster)


async def test_an_engine_that_never_joins_is_named_within_the_connect_limit(rig: Rig) -> None:
    await rig.script("e1", Fault(do="skip", at="join"))
    limits = replace(LIMITS, connect=3.0)
    started = time.monotonic()
    with pytest.raises(RendezvousError, match=r"rank 2 \(e1\)") as missing:
        async with rig.broadcaster(["e0", "e1"], timeouts=limits):
            pass
    assert await rig.fired("e1") == ["skip at join"]
    assert missing.value.missing_ranks == (2,)
    assert (missing.value.phase, missing.value.step) == ("connect", "hello")
    assert time.monotonic() - started < limits.connect + SOON
    async with rig.broadcaster(["e0", "e1"]) as broadcaster:
        await heals(rig, broadcaster)
    # The same within an update: the one that is missing is at fault, not those that waited for it.
    async with rig.broadcaster(["e0"], timeouts=replace(LIMITS, connect=2.0)) as broadcaster:
        await rig.script("e1", Fault(do="skip", at="join"))
        await broadcaster.add_engines(rig.engines(["e1"]))
        failure, _ = await failure_of(broadcaster.update_weights(a_source(1), version=rig.next_version()))
        assert isinstance(failure.__cause__, RendezvousError)
        assert failure.at_fault == ("e1",)
        assert "Timeouts.connect" in str(failure)
        await heals(rig, broadcaster)


async def test_an_engine_that_joins_and_never_enters_leaves_others_free_to_answer(rig: Rig) -> None:
    # In a group of four, rank 3 gets its bytes from rank 2: while e1 does not enter, e2 sits in its receive.
    limits = replace(LIMITS, bucket=4.0)
    await rig.script("e1", Fault(do="skip", bucket=1))
    async with rig.broadcaster(timeouts=limits, num_buffers=1) as broadcaster:
        update = asyncio.ensure_future(failure_of(broadcaster.update_weights(a_source(1), version=rig.next_version())))
        await until(lambda: has_fired(rig, "e1"))
        asked = time.monotonic()
        assert await call(rig.handles["e2"].ping.remote()) == "pong"
        assert (await rig.state("e2"))[0] == "updating"
        assert time.monotonic() - asked < 3.0
        assert not update.done()
        failure, seconds = await update
        assert seconds < limits.bucket + SOON
        assert isinstance(failure.__cause__, EngineTimeout)
        assert "Timeouts.bucket" in str(failure)
        await heals(rig, broadcaster)


async def test_a_slow_engine_is_never_sent_a_bucket_twice(rig: Rig, lock: BroadcastLock) -> None:
    limits = replace(LIMITS, bucket=0.7)
    await rig.script("e0", Fault(do="delay", bucket=1, seconds=1.4))
    async with rig.broadcaster(["e0"], lock=lock, timeouts=limits, num_buffers=1) as broadcaster:
        before = len(await received(rig, "e0"))
        failure, seconds = await failure_of(broadcaster.update_weights(a_source(1), version=rig.next_version()))
        assert await rig.fired("e0") == ["delay at receive"]
        assert [s.bucket for s in (await received(rig, "e0"))[before:]] == [0, 1]
        assert seconds >= 1.4  # its call had settled before the lock went
        assert isinstance(failure.__cause__, EngineTimeout)
        assert failure.outcomes["e0"].state is EngineState.TORN
    async with rig.broadcaster(["e0"], lock=lock) as broadcaster:
        await rig.script("e0", Fault(do="delay", bucket=1, seconds=1.4))
        await heals(rig, broadcaster)


async def test_the_lock_stays_held_until_a_late_call_has_settled_or_its_engine_is_quarantined(
    rig: Rig, lock: BroadcastLock
) -> None:
    for drain, state in ((20.0, EngineState.TORN), (0.5, EngineState.LOST)):
        limits = replace(LIMITS, bucket=0.7, drain=drain)
        async with rig.broadcaster(["e0", "e1"], lock=lock, timeouts=limits, num_buffers=1) as broadcaster:
            await rig.script("e1", Fault(do="sleep", bucket=1, seconds=2.0))
            update = asyncio.ensure_future(
                failure_of(broadcaster.update_weights(a_source(1), version=rig.next_version()))
            )
            await asyncio.sleep(0.5)
            async with lock.hold(label="the next source", timeout=60):
                slept = [s for s in await rig.seen("e1") if s.verb == "receive"][-1]
                assert update.done() or state is EngineState.TORN or broadcaster.engine_states["e1"] is state
                waited = time.time() - slept.at
            failure, _ = await update
            assert await rig.fired("e1")
            assert failure.outcomes["e1"].state is state
            if state is EngineState.TORN:
                assert waited >= 2.0
            await call(rig.handles["e1"].ping.remote())
        await rig.ready()


# --------------------------------------------------- groups and trainers


async def test_a_joiner_pointed_at_a_silent_stranger_is_bounded_and_ports_are_chosen_anew(rig: Rig) -> None:
    (engine,) = rig.engines(["e0"])
    await engine.hello(Call(source="test", fence=0, timeout=60))
    with PortSquatter() as squatter:
        spec = GroupSpec(
            name=f"lost-{uuid.uuid4().hex[:6]}",
            backend="gloo",
            master_address=squatter.host,
            master_port=squatter.port,
            world_size=2,
            epoch=1,
            timeout=5.0,
            connect_timeout=1.0,
        )
        started = time.monotonic()
        joining = Call(source="test", fence=time.time_ns() // 1_000_000, timeout=60)
        with pytest.raises(EngineFailed) as refused:
            await engine.join(joining, spec, rank_offset=1)
        assert isinstance(refused.value.__cause__, RendezvousError)
        assert time.monotonic() - started < 1.0 + SOON
        rendezvous = await Rendezvous.open(
            address="127.0.0.1",
            backend="gloo",
            name="squatted",
            epoch=1,
            world_size=2,
            timeout=5.0,
            connect_timeout=5.0,
            port=squatter.port,
        )
        assert rendezvous.spec.master_port != squatter.port
        await rendezvous.aclose()
    async with rig.broadcaster(["e0"]) as broadcaster:
        await heals(rig, broadcaster)


@ray.remote(num_cpus=0)
class Trainer:
    """A source in a process of its own, which can be killed."""

    def pid(self) -> int:
        return os.getpid()

    async def update(self, handles: dict[str, Any], version: int) -> None:
        engines = [TorchEngine(handle, name=name) for name, handle in handles.items()]
        async with WeightBroadcaster(
            engines, lock=None, bucket_bytes=BUCKET_BYTES, timeouts=LIMITS, progress=False, name="trainer"
        ) as broadcaster:
            await broadcaster.update_weights(a_source(3), version=version)


async def test_a_new_trainer_takes_over_from_one_that_was_killed_in_the_middle(rig: Rig) -> None:
    trainer = Trainer.remote()
    pid = await call(trainer.pid.remote())
    await rig.script("e1", Fault(do="delay", bucket=2, seconds=60))
    update = trainer.update.remote({name: rig.handles[name] for name in ("e0", "e1")}, rig.next_version())
    await until(lambda: has_fired(rig, "e1"))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Exception, match="died"):
        await call(update)
    assert not await rig.serves("e0")
    async with rig.broadcaster(["e0", "e1"], name="trainer") as broadcaster:
        await heals(rig, broadcaster)


async def test_an_engine_that_restarted_by_itself_is_noticed_and_its_group_rebuilt(ray_cluster: RayCluster) -> None:
    handle = start_engine(a_model, max_restarts=1)
    pid = await call(handle.pid.remote())
    async with WeightBroadcaster(
        [TorchEngine(handle, name="phoenix")], lock=None, bucket_bytes=BUCKET_BYTES, timeouts=LIMITS, progress=False
    ) as broadcaster:
        await broadcaster.update_weights(a_source(1), version=1)
        os.kill(pid, signal.SIGKILL)

        async def back() -> bool:
            try:
                return bool(await call(handle.pid.remote()) != pid)
            except Exception:
                return False

        await until(back)
        report = await broadcaster.update_weights(a_source(2), version=2, verify="source")
        assert any("restarted" in note for note in report.engines["phoenix"].notes)
    ray.kill(handle)
