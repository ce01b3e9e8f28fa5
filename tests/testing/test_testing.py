"""The shipped fault injection does what it says, and says what it did."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable
from typing import Any

import anyio
import pytest
import ray
import torch
from torch import nn

from async_wsync import (
    BroadcastLock,
    EngineDied,
    EngineFailed,
    EngineTimeout,
    ModuleSource,
    PolledLock,
    Timeouts,
    TorchEngine,
    UpdateFailed,
    WeightBroadcaster,
)
from async_wsync.errors import EngineRejected
from async_wsync.protocols import EventHook
from async_wsync.runtime.object_refs import await_ref
from async_wsync.testing import (
    BoolLockActor,
    CancelRun,
    Fault,
    LoopGapMeter,
    PortSquatter,
    SlowLockServer,
    cancel_at_every_await,
    kill_at_every_event,
    start_engine,
)
from async_wsync.types import EngineState, PauseMode
from tests.support.cluster import RayCluster
from tests.support.receiver_driver import a_call
from tests.support.updates import manifest_of, update_of

pytestmark = pytest.mark.usefixtures("ray_cluster")

LIMITS = Timeouts().scaled(0.5)


def a_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    # The square matrix travels from storage to storage; two of the small ones are equally large.
    return nn.Sequential(nn.Linear(300, 300), nn.LayerNorm(300), nn.Linear(300, 4))


async def call(ref: Any) -> Any:
    return await asyncio.wait_for(await_ref(ref), 60)


# ------------------------------------------------------------------------ cancel_at_every_await


async def steps(marks: list[str]) -> str:
    try:
        await asyncio.sleep(0)
        marks.append("a")
        await asyncio.sleep(0.001)
        marks.append("b")
        await asyncio.create_task(asyncio.sleep(0.001))
        marks.append("c")
    finally:
        marks.append("end")
    return "done"


@pytest.mark.parametrize("kind", ["once", "twice", "anyio", "timeout"])
async def test_each_await_is_cancelled_once_and_the_sweep_ends_with_a_clean_run(kind: Any) -> None:
    marks: list[str] = []
    runs = []
    async for run in cancel_at_every_await(lambda: steps(marks), kinds=[kind], subtasks=False):
        runs.append((run, marks[:]))
        marks.clear()
    assert [m for _, m in runs] == [["end"], ["a", "end"], ["a", "b", "end"], ["a", "b", "c", "end"]]
    *hit, clean = [run for run, _ in runs]
    assert all(run.fired and run.at == i + 1 for i, run in enumerate(hit))
    assert {run.outcome for run in hit} == {"timeout" if kind == "timeout" else "cancelled"}
    assert {run.cancelling for run in hit} == {0}
    assert not clean.fired
    assert (clean.outcome, clean.value, clean.awaits) == ("returned", "done", 3)


async def test_awaits_of_subtasks_count_but_the_caller_is_cancelled() -> None:
    marks: list[str] = []
    runs: list[CancelRun] = [
        r async for r in cancel_at_every_await(lambda: steps(marks), kinds=["once"], subtasks=True)
    ]
    assert [r.outcome for r in runs] == ["cancelled"] * 4 + ["returned"]
    assert runs[-1].awaits == 4  # the sleep within the task too


async def test_chosen_awaits_only_and_errors_values_and_hangs_are_told_apart() -> None:
    async def stubborn() -> str:
        try:
            await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            raise KeyError("on the way out") from None
        return "late"

    async def deaf() -> None:
        with anyio.CancelScope(shield=True):
            for _ in range(3):
                try:
                    await asyncio.sleep(10)
                except asyncio.CancelledError:
                    continue

    raised = [r async for r in cancel_at_every_await(stubborn, kinds=["once"], at=[1, 5])]
    assert [r.outcome for r in raised] == ["raised", "returned"]
    assert isinstance(raised[0].error, KeyError)
    assert raised[1].value == "late"
    hung = [r async for r in cancel_at_every_await(deaf, kinds=["once"], at=[1], limit=0.1)]
    assert [r.outcome for r in hung] == ["hung"]


async def test_the_task_factory_is_put_back() -> None:
    before = asyncio.get_running_loop().get_task_factory()
    async for _ in cancel_at_every_await(lambda: steps([]), kinds=["once"], at=[1]):
        pass
    assert asyncio.get_running_loop().get_task_factory() is before


# ------------------------------------------------------------------------ small ones


async def test_a_loop_gap_meter_sees_a_blocked_loop() -> None:
    with LoopGapMeter() as meter:
        await asyncio.sleep(0.05)
        meter.reset()
        until = time.monotonic() + 0.1
        while time.monotonic() < until:
            pass
    assert meter.longest > 0.09


def test_a_port_squatter_takes_calls_and_never_answers() -> None:
    with PortSquatter() as squatter:
        with socket.create_connection((squatter.host, squatter.port), timeout=5) as visitor:
            visitor.settimeout(0.1)
            visitor.sendall(b"hello?")
            with pytest.raises(TimeoutError):
                visitor.recv(1)
            assert squatter.visitors() == 1
        with pytest.raises(OSError):
            PortSquatter(port=squatter.port)


def test_a_fault_that_makes_no_sense_is_refused() -> None:
    for wrong in ({"do": "explode"}, {"do": "skip", "at": "lunch"}, {"do": "wrong_order", "at": "end"}):
        with pytest.raises(ValueError):
            Fault(**wrong)  # type: ignore[arg-type]


# ------------------------------------------------------------------------ locks


async def test_a_bool_lock_actor_keeps_a_record(ray_cluster: RayCluster) -> None:
    handle = ray.remote(BoolLockActor).options(num_cpus=0).remote(busy_polls=2, strict=True)
    async with PolledLock(handle).hold(label="test"):
        assert await call(handle.held.remote())
    record = await call(handle.record.remote())
    assert record == {"acquires": 3, "granted": 1, "releases": 1, "releases_of_nothing": 0}
    ray.kill(handle)


async def test_a_slow_lock_grants_at_once_and_answers_late(ray_cluster: RayCluster) -> None:
    options = {"name": "slow", "num_cpus": 0, "namespace": ray_cluster.namespace}
    handle = ray.remote(SlowLockServer).options(**options).remote("slow", answer_delay=0.4)
    lock = BroadcastLock.connect(name="slow", namespace=ray_cluster.namespace)
    await lock.status(timeout=30)
    started = time.monotonic()
    async with lock.hold(label="test", timeout=30):
        assert time.monotonic() - started >= 0.4
    assert not (await lock.status())["held"]
    ray.kill(handle)


# ------------------------------------------------------------------------ the scripted engine


@pytest.fixture(scope="module")
def engine_actor(ray_cluster: RayCluster) -> Any:
    handle = start_engine(a_model)
    yield handle
    ray.kill(handle)


async def scripted(handle: Any, *faults: Fault) -> TorchEngine:
    await call(handle.set_script.remote(faults))
    engine = TorchEngine(handle, name="e0")
    await engine.hello(a_call(timeout=60))
    return engine


async def test_faults_at_a_call_of_ones_choice(engine_actor: Any) -> None:
    engine = await scripted(
        engine_actor,
        Fault(do="raise_before", at="pause", error=KeyError("before")),
        Fault(do="raise_after", at="resume", error=OSError("after")),
        Fault(do="answer", at="flush", answer={"success": False, "message": "no memory"}),
        Fault(do="answer", at="end", answer=None),
        Fault(do="skip", at="publish"),
        Fault(do="delay", at="check", seconds=0.5, skip=1),
        Fault(do="sleep", at="reset", seconds=0.5),
    )
    fired_before = len(await call(engine_actor.fired.remote()))
    with pytest.raises(EngineFailed) as before:
        await engine.pause(a_call(), PauseMode.DRAIN)
    assert isinstance(before.value.__cause__, KeyError)
    await engine.pause(a_call(), PauseMode.DRAIN)  # each fault fires once
    with pytest.raises(EngineFailed, match="after") as after:
        await engine.resume(a_call())
    assert isinstance(after.value.__cause__, OSError)
    await call(engine_actor.generate.remote())  # it did resume
    with pytest.raises(EngineFailed, match="no memory"):
        await engine.flush(a_call())
    update = update_of(manifest_of(a_model()))
    with pytest.raises(EngineFailed, match="None"):
        await engine.end(a_call(), update)
    await engine.publish(a_call(), 99)
    assert await call(engine_actor.state.remote()) == ("stale", None)
    await engine.check(a_call(), update)
    for slow in (engine.check(a_call(), update), engine.reset(a_call())):
        started = time.monotonic()
        await slow
        assert time.monotonic() - started >= 0.5
    fired = (await call(engine_actor.fired.remote()))[fired_before:]
    assert fired == [
        "raise_before at pause",
        "raise_after at resume",
        "answer at flush",
        "answer at end",
        "skip at publish",
        "delay at check",
        "sleep at reset",
    ]
    seen = await call(engine_actor.seen.remote())
    assert [s.verb for s in seen if s.verb in ("pause", "resume", "flush")] == ["pause", "pause", "resume", "flush"]
    assert {s.source for s in seen} == {"trainer"}


async def test_an_engine_that_stops_itself_and_one_that_exits(ray_cluster: RayCluster) -> None:
    handle = start_engine(a_model)
    pid = await call(handle.pid.remote())
    engine = await scripted(handle, Fault(do="stop", at="flush"), Fault(do="exit", at="resume", seconds=0.1))
    with pytest.raises(EngineTimeout):
        await engine.flush(a_call(timeout=0.5))
    os.kill(pid, signal.SIGCONT)
    await engine.resume(a_call(timeout=30))
    with pytest.raises(EngineDied):
        await asyncio.wait_for(_resume_for_ever(engine), 30)


async def _resume_for_ever(engine: TorchEngine) -> None:
    while True:
        await engine.resume(a_call(timeout=30))
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault(do="raise_before", bucket=1, error=KeyError("lm_head")), "lm_head"),
        (Fault(do="raise_after", bucket=1, error=KeyError("lm_head")), "lm_head"),
        (Fault(do="answer", bucket=1, answer=(False, "shape mismatch")), "shape mismatch"),
        (Fault(do="answer", at="end", answer=None), "None"),
    ],
    ids=lambda value: value.do + value.at if isinstance(value, Fault) else "",
)
async def test_a_faulty_engine_fails_the_update_by_name_and_the_next_update_heals_it(
    fault: Fault, said: str, engine_actor: Any
) -> None:
    trainer = a_model(5)
    engine = await scripted(engine_actor, fault)
    async with WeightBroadcaster(
        [engine], lock=None, backend="gloo", bucket_bytes=100_000, timeouts=LIMITS, progress=False
    ) as broadcaster:
        with pytest.raises(UpdateFailed, match=said):
            await broadcaster.update_weights(ModuleSource(trainer), version=1)
        assert f"{fault.do} at {fault.at}" in (await call(engine_actor.fired.remote()))[-1:]
        assert broadcaster.engine_states["e0"] is EngineState.TORN
        await broadcaster.update_weights(ModuleSource(trainer), version=2, verify="source")
        assert await call(engine_actor.state.remote()) == ("current", 2)


async def test_skipping_and_answering_early_do_not_advance_the_version(engine_actor: Any) -> None:
    trainer = a_model(6)
    engine = await scripted(engine_actor, Fault(do="skip", bucket=1))
    limits = Timeouts(bucket=3.0, drain=5.0)
    async with WeightBroadcaster(
        [engine], lock=None, backend="gloo", bucket_bytes=100_000, timeouts=limits, progress=False
    ) as broadcaster:
        with pytest.raises(UpdateFailed):
            await broadcaster.update_weights(ModuleSource(trainer), version=11)
        assert (await call(engine_actor.fired.remote()))[-1] == "skip at receive"
        assert (await call(engine_actor.state.remote()))[1] != 11
        await call(engine_actor.set_script.remote([Fault(do="answer_early", bucket=1)]))
        try:
            await broadcaster.update_weights(ModuleSource(trainer), version=12, verify="source")
        except UpdateFailed:
            pass  # whether the bytes are there in time is a race; a wrong success is what must not be
        else:
            assert await call(engine_actor.state.remote()) == ("current", 12)
        assert (await call(engine_actor.fired.remote()))[-1] == "answer_early at receive"


async def test_an_engine_with_another_order_is_found_out_by_checksums(engine_actor: Any) -> None:
    trainer = a_model(8)
    engine = await scripted(engine_actor, Fault(do="wrong_order", at="begin"))
    async with WeightBroadcaster([engine], lock=None, backend="gloo", timeouts=LIMITS, progress=False) as broadcaster:
        with pytest.raises(UpdateFailed, match="differ"):
            await broadcaster.update_weights(ModuleSource(trainer), version=21, verify="source")
        assert (await call(engine_actor.fired.remote()))[-1] == "wrong_order at begin"
        await broadcaster.update_weights(ModuleSource(trainer), version=22, verify="source")


def a_model_of_wrong_dtype() -> nn.Module:
    return a_model().to(torch.bfloat16)


def a_model_of_wrong_shape() -> nn.Module:
    return nn.Sequential(nn.Linear(300, 300), nn.LayerNorm(300), nn.Linear(300, 5))


async def test_engines_of_a_wrong_dtype_or_shape_are_refused_before_the_first_byte(ray_cluster: RayCluster) -> None:
    for handle in [start_engine(build) for build in (a_model_of_wrong_dtype, a_model_of_wrong_shape)]:
        engine = TorchEngine(handle, name="odd")
        async with WeightBroadcaster(
            [engine], lock=None, backend="gloo", timeouts=LIMITS, progress=False
        ) as broadcaster:
            with pytest.raises(EngineRejected, match=r"2\.weight|0\.weight"):
                await broadcaster.update_weights(ModuleSource(a_model()), version=1)
        assert await call(handle.state.remote()) == ("stale", None)
        ray.kill(handle)


# ------------------------------------------------------------------------ kill_at_every_event


async def test_the_victim_is_killed_at_each_event_and_the_sweep_ends(ray_cluster: RayCluster) -> None:
    handles: dict[str, Any] = {}

    async def fresh(name: str) -> TorchEngine:
        handles[name] = start_engine(a_model)
        pids[name] = await call(handles[name].pid.remote())
        return TorchEngine(handles[name], name=name)

    pids: dict[str, int] = {}
    engine = await fresh("victim")

    async def scenario(on_event: EventHook, victim: str) -> int:
        async with WeightBroadcaster(
            [engine], lock=None, backend="gloo", timeouts=LIMITS, progress=False, on_event=on_event
        ) as broadcaster:
            return (await broadcaster.update_weights(ModuleSource(a_model(3)), version=1)).version

    def kill(victim: str) -> None:
        os.kill(pids[victim], signal.SIGKILL)

    runs = []
    async for run in kill_at_every_event(scenario, ["victim"], kill, at=[2, 1000]):
        runs.append(run)
        if run.fired:
            assert isinstance(run.error, UpdateFailed | EngineDied), run.error
            assert "victim" in str(run.error)
            engine = await fresh("victim")
    killed, clean = runs
    assert killed.event is not None
    assert killed.event is killed.events[1]
    assert killed.seconds_after < 20
    assert not clean.fired
    assert (clean.value, clean.error) == (1, None)
    assert clean.events[-1].kind == "update_finished"
    ray.kill(handles["victim"])


def test_the_scenario_may_be_any_awaitable() -> None:
    async def run() -> list[Any]:
        async def scenario(on_event: EventHook, victim: int) -> None:
            raise KeyError(victim)

        made: Awaitable[Any] = scenario(lambda e: None, 1)
        with pytest.raises(KeyError):
            await made
        return [r async for r in kill_at_every_event(scenario, [1, 2], lambda v: None)]

    runs = asyncio.run(run())
    assert [(r.victim, r.fired, type(r.error)) for r in runs] == [(1, False, KeyError), (2, False, KeyError)]
