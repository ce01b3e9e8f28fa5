"""Everything that can go wrong in an update, made to happen: what comes out, how soon, and what is left."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
import ray
import torch

from async_wsync import (
    AcquireTimeout,
    BroadcastLock,
    EngineBusy,
    EngineDied,
    EngineFailed,
    EngineState,
    EngineTimeout,
    IterableSource,
    LeaseLost,
    PhaseTimeout,
    RendezvousError,
    SourceError,
    TorchEngine,
    UpdateFailed,
    WeightBroadcaster,
)
from async_wsync.runtime.rendezvous import Rendezvous
from async_wsync.testing import Fault, LoopGapMeter, PortSquatter, start_engine
from async_wsync.types import BucketSpec, Call, GroupSpec, UpdateSpec
from tests.conftest import ROOT, RayCluster
from tests.ray.fleet import (
    BUCKET_BYTES,
    LIMITS,
    NUM_BUCKETS,
    Bar,
    Events,
    Rig,
    a_model,
    a_source,
    call,
    failure_of,
    until,
    update_tasks,
)

#: "At once", on a machine that may be busy with something else. The chaos run measures against 1 s.
SOON = 6.0


@pytest.fixture
async def lock(ray_cluster: RayCluster) -> AsyncIterator[BroadcastLock]:
    lock = BroadcastLock.create(name=f"lock-{uuid.uuid4().hex[:6]}", namespace=ray_cluster.namespace)
    yield lock
    await lock.shutdown()


async def is_free(lock: BroadcastLock) -> bool:
    return not (await lock.status(timeout=30))["held"]


async def heals(rig: Rig, broadcaster: WeightBroadcaster, seed: int = 77) -> None:
    """The next update reaches every engine, whatever was before."""
    await broadcaster.update_weights(a_source(seed), version=rig.next_version(), verify="source")
    assert set(broadcaster.engine_states.values()) == {EngineState.CURRENT}
    for engine in broadcaster.current_engines():
        assert await rig.holds(engine, a_model(seed))
        assert await rig.serves(engine)


# ------------------------------------------------------------------------- first failure wins


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
        await rig.script("e1", Fault(do="raise_after", bucket=2, error=ValueError("bad scale")))
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
    manifest = a_source(1).manifest()

    def stalling() -> Iterator[tuple[str, torch.Tensor]]:
        gate.wait(30)
        yield from a_model(1).state_dict().items()

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


# --------------------------------------------------------------------------------- hangs


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
            unreachable, _ = await failure_of(broadcaster.update_weights(a_source(2), version=rig.next_version()))
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
        broadcaster._settings = replace(broadcaster._settings, timeouts=LIMITS)
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
    assert missing.value.phase == "hello"
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
        await until(lambda: _fired(rig, "e1"))
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


async def _fired(rig: Rig, name: str) -> bool:
    return bool(await rig.fired(name))


async def test_a_slow_engine_is_never_sent_a_bucket_twice(rig: Rig, lock: BroadcastLock) -> None:
    limits = replace(LIMITS, bucket=0.7)
    await rig.script("e0", Fault(do="delay", bucket=1, seconds=2.1))
    async with rig.broadcaster(["e0"], lock=lock, timeouts=limits, num_buffers=1) as broadcaster:
        received = len(await _received(rig, "e0"))
        failure, seconds = await failure_of(broadcaster.update_weights(a_source(1), version=rig.next_version()))
        assert await rig.fired("e0") == ["delay at receive"]
        assert [s.bucket for s in (await _received(rig, "e0"))[received:]] == [0, 1]
        assert seconds >= 2.1  # its call had settled before the lock went
        assert isinstance(failure.__cause__, EngineTimeout)
        assert failure.outcomes["e0"].state is EngineState.TORN
    async with rig.broadcaster(["e0"], lock=lock) as broadcaster:
        await rig.script("e0", Fault(do="delay", bucket=1, seconds=2.1))
        await heals(rig, broadcaster)


async def _received(rig: Rig, name: str) -> list[Any]:
    return [s for s in await rig.seen(name) if s.verb == "receive"]


async def test_the_lock_stays_held_until_a_late_call_has_settled_or_its_engine_is_quarantined(
    rig: Rig, lock: BroadcastLock
) -> None:
    for drain, state in ((20.0, EngineState.TORN), (0.5, EngineState.LOST)):
        limits = replace(LIMITS, bucket=0.7, drain=drain)
        async with rig.broadcaster(["e0", "e1"], lock=lock, timeouts=limits, num_buffers=1) as broadcaster:
            await rig.script("e1", Fault(do="sleep", bucket=1, seconds=3.0))
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
                assert waited >= 3.0
            await call(rig.handles["e1"].ping.remote())
        await rig.ready()


# ------------------------------------------------------------------- engines, brackets, versions


async def test_a_flush_that_refuses_for_a_while_is_asked_again(rig: Rig) -> None:
    await rig.script("e1", Fault(do="raise_after", at="flush", error=EngineBusy("3 requests run"), times=6))
    async with rig.broadcaster(["e0", "e1"]) as broadcaster:
        await heals(rig, broadcaster)
        assert await rig.fired("e1") == ["raise_after at flush"] * 6


async def test_a_flush_that_refuses_for_ever_ends_with_its_last_answer_and_all_serve(rig: Rig) -> None:
    limits = replace(LIMITS, flush=1.5)
    async with rig.broadcaster(["e0", "e1"], timeouts=limits) as broadcaster:
        await broadcaster.update_weights(a_source(1), version=rig.next_version())
        await rig.script("e1", Fault(do="raise_after", at="flush", error=EngineBusy("3 requests run"), times=10_000))
        failure, seconds = await failure_of(broadcaster.update_weights(a_source(2), version=rig.next_version()))
        assert len(await rig.fired("e1")) > 1
        assert "3 requests run" in str(failure)
        assert "Timeouts.flush" in str(failure)
        assert seconds < limits.flush + 1 + SOON
        assert set(broadcaster.engine_states.values()) == {EngineState.CURRENT}
        assert [await rig.serves(name) for name in ("e0", "e1")] == [True, True]
        await rig.script("e1")
        await heals(rig, broadcaster)


async def test_no_bucket_is_sent_before_the_slowest_engine_has_paused(rig: Rig) -> None:
    await rig.script("e1", Fault(do="delay", at="pause", seconds=1.0))
    async with rig.broadcaster(["e0", "e1"]) as broadcaster:
        seen_before = len(await _received(rig, "e0"))
        await heals(rig, broadcaster)
        paused = [s.at for s in await rig.seen("e1") if s.verb == "pause"][-1] + 1.0
        assert (await _received(rig, "e0"))[seen_before].at >= paused


async def test_a_pause_that_fails_on_one_engine_leaves_none_paused(rig: Rig) -> None:
    async with rig.broadcaster(["e0", "e1"]) as broadcaster:
        await broadcaster.update_weights(a_source(1), version=rig.next_version())
        await rig.script("e1", Fault(do="raise_before", at="pause", error=OSError("no pause today")))
        await rig.script("e0", Fault(do="raise_before", at="resume"))  # fails once; resuming is tried again
        failure, _ = await failure_of(broadcaster.update_weights(a_source(2), version=rig.next_version()))
        assert await rig.fired("e1") == ["raise_before at pause"]
        assert await rig.fired("e0") == ["raise_before at resume"]
        assert "no pause today" in str(failure.__cause__)
        assert set(broadcaster.engine_states.values()) == {EngineState.CURRENT}
        assert [await rig.serves(name) for name in ("e0", "e1")] == [True, True]
        await heals(rig, broadcaster)


async def test_an_engine_that_will_not_resume_is_reported_beside_the_cause(rig: Rig) -> None:
    limits = replace(LIMITS, resume=1.0)
    async with rig.broadcaster(["e0", "e1"], timeouts=limits) as broadcaster:
        await broadcaster.update_weights(a_source(1), version=rig.next_version())
        await rig.script("e1", Fault(do="raise_before", at="pause", error=OSError("no pause today")))
        await rig.script("e0", Fault(do="raise_before", at="resume", error=OSError("stuck"), times=10_000))
        failure, _ = await failure_of(broadcaster.update_weights(a_source(2), version=rig.next_version()))
        assert "no pause today" in str(failure.__cause__)
        assert re.search(r"note: not resumed: e0.*stuck", str(failure))
        assert await rig.serves("e1")
        await rig.script("e0")
        await heals(rig, broadcaster)


@pytest.mark.parametrize(
    ("policy", "published_first", "serves"),
    [("whole", False, True), ("current", False, False), ("current", True, True), ("never", True, False)],
)
async def test_who_may_serve_after_a_failure_is_the_callers_choice(
    rig: Rig, policy: Any, published_first: bool, serves: bool
) -> None:
    async with rig.broadcaster(["e0"]) as broadcaster:
        await heals(rig, broadcaster)  # or a torn engine could serve under no policy
    async with rig.broadcaster(["e0"], resume_policy=policy) as broadcaster:
        if published_first:
            await broadcaster.update_weights(a_source(1), version=rig.next_version())
        await rig.script("e0", Fault(do="raise_before", at="begin"))
        failure, _ = await failure_of(broadcaster.update_weights(a_source(2), version=rig.next_version()))
        assert await rig.fired("e0") == ["raise_before at begin"]
        assert await rig.serves("e0") is serves
        assert ("still paused" in str(failure)) is not serves
    async with rig.broadcaster(["e0"]) as broadcaster:
        await heals(rig, broadcaster)


async def test_adapters_that_raise_whatever_they_like_break_nothing(rig: Rig, caplog: Any) -> None:
    class Clumsy(TorchEngine):
        clumsy: tuple[str, ...] = ()

        async def receive(self, call: Call, update: UpdateSpec, bucket: BucketSpec) -> None:
            if "receive" in self.clumsy and bucket.index == 1:
                raise KeyError("a plain error")
            if "cancel" in self.clumsy and bucket.index == 1:
                raise asyncio.CancelledError
            await super().receive(call, update, bucket)

        async def abort(self, call: Call, group: str) -> None:
            if self.clumsy:
                raise OSError("abort")
            await super().abort(call, group)

        async def leave(self, call: Call, group: str) -> None:
            if self.clumsy:
                raise OSError("leave")
            await super().leave(call, group)

        async def reset(self, call: Call) -> None:
            if self.clumsy:
                raise OSError("reset")
            await super().reset(call)

        async def hello(self, call: Call) -> Any:
            if "hello" in self.clumsy:
                raise OSError("hello")
            return await super().hello(call)

    odd, plain = Clumsy(rig.handles["e1"], name="e1"), *rig.engines(["e0"])
    async with WeightBroadcaster(
        [plain, odd], lock=None, bucket_bytes=BUCKET_BYTES, timeouts=LIMITS, progress=False, num_buffers=1
    ) as broadcaster:
        await heals(rig, broadcaster)
        for how, said in (("receive", "a plain error"), ("cancel", "cancelled from within"), ("hello", "hello")):
            odd.clumsy = (how,)
            failure, seconds = await failure_of(broadcaster.update_weights(a_source(1), version=rig.next_version()))
            assert said in str(failure)
            assert failure.at_fault == ("e1",)
            assert isinstance(failure.__cause__, EngineFailed)
            assert seconds < SOON
            odd.clumsy = ()
            await heals(rig, broadcaster)
    assert not update_tasks()


# ------------------------------------------------------------------------------- limits, locks


async def test_the_total_limit_ends_an_update_wherever_it_is(rig: Rig, lock: BroadcastLock) -> None:
    limits = replace(LIMITS, total=0.8)
    async with rig.broadcaster(["e0"], lock=lock, timeouts=limits) as broadcaster:
        await rig.script("e0", Fault(do="delay", at="pause", seconds=2.0))
        failure, _ = await failure_of(broadcaster.update_weights(a_source(1), version=rig.next_version()))
        assert isinstance(failure.__cause__, PhaseTimeout)
        assert (failure.__cause__.field, failure.__cause__.phase) == ("total", "pause")
        assert await rig.serves("e0") or broadcaster.engine_states["e0"] is EngineState.TORN
        pauses = len([s for s in await rig.seen("e0") if s.verb == "pause"])
        async with lock.hold(label="somebody else", timeout=30):
            with pytest.raises(PhaseTimeout, match=r"Timeouts\.total.*lock"):
                await broadcaster.update_weights(a_source(1), version=rig.next_version())
        assert len([s for s in await rig.seen("e0") if s.verb == "pause"]) == pauses
        assert await is_free(lock)


async def test_a_lock_that_is_not_granted_pauses_nobody(rig: Rig, lock: BroadcastLock) -> None:
    bar = Bar()
    async with rig.broadcaster(["e0"], lock=lock, timeouts=replace(LIMITS, lock=0.6), progress=bar) as broadcaster:
        await broadcaster.update_weights(a_source(1), version=rig.next_version())
        pauses = len([s for s in await rig.seen("e0") if s.verb == "pause"])
        async with lock.hold(label="a slow neighbour", timeout=30):
            with pytest.raises(AcquireTimeout, match="a slow neighbour"):
                await broadcaster.update_weights(a_source(2), version=rig.next_version())
            assert await rig.serves("e0")
        assert len([s for s in await rig.seen("e0") if s.verb == "pause"]) == pauses
        assert bar.closed == ["done", "failed"]
        await heals(rig, broadcaster)


async def test_a_lease_lost_in_the_middle_ends_the_update_as_just_that(rig: Rig, lock: BroadcastLock) -> None:
    await rig.script("e1", Fault(do="delay", bucket=1, seconds=1.5))
    async with rig.broadcaster(["e0", "e1"], lock=lock, num_buffers=1) as broadcaster:
        update = asyncio.ensure_future(broadcaster.update_weights(a_source(1), version=rig.next_version()))
        await until(lambda: _fired(rig, "e1"))
        assert await lock.revoke((await lock.status(timeout=30))["holder"]["claim"])
        with pytest.raises(LeaseLost) as lost:
            await update
        assert "e1" in "".join(lost.value.__notes__)
        assert "torn" in "".join(lost.value.__notes__)
        assert set(broadcaster.engine_states.values()) == {EngineState.TORN}
        assert [s.bucket for s in await _received(rig, "e0")][-1] == 1
        assert [await rig.serves(name) for name in ("e0", "e1")] == [False, False]
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
        await heals(rig, broadcaster)


# -------------------------------------------------------------------------------- cancellation


async def _updating(rig: Rig, broadcaster: WeightBroadcaster, *, seconds: float = 1.0) -> asyncio.Task[Any]:
    """An update whose second bucket takes e1 a while, and is under way."""
    await rig.script("e1", Fault(do="delay", bucket=1, seconds=seconds))
    fired = len(await rig.fired("e1"))
    update = asyncio.ensure_future(broadcaster.update_weights(a_source(5), version=rig.next_version()))

    async def begun() -> bool:
        return len(await rig.fired("e1")) > fired

    await until(begun)
    return update


async def test_a_cancelled_update_is_finished_first(rig: Rig, lock: BroadcastLock) -> None:
    async with rig.broadcaster(["e0", "e1"], lock=lock, num_buffers=1) as broadcaster:
        update = await _updating(rig, broadcaster)
        update.cancel()
        await asyncio.sleep(0.1)
        update.cancel()
        assert not await is_free(lock)
        with pytest.raises(asyncio.CancelledError):
            await update
        assert await is_free(lock)
        assert set(broadcaster.engine_states.values()) == {EngineState.CURRENT}
        assert await rig.holds("e1", a_model(5))
        assert await rig.serves("e1")
        assert broadcaster.version == rig.version
        await heals(rig, broadcaster)


async def test_a_cancelled_update_stops_at_the_next_bucket_where_asked_to(rig: Rig, lock: BroadcastLock) -> None:
    bar = Bar()
    async with rig.broadcaster(["e0", "e1"], lock=lock, num_buffers=1, on_cancel="stop", progress=bar) as broadcaster:
        update = await _updating(rig, broadcaster)
        update.cancel()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await update
        assert isinstance(cancelled.value.__cause__, UpdateFailed)
        assert bar.closed == ["cancelled"]
        assert len(bar.moved) < NUM_BUCKETS
        assert set(broadcaster.engine_states.values()) == {EngineState.TORN}
        assert [await rig.serves(name) for name in ("e0", "e1")] == [False, False]
        assert await is_free(lock)
        await heals(rig, broadcaster)


async def test_a_cancelled_update_that_cannot_finish_ends_within_the_drain(rig: Rig, lock: BroadcastLock) -> None:
    limits = replace(LIMITS, drain=2.0)
    async with rig.broadcaster(["e0", "e1"], lock=lock, num_buffers=1, timeouts=limits) as broadcaster:
        await rig.script("e1", Fault(do="stop", bucket=1))
        update = asyncio.ensure_future(broadcaster.update_weights(a_source(5), version=rig.next_version()))
        await until(lambda: Path(f"/proc/{rig.pids['e1']}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")
        cancelled_at = time.monotonic()
        update.cancel()
        try:
            with pytest.raises(asyncio.CancelledError):
                await update
            assert time.monotonic() - cancelled_at < limits.drain + 2.0
        finally:
            rig.kill("e1", signal.SIGCONT)
        assert broadcaster.engine_states == {"e0": EngineState.TORN, "e1": EngineState.LOST}
        assert await is_free(lock)
        broadcaster._settings = replace(broadcaster._settings, timeouts=LIMITS)
        await heals(rig, broadcaster)


async def test_timeouts_and_scopes_around_an_update_behave(rig: Rig, lock: BroadcastLock) -> None:
    task = asyncio.current_task()
    assert task is not None
    async with rig.broadcaster(["e0", "e1"], lock=lock) as broadcaster:
        for kind in ("asyncio", "anyio", "both"):
            await rig.script("e1", Fault(do="delay", bucket=1, seconds=0.8))
            update = broadcaster.update_weights(a_source(5), version=rig.next_version())
            if kind == "asyncio":
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.3):
                        await update
            else:
                with anyio.move_on_after(0.3) as scope:
                    if kind == "both":
                        with anyio.CancelScope() as inner:
                            inner.cancel()
                            await update
                    else:
                        await update
                assert scope.cancelled_caught or kind == "both"
            assert task.cancelling() == 0
            assert await is_free(lock)
            states = set(broadcaster.engine_states.values())
            assert states <= {EngineState.CURRENT, EngineState.STALE}
        await heals(rig, broadcaster)
    assert not update_tasks()


async def test_a_cancelled_caller_that_still_waits_for_the_lock_gets_away_at_once(
    rig: Rig, lock: BroadcastLock
) -> None:
    bar = Bar()
    async with lock.hold(label="a slow neighbour", timeout=30):
        connecting = asyncio.ensure_future(rig.broadcaster(["e0"], lock=lock).connect())
        await asyncio.sleep(0.3)
        connecting.cancel()
        cancelled_at = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        assert time.monotonic() - cancelled_at < SOON
    async with rig.broadcaster(["e0"], lock=lock, progress=bar) as broadcaster:
        async with lock.hold(label="a slow neighbour", timeout=30):
            update = asyncio.ensure_future(broadcaster.update_weights(a_source(1), version=rig.next_version()))
            await asyncio.sleep(0.3)
            update.cancel()
            cancelled_at = time.monotonic()
            with pytest.raises(asyncio.CancelledError):
                await update
            assert time.monotonic() - cancelled_at < SOON
            assert [w["label"] for w in (await lock.status(timeout=30))["waiters"]] == []
        assert bar.closed == ["cancelled"]
        await heals(rig, broadcaster)


# ----------------------------------------------------------------------- groups and trainers


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
    await until(lambda: _fired(rig, "e1"))
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


# -------------------------------------------------------------------------------- closing


async def test_closing_twice_after_a_failure_and_with_an_update_under_way(rig: Rig, lock: BroadcastLock) -> None:
    broadcaster = rig.broadcaster(["e0", "e1"], lock=lock, num_buffers=1)
    await broadcaster.connect()
    await rig.script("e0", Fault(do="raise_before", bucket=1))
    await failure_of(broadcaster.update_weights(a_source(1), version=rig.next_version()))
    await broadcaster.aclose()
    await broadcaster.aclose()
    await broadcaster.connect()
    update = await _updating(rig, broadcaster, seconds=1.0)
    await asyncio.gather(broadcaster.aclose(), broadcaster.aclose())
    with pytest.raises(UpdateFailed, match="closed during the update"):
        await update
    assert await is_free(lock)
    assert not update_tasks()
    async with rig.broadcaster(["e0", "e1"], lock=lock) as again:
        await heals(rig, again)


async def test_closing_among_dead_and_stopped_peers_is_bounded(rig: Rig) -> None:
    limits = replace(LIMITS, close=1.0)
    broadcaster = rig.broadcaster(timeouts=limits)
    await broadcaster.connect()
    await broadcaster.update_weights(a_source(1), version=rig.next_version())
    rig.kill("e2")
    rig.kill("e1", signal.SIGSTOP)
    try:
        started = time.monotonic()
        await broadcaster.aclose()
        await broadcaster.aclose()
        assert time.monotonic() - started < 4 * limits.close + 2.0
    finally:
        rig.kill("e1", signal.SIGCONT)
    assert not update_tasks()


SCRIPT = """
import asyncio, gc, os, signal, sys, time
import ray
from async_wsync import ModuleSource, Timeouts, TorchEngine, UpdateFailed, WeightBroadcaster
from async_wsync.testing import Fault, start_engine
from tests.ray.fleet import BUCKET_BYTES, Events, a_model, a_source

