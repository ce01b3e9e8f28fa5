"""Engines that are busy with their own requests: waited for, never starved out, and told from dead ones."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import nn

from async_wsync import (
    EngineState,
    ModuleSource,
    Timeouts,
    TorchEngine,
    UpdateFailed,
    WeightBroadcaster,
    WeightReceiver,
)
from async_wsync.engines.torch.messages import Reply, Request
from async_wsync.errors import EngineDied, EngineFailed, EngineTimeout
from async_wsync.runtime.object_refs import await_ref
from async_wsync.types import PauseMode
from tests.support.actors import killed
from tests.support.cluster import RayCluster
from tests.support.groups import joined
from tests.support.receiver_driver import a_call
from tests.support.updates import manifest_of, update_of

SIZE = 64
LIMITS = Timeouts(connect=20, lock=20, pause=8, begin=2, bucket=8, end=8, resume=8, drain=5, close=5)


def a_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))


class _Busy(WeightReceiver):
    """``generate`` makes the file ``started`` once it is inside."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = a_model()
        self.init_weight_receiver(self.model)

    def pid(self) -> int:
        return os.getpid()


class Threaded(_Busy):
    def generate(self, seconds: float = 0.0, wait: float = 0.0, started: str = "") -> int | None:
        with self.serving(wait=wait) as version:
            _touch(started)
            time.sleep(seconds)
            return version


class Async(_Busy):
    async def generate(self, seconds: float = 0.0, wait: float = 0.0, started: str = "") -> int | None:
        async with self.serving(wait=wait) as version:
            _touch(started)
            await asyncio.sleep(seconds)
            return version


def _touch(path: str) -> None:
    if path:
        Path(path).touch()


@pytest.fixture(scope="module")
def actors(ray_cluster: RayCluster) -> Iterator[dict[tuple[str, int], Any]]:
    """Engines by kind and concurrency."""
    kinds = {("async", 4): Async, ("async", 1): Async, ("threaded", 4): Threaded, ("threaded", 1): Threaded}
    handles = {
        (kind, slots): ray.remote(cls).options(num_cpus=0, max_concurrency=slots).remote()
        for (kind, slots), cls in kinds.items()
    }
    ray.get([handle.pid.remote() for handle in handles.values()])
    yield handles
    for handle in handles.values():
        ray.kill(handle)


def a_broadcaster(handles: dict[str, Any], **options: Any) -> WeightBroadcaster:
    engines = [TorchEngine(handle, name=name) for name, handle in handles.items()]
    return WeightBroadcaster(
        engines, **{"lock": None, "backend": "gloo", "timeouts": LIMITS, "progress": False, **options}
    )


@asynccontextmanager
async def requests(handle: Any, *, every: float, **arguments: Any) -> AsyncIterator[list[Any]]:
    """A request every so many seconds; yields their answers so far."""
    refs: list[Any] = []
    answers: list[Any] = []

    async def answer(ref: Any) -> None:
        try:
            answers.append(await await_ref(ref))
        except Exception as error:
            answers.append(error)

    async def send() -> None:
        while True:
            refs.append(asyncio.create_task(answer(handle.generate.remote(**arguments))))
            await asyncio.sleep(every)

    sending = asyncio.create_task(send())
    try:
        yield answers
    finally:
        sending.cancel()
        await asyncio.gather(sending, *refs, return_exceptions=True)


@pytest.mark.parametrize("kind", [("async", 4), ("async", 1), ("threaded", 4)], ids=lambda k: f"{k[0]} of {k[1]}")
async def test_requests_that_wait_in_serving_never_keep_an_update_out(
    kind: tuple[str, int], actors: dict[tuple[str, int], Any]
) -> None:
    async with a_broadcaster({"e0": actors[kind]}) as broadcaster:
        async with requests(actors[kind], every=0.01, wait=3.0, seconds=0.001) as answers:
            for version in (1, 2, 3):
                report = await broadcaster.update_weights(ModuleSource(a_model(version)), version=version)
                assert report.seconds < 2.0
                await asyncio.sleep(0.1)
            assert broadcaster.engine_states == {"e0": EngineState.CURRENT}
        assert answers
        assert {3} <= set(answers) <= {None, 1, 2, 3}, "every request was served"


async def generating(handle: Any, seconds: float, marker: Path) -> Any:
    """The reference of a generation that has begun."""
    ref = handle.generate.remote(seconds=seconds, started=str(marker))
    async with asyncio.timeout(30):
        while not marker.exists():
            await asyncio.sleep(0.005)
    return ref


async def test_a_single_threaded_engine_that_generates_longer_than_begin_is_waited_for_in_its_pause(
    actors: dict[tuple[str, int], Any], tmp_path: Path
) -> None:
    handle = actors["threaded", 1]
    async with a_broadcaster({"e0": handle}, timeouts=replace(LIMITS, begin=0.5)) as broadcaster:
        busy = await generating(handle, 1.5, tmp_path / "started")
        report = await broadcaster.update_weights(ModuleSource(a_model(4)), version=4)
        assert report.phases["pause"] > 0.8
        assert report.engines["e0"].version == 4
        assert await await_ref(busy) != 4
        assert await await_ref(handle.generate.remote()) == 4


