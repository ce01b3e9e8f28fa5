"""Pauses, flushes, ends and limits that fail: nobody stays paused unseen, and nothing is published too early."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any

import pytest
import ray

from async_wsync import (
    AcquireTimeout,
    BroadcastLock,
    EngineBusy,
    EngineFailed,
    EngineState,
    LeaseLost,
    PhaseTimeout,
    PolledLock,
    SelfDeadlock,
    TorchEngine,
    UpdateFailed,
    WeightBroadcaster,
)
from async_wsync.testing import Fault
from async_wsync.testing.locks import BoolLockActor
from async_wsync.types import BucketSpec, Call, UpdateSpec
from tests.support.fleet import (
    BUCKET_BYTES,
    LIMITS,
    SOON,
    Bar,
    Rig,
    a_source,
    failure_of,
    has_fired,
    heals,
    is_free,
    received,
    update_tasks,
)
from tests.support.waiting import until

# ------------------------------------------- engines, brackets, versions


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
        seen_before = len(await received(rig, "e0"))
        await heals(rig, broadcaster)
        paused = [s.at for s in await rig.seen("e1") if s.verb == "pause"][-1] + 1.0
        assert (await received(rig, "e0"))[seen_before].at >= paused


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


async def test_an_engine_left_paused_is_named_though_another_ones_name_begins_with_its_own(rig: Rig) -> None:
    engines = [TorchEngine(rig.handles["e0"], name="e1"), TorchEngine(rig.handles["e1"], name="e10")]
    async with WeightBroadcaster(
        engines, lock=None, timeouts=LIMITS, bucket_bytes=BUCKET_BYTES, progress=False, resume_policy="never"
    ) as broadcaster:
        await broadcaster.update_weights(a_source(1), version=rig.next_version())
        await rig.script("e1", Fault(do="raise_before", at="begin"), Fault(do="raise_before", at="reset", times=9))
        failure, _ = await failure_of(broadcaster.update_weights(a_source(2), version=rig.next_version()))
        assert await rig.fired("e1") == ["raise_before at begin", "raise_before at reset"]
        assert "e10: its update session could not be closed" in str(failure)
        assert re.search(r"still paused, though whole: e1$", str(failure), re.MULTILINE)
        await rig.script("e1")
    async with rig.broadcaster(["e0", "e1"]) as broadcaster:
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


# --------------------------------------------------------- limits, locks


async def test_the_total_limit_ends_an_update_wherever_it_is(rig: Rig, lock: BroadcastLock) -> None:
    limits = replace(LIMITS, total=2.0)
    async with rig.broadcaster(["e0"], lock=lock, timeouts=limits) as broadcaster:
        await rig.script("e0", Fault(do="delay", at="pause", seconds=4.0))
        failure, _ = await failure_of(broadcaster.update_weights(a_source(1), version=rig.next_version()))
        assert isinstance(failure.__cause__, PhaseTimeout)
        assert (failure.__cause__.field, failure.__cause__.phase) == ("total", "pause")
        assert await rig.serves("e0") or broadcaster.engine_states["e0"] is EngineState.TORN
        pauses = len([s for s in await rig.seen("e0") if s.verb == "pause"])
        async with lock.hold(label="somebody else", timeout=30):
            update = asyncio.create_task(broadcaster.update_weights(a_source(1), version=rig.next_version()))
            with pytest.raises(UpdateFailed, match=r"not started.*Timeouts\.total.*lock") as caught:
                await update
            assert isinstance(caught.value.__cause__, PhaseTimeout)
            assert caught.value.__cause__.field == "total"
            assert caught.value.started is False
        assert len([s for s in await rig.seen("e0") if s.verb == "pause"]) == pauses
        assert await is_free(lock)


async def test_a_lock_that_is_not_granted_pauses_nobody(rig: Rig, lock: BroadcastLock) -> None:
    bar = Bar()
    async with rig.broadcaster(["e0"], lock=lock, timeouts=replace(LIMITS, lock=3.0), progress=bar) as broadcaster:
        await broadcaster.update_weights(a_source(1), version=rig.next_version())
        pauses = len([s for s in await rig.seen("e0") if s.verb == "pause"])
        async with lock.hold(label="a slow neighbour", timeout=30):
            update = asyncio.create_task(broadcaster.update_weights(a_source(2), version=rig.next_version()))
            with pytest.raises(AcquireTimeout, match="a slow neighbour"):
                await update
            assert await rig.serves("e0")
        assert len([s for s in await rig.seen("e0") if s.verb == "pause"]) == pauses
        assert bar.closed == ["done", "failed"]
        await heals(rig, broadcaster)


@pytest.mark.parametrize("kind", ["own", "polled"])
async def test_a_holder_who_would_wait_for_himself_is_told_at_once(rig: Rig, lock: BroadcastLock, kind: str) -> None:
    mine = lock if kind == "own" else PolledLock(ray.remote(BoolLockActor).options(num_cpus=0).remote())
    async with rig.broadcaster(["e0", "e1"], lock=mine) as broadcaster:
        async with mine.hold(label="the trainer", timeout=30):
            for work in (
                broadcaster.update_weights(a_source(1), version=rig.next_version()),
                broadcaster.connect(),
                broadcaster.remove_engines(["e1"]),
                broadcaster.aclose(),
            ):
                with pytest.raises(SelfDeadlock, match="the trainer"):
                    async with asyncio.timeout(LIMITS.close / 2):
                        await work
        await heals(rig, broadcaster)  # none of it did anything


async def test_what_a_holder_starts_and_does_not_wait_for_gets_the_lock_after_him(
    rig: Rig, lock: BroadcastLock
) -> None:
    async with rig.broadcaster(["e0"], lock=lock) as broadcaster:
        async with lock.hold(label="the trainer", timeout=30):
            update = asyncio.create_task(broadcaster.update_weights(a_source(1), version=rig.next_version()))

            async def waits() -> bool:
                return bool((await lock.status(timeout=30))["waiters"])

            await until(waits)
        assert (await update).version == rig.version


async def test_a_lease_lost_in_the_middle_ends_the_update_as_just_that(rig: Rig, lock: BroadcastLock) -> None:
    await rig.script("e1", Fault(do="delay", bucket=1, seconds=1.5))
    beating = BroadcastLock.connect(name=lock.name, namespace=lock.namespace, ttl=3.0)  # every second: within the delay
    async with rig.broadcaster(["e0", "e1"], lock=beating, num_buffers=1) as broadcaster:
        update = asyncio.ensure_future(broadcaster.update_weights(a_source(1), version=rig.next_version()))
        await until(lambda: has_fired(rig, "e1"))
        assert await lock.revoke((await lock.status(timeout=30))["holder"]["claim"])
        with pytest.raises(LeaseLost) as lost:
            await update
        assert "e1" in "".join(lost.value.__notes__)
        assert "torn" in "".join(lost.value.__notes__)
        assert set(broadcaster.engine_states.values()) == {EngineState.TORN}
        assert [s.bucket for s in await received(rig, "e0")][-1] == 1
        assert [await rig.serves(name) for name in ("e0", "e1")] == [False, False]
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
        await heals(rig, broadcaster)