async def main(how):
    handles = [start_engine(a_model, Fault(do="raise_before", bucket=1)) for _ in range(2)]
    pids = await asyncio.gather(*(handle.pid.remote() for handle in handles))
    limits = Timeouts(bucket=60, drain=3, close=2)
    seen = asyncio.Event()
    hook = lambda event: seen.set() if event.kind == "bucket_submitted" and event.version == 3 else None
    broadcaster = WeightBroadcaster([TorchEngine(h, name=f"e{i}") for i, h in enumerate(handles)], lock=None,
        bucket_bytes=BUCKET_BYTES, timeouts=limits, progress=False, on_event=hook, num_buffers=1)
    await broadcaster.connect()
    try:
        await broadcaster.update_weights(a_source(1), version=1)
    except UpdateFailed as failure:
        print("failed as scripted", failure.at_fault)
    await broadcaster.update_weights(a_source(2), version=2)
    await asyncio.gather(*(handle.set_script.remote([Fault(do="stop", bucket=0)]) for handle in handles[1:]))
    update = asyncio.ensure_future(broadcaster.update_weights(a_source(3), version=3))
    await seen.wait()
    await asyncio.sleep(0.3)
    update.cancel()
    print("cancelled at", time.time(), flush=True)
    try:
        await update
    except asyncio.CancelledError:
        print("states", {n: s.value for n, s in broadcaster.engine_states.items()}, flush=True)
    if how == "closed":
        await broadcaster.aclose()
    gc.collect()

ray.init(address=sys.argv[1], namespace=sys.argv[2], log_to_driver=False, configure_logging=False)
asyncio.run(main(sys.argv[3]))
print("main over at", time.time(), flush=True)
"""


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_a_script_that_is_cancelled_with_a_stalled_peer_exits_quietly_within_its_limits(
    ray_cluster: RayCluster, tmp_path: Path, how: str
) -> None:
    script = tmp_path / "stalled.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-X", "dev", str(script), ray_cluster.address, ray_cluster.namespace, how],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONASYNCIODEBUG": "0"},
        check=False,
    )
    exited = time.time()
    assert done.returncode == 0, done.stderr
    assert "failed as scripted ('e0', 'e1')" in done.stdout
    assert "'e0': 'torn', 'e1': 'lost'" in done.stdout
    (cancelled,) = re.findall(r"cancelled at ([\d.]+)", done.stdout)
    # drain 3 s, close 2 s for the farewell and 2 s for the group; the rest is the interpreter's and Ray's own end.
    assert exited - float(cancelled) < 3 + 4 + 10
    for complaint in ("never retrieved", "was destroyed", "never awaited", "RuntimeWarning", "Exception ignored"):
        assert complaint not in done.stderr, done.stderr