async def test_a_dead_engine_is_named_at_once_though_another_is_busy_and_a_third_is_silent(
    actors: dict[tuple[str, int], Any], tmp_path: Path
) -> None:
    busy, stopped = actors["threaded", 1], actors["threaded", 4]
    dead = ray.remote(Threaded).options(num_cpus=0).remote()
    pid = await await_ref(stopped.pid.remote())
    async with a_broadcaster({"busy": busy, "stopped": stopped, "dead": dead}) as broadcaster:
        running = await generating(busy, 1.5, tmp_path / "started")
        await killed(dead)
        os.kill(pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            with pytest.raises(UpdateFailed) as failed:
                await broadcaster.update_weights(ModuleSource(a_model(5)), version=5)
            assert time.monotonic() - started < 1.0
        finally:
            os.kill(pid, signal.SIGCONT)
        assert isinstance(failed.value.__cause__, EngineDied)
        assert failed.value.at_fault == ("dead",)
        assert broadcaster.engine_states["dead"] is EngineState.LOST
        assert broadcaster.engine_states["stopped"] is not EngineState.LOST
        await await_ref(running)


async def test_a_stopped_engine_costs_the_limit_of_its_hello_and_is_named(
    actors: dict[tuple[str, int], Any],
) -> None:
    healthy, stopped = actors["threaded", 1], actors["threaded", 4]
    pid = await await_ref(stopped.pid.remote())
    async with a_broadcaster({"e0": healthy, "e1": stopped}, timeouts=replace(LIMITS, begin=1.5)) as broadcaster:
        os.kill(pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            with pytest.raises(UpdateFailed) as failed:
                await broadcaster.update_weights(ModuleSource(a_model(6)), version=6)
            assert 1.4 < time.monotonic() - started < 2.5
        finally:
            os.kill(pid, signal.SIGCONT)
        assert isinstance(failed.value.__cause__, EngineTimeout)
        assert failed.value.__cause__.field == "begin"
        assert failed.value.at_fault == ("e1",)


async def test_a_source_that_is_new_gets_through_to_an_engine_whose_every_slot_is_taken(
    actors: dict[tuple[str, int], Any],
) -> None:
    handle = actors["async", 4]
    old, new = TorchEngine(handle, name="e0"), TorchEngine(handle, name="e0")
    call = a_call(fence=a_fence())
    await old.hello(call)
    await old.pause(call, PauseMode.DRAIN)  # and its source dies
    async with requests(handle, every=0.01, wait=10.0):
        await until_full(handle)
        started = time.monotonic()
        await new.hello(call)
        assert time.monotonic() - started < 2.0
        await new.resume(call)
    await old.aclose()
    await new.aclose()


def a_fence() -> int:
    """As high as those of updates without a lock: milliseconds."""
    return time.time_ns() // 1_000_000


async def until_full(handle: Any) -> None:
    """Requests hold every slot of the actor: a call through Ray's queue finds none."""
    with pytest.raises(TimeoutError):
        while True:
            await asyncio.wait_for(await_ref(handle.pid.remote()), 0.5)


async def test_a_long_receive_is_asked_after_and_broken_off_while_requests_hold_every_slot(
    actors: dict[tuple[str, int], Any],
) -> None:
    handle = actors["async", 4]
    engine, call = TorchEngine(handle, name="e0"), a_call(fence=a_fence())
    await engine.hello(call)
    group = await joined([engine], call, timeout=30.0)
    update = update_of(manifest_of(a_model()), group=group.spec.name)
    await engine.begin(call, update)
    receive = asyncio.create_task(engine.receive(call, update, update.buckets[0]))
    async with requests(handle, every=0.01, wait=10.0):
        await until_full(handle)
        started = time.monotonic()
        assert (await engine.hello(call)).state is EngineState.UPDATING
        await engine.abort(call, group.spec.name)
        with pytest.raises(EngineFailed, match="receive 0"):
            await receive
        await engine.reset(call)
        assert time.monotonic() - started < 1.0
        await group.aclose()
        async with a_broadcaster({"e0": handle}) as broadcaster:
            await broadcaster.update_weights(ModuleSource(a_model(8)), version=8)
    await engine.aclose()


@ray.remote(num_cpus=0, max_concurrency=4, concurrency_groups={"weights": 2})
class Grouped(Async):
    @ray.method(concurrency_group="weights")
    def weight_sync(self, request: Request) -> Reply:
        return super().weight_sync(request)


async def test_a_concurrency_group_keeps_the_way_open_where_no_connection_can_be_made(ray_cluster: RayCluster) -> None:
    handle = Grouped.remote()
    engine = TorchEngine(handle, name="e0", control_connection=False)
    async with WeightBroadcaster([engine], lock=None, backend="gloo", timeouts=LIMITS, progress=False) as broadcaster:
        async with requests(handle, every=0.01, wait=3.0, seconds=0.001) as answers:
            await broadcaster.update_weights(ModuleSource(a_model(1)), version=1)
            await broadcaster.update_weights(ModuleSource(a_model(2)), version=2)
        assert {2} <= set(answers) <= {None, 1, 2}
    ray.kill(handle)
