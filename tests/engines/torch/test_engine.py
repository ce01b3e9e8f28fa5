"""`TorchEngine` and real Ray actors with a `WeightReceiver`, over real gloo groups."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from torch import nn

from async_wsync import TorchEngine
from async_wsync.errors import (
    EngineDied,
    EngineFailed,
    EngineNotServing,
    EngineRejected,
    EngineReplaced,
    EngineTimeout,
    StaleFence,
)
from async_wsync.groups.source_end import UpdateGroup
from async_wsync.runtime.object_refs import RemoteRaised, await_ref
from async_wsync.transfer.checksum import model_digests
from async_wsync.types import Call, EngineState, PauseMode, UpdateSpec
from tests.support.actors import KINDS, SyncEngine, a_model, killed
from tests.support.cluster import RayCluster
from tests.support.groups import joined
from tests.support.receiver_driver import a_call
from tests.support.updates import manifest_of, staged, update_of

GONE_LIMIT = 5.0  # of a busy test machine; the aim is 1 s
SIZE = 512  # a matrix of 1 MB, which travels from storage to storage
_fences = itertools.count(1)


@pytest.fixture(scope="module")
def fleet(ray_cluster: RayCluster) -> Iterator[dict[str, Any]]:
    """One engine actor of each kind; a test may leave them torn."""
    handles = {kind: cls.remote(seed=i, size=SIZE) for i, (kind, cls) in enumerate(KINDS.items())}
    yield handles
    for handle in handles.values():
        ray.kill(handle)


def later_call(timeout: float = 60.0) -> Call:
    """A call under a fence above all before."""
    return a_call(fence=next(_fences), timeout=timeout)


async def update_all(engines: Sequence[TorchEngine], model: nn.Module, version: int, call: Call) -> None:
    """A whole update without pauses, the way a broadcaster does it."""
    group = await joined(engines, call)
    update = update_of(manifest_of(model), version=version, bucket_bytes=4096, group=group.spec.name)
    for engine in engines:
        await engine.begin(call, update)
    await send(engines, group, update, model, call)
    for engine in engines:
        await engine.end(call, update)
        await engine.publish(call, version)
        await engine.leave(call, group.spec.name)
    await group.aclose()


async def send(
    engines: Sequence[TorchEngine], group: UpdateGroup, update: UpdateSpec, model: nn.Module, call: Call
) -> None:
    for bucket in update.buckets:
        receives = [asyncio.create_task(e.receive(call, update, bucket)) for e in engines]
        await group.broadcast(staged(bucket, model))
        for engine in engines:
            engine.hint_collective_done()
        await asyncio.gather(*receives)


@asynccontextmanager
async def a_receive_that_waits(
    engine: TorchEngine, call: Call
) -> AsyncIterator[tuple[asyncio.Task[None], UpdateGroup]]:
    """An engine inside a receive whose bytes never come."""
    await engine.hello(call)
    group = await joined([engine], call, timeout=60.0)
    update = update_of(manifest_of(a_model(1, SIZE)), group=group.spec.name)
    await engine.begin(call, update)
    receive = asyncio.create_task(engine.receive(call, update, update.buckets[0]))
    await asyncio.sleep(0.3)
    assert not receive.done()
    try:
        yield receive, group
    finally:
        receive.cancel()
        await asyncio.gather(receive, return_exceptions=True)
        await group.aclose()
        await engine.aclose()


async def test_an_update_reaches_single_threaded_threaded_and_async_actors(fleet: dict[str, Any]) -> None:
    trainer = a_model(7, SIZE)
    engines = [TorchEngine(handle, name=kind) for kind, handle in fleet.items()]
    call = later_call()
    infos = [await e.hello(call) for e in engines]
    assert {i.state for i in infos} == {EngineState.STALE}
    assert len({i.incarnation for i in infos}) == 3
    group = await joined(engines, call)
    update = update_of(manifest_of(trainer), version=3, bucket_bytes=4096, group=group.spec.name)
    for e in engines:
        assert await e.check(call, update) == ()
        await e.pause(call, PauseMode.DRAIN)
        await e.flush(call)
        await e.begin(call, update)
    for handle in fleet.values():
        with pytest.raises(RemoteRaised) as refused:
            await await_ref(handle.generate.remote())
        assert isinstance(refused.value.cause, EngineNotServing)
    await send(engines, group, update, trainer, call)
    for e, handle in zip(engines, fleet.values(), strict=True):
        await e.end(call, update)
        await e.publish(call, 3)
        await e.resume(call)
        assert await await_ref(handle.generate.remote()) == 3
        assert await e.checksums(call) == model_digests(trainer.state_dict())
        info = await e.hello(call)
        assert (info.state, info.version) == (EngineState.CURRENT, 3)
        await e.leave(call, group.spec.name)
        await e.aclose()
    await group.aclose()


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_inside_a_long_receive_answers_and_can_be_aborted(kind: str, fleet: dict[str, Any]) -> None:
    handle, call = fleet[kind], later_call()
    engine = TorchEngine(handle, name="e0")
    async with a_receive_that_waits(engine, call) as (receive, group):
        started = time.monotonic()
        for _ in range(5):
            assert await await_ref(handle.ping.remote()) == "pong"
            assert (await engine.hello(call)).state is EngineState.UPDATING
        with pytest.raises(RemoteRaised) as refused:
            await await_ref(handle.generate.remote())
        assert isinstance(refused.value.cause, EngineNotServing)
        await engine.abort(call, group.spec.name)
        with pytest.raises(EngineFailed) as failed:
            await receive
        assert time.monotonic() - started < 2 * GONE_LIMIT
        assert failed.value.is_collective
        assert (failed.value.engine, failed.value.phase, failed.value.bucket) == ("e0", "receive", 0)
        assert (await engine.hello(call)).state is EngineState.TORN
    with pytest.raises(EngineFailed, match="torn"):
        await engine.resume(call)
    await update_all([engine], a_model(8, SIZE), 4, later_call())
    assert (await engine.hello(call)).state is EngineState.CURRENT


async def test_kill_9_inside_a_receive_is_told_at_once_and_the_restart_is_noticed(ray_cluster: RayCluster) -> None:
    handle = SyncEngine.remote(size=SIZE)
    engine, call = TorchEngine(handle, name="e0"), later_call()
    pid = await await_ref(handle.pid.remote())
    before = await engine.hello(call)
    async with a_receive_that_waits(engine, call) as (receive, _):
        os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(EngineFailed) as failed:
            await receive
        assert time.monotonic() - started < GONE_LIMIT
        assert isinstance(failed.value, EngineDied | EngineReplaced)
        assert failed.value.engine == "e0"
    await asyncio.wait_for(_until_replaced(engine), 60)
    after = await engine.hello(call)
    assert after.incarnation != before.incarnation
    assert after.state is EngineState.STALE
    await engine.resume(call)
    ray.kill(handle)


async def _until_replaced(engine: TorchEngine) -> None:
    """Ray restarts the actor; the calls in between find nobody."""
    while True:
        try:
            await engine.resume(later_call())
        except EngineReplaced:
            return
        except EngineDied:
            await asyncio.sleep(0.1)
        else:
            pytest.fail("a new incarnation took a call that was meant for the old one")


async def test_a_stopped_engine_is_late_and_works_again_when_it_goes_on(fleet: dict[str, Any]) -> None:
    handle, call = fleet["sync"], later_call()
    engine = TorchEngine(handle, name="e0")
    pid = await await_ref(handle.pid.remote())
    async with a_receive_that_waits(engine, call) as (_, group):
        os.kill(pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            with pytest.raises(EngineTimeout) as late:
                await engine.hello(a_call(timeout=0.5))
            assert 0.4 < time.monotonic() - started < 0.5 + GONE_LIMIT
            assert (late.value.engine, late.value.field, late.value.seconds) == ("e0", "connect", 0.5)
        finally:
            os.kill(pid, signal.SIGCONT)
        await engine.abort(call, group.spec.name)
    await update_all([engine], a_model(9, SIZE), 5, later_call())


async def test_answers_that_are_no_replies_and_actors_that_are_gone_fail_by_name(ray_cluster: RayCluster) -> None:
    @ray.remote(num_cpus=0)
    class Foreign:
        answer: Any = None

        def weight_sync(self, request: Any) -> Any:
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

        def set(self, answer: Any) -> None:
            self.answer = answer

    foreign = Foreign.remote()
    engine = TorchEngine(foreign, name="f0")
    answers = ((None, "None"), ({"success": False, "message": "no"}, "no"), ((False, "why"), "why"), (3, "3"))
    for answer, said in (*answers, (KeyError("lm_head"), "lm_head")):
        await await_ref(foreign.set.remote(answer))
        with pytest.raises(EngineFailed, match=said) as failed:
            await engine.resume(a_call())
        assert failed.value.engine == "f0"
    assert isinstance(failed.value.__cause__, KeyError)
    await killed(foreign)
    for ask in (engine.resume, engine.hello):
        with pytest.raises(EngineDied, match="f0"):
            await ask(a_call())


async def test_refusals_arrive_with_their_type(fleet: dict[str, Any]) -> None:
    engine = TorchEngine(fleet["threaded"], name="e0")
    old, call = later_call(), later_call()
    await engine.hello(call)
    await engine.flush(call)
    with pytest.raises(StaleFence) as stale:
        await engine.flush(old)
    assert isinstance(stale.value, EngineFailed)
    assert stale.value.engine == "e0"
    with pytest.raises(EngineRejected) as refused:
        await engine.check(call, update_of(manifest_of(nn.Linear(2, 2))))
    assert refused.value.engine == "e0"
    assert refused.value.unknown == ("weight", "bias")


async def test_a_single_threaded_engine_that_generates_is_waited_for(fleet: dict[str, Any], tmp_path: Path) -> None:
    engine = TorchEngine(fleet["sync"], name="e0")
    await engine.hello(later_call())
    started_file = tmp_path / "started"
    busy = fleet["sync"].generate.remote(1.0, started=str(started_file))
    while not started_file.exists():
        await asyncio.sleep(0.005)
    started = time.monotonic()
    await engine.pause(later_call(), PauseMode.DRAIN)
    assert time.monotonic() - started > 0.5
    await await_ref(busy)
    await engine.resume(later_call())


async def test_a_call_that_takes_longer_than_its_limit_is_never_sent_again(fleet: dict[str, Any]) -> None:
    handle = fleet["sync"]
    engine = TorchEngine(handle, name="e0")
    before = await await_ref(handle.slow_flush.remote(1.5))
    with pytest.raises(EngineTimeout, match=r"Timeouts\.flush"):
        await engine.flush(later_call(timeout=0.5))
    await engine.flush(later_call())  # the caller's own second call waits behind the first
    assert await await_ref(handle.slow_flush.remote(0.0)) == before + 2
