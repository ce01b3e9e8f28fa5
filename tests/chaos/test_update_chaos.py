"""Faults done to updates in full, and a table of what came of it; docs/failure-modes.md shows its figures."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from async_wsync import BroadcastLock, EngineDied, ModuleSource, TorchEngine, WeightBroadcaster
from async_wsync.testing import Fault, cancel_at_every_await, start_engine
from tests.chaos.conftest import SLACK, Report
from tests.conftest import RayCluster
from tests.ray.fleet import LIMITS, NAMES, Rig, a_large_model, a_model, a_source, call, failure_of, update_tasks
from tests.sweeps import STOP_BOUND, Figures, cancel_sweep, fault_sweep, measured_gaps

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1700)]

#: Takes only every so manieth point of a sweep, for a quick look.
STRIDE = int(os.environ.get("WSYNC_CHAOS_STRIDE", "1"))
LOOP_GAP = 0.020


Judge = Callable[[Figures], None]


@pytest.fixture
def judge(report_figures: Report) -> Judge:
    """Nothing wrong, and no gap that the machine itself does not explain."""

    def judge(figures: Figures) -> None:
        report_figures(figures)
        assert not figures.wrong, "\n".join(figures.wrong[:20])
        assert figures.gap <= max(LOOP_GAP, 2 * figures.control_gap) * SLACK

    return judge


@pytest.mark.parametrize("on_cancel", ["finish", "stop"])
@pytest.mark.parametrize("kind", ["once", "twice", "anyio", "timeout"])
async def test_an_update_is_cancelled_at_every_await(
    rig: Rig, lock: BroadcastLock, kind: Any, on_cancel: Any, judge: Judge
) -> None:
    at = None if STRIDE == 1 else range(1, 2000, STRIDE)
    figures = await cancel_sweep(rig, lock, kinds=[kind], on_cancel=on_cancel, at=at)
    judge(figures)
    assert figures.fired >= 50 / STRIDE


async def test_connecting_and_closing_are_cancelled_at_every_await(rig: Rig, lock: BroadcastLock, judge: Judge) -> None:
    figures = Figures("cancel a connect, an update and a close")
    source = ModuleSource(a_model(1))

    async def scenario() -> None:
        async with rig.broadcaster(NAMES[:2], lock=lock) as broadcaster:
            await broadcaster.update_weights(source, version=rig.next_version())

    async with measured_gaps(figures) as meter:
        async for run in cancel_at_every_await(scenario, kinds=["once", "anyio"], at=range(1, 2000, 3 * STRIDE)):
            figures.gap = max(figures.gap, meter.longest)
            figures.runs += 1
            figures.fired += run.fired
            figures.slowest = max(figures.slowest, run.seconds)
            where = f"{run.kind} at await {run.at} of {run.awaits}"
            figures.check(run.outcome not in ("hung", "raised"), f"{where}: {run.outcome} {run.error!r}")
            figures.check(not update_tasks(), f"{where}: tasks left: {update_tasks()}")
            figures.check(not (await lock.status(timeout=60))["held"], f"{where}: lock held")
            meter.reset()
    async with rig.broadcaster(NAMES[:2], lock=lock) as broadcaster:
        await broadcaster.update_weights(source, version=rig.next_version(), verify="source")
    judge(figures)


@pytest.mark.parametrize("victim", NAMES)
async def test_an_engine_is_killed_at_every_event(rig: Rig, lock: BroadcastLock, victim: str, judge: Judge) -> None:
    at = None if STRIDE == 1 else range(1, 40, STRIDE)
    figures = await fault_sweep(rig, lock, victims=[victim], at=at, soon=1.0 * SLACK)
    figures.what += f" of {victim} at every event"
    judge(figures)


@pytest.mark.parametrize("victim", NAMES)
async def test_an_engine_is_stopped_at_every_event(rig: Rig, lock: BroadcastLock, victim: str, judge: Judge) -> None:
    at = None if STRIDE == 1 else range(1, 40, STRIDE)
    figures = await fault_sweep(rig, lock, number=signal.SIGSTOP, victims=[victim], at=at, soon=STOP_BOUND * SLACK)
    figures.what += f" of {victim} at every event"
    judge(figures)


async def test_an_engines_own_error_precedes_a_group_timeout_of_twenty_seconds(
    rig: Rig, lock: BroadcastLock, judge: Judge
) -> None:
    figures = Figures("engine error before the collective")
    source = a_source(1)
    async with (
        measured_gaps(figures) as meter,
        rig.broadcaster(lock=lock, timeouts=replace(LIMITS, bucket=20), num_buffers=1) as broadcaster,
    ):
        for i in range(20):
            name = NAMES[i % 3]
            await rig.script(name, Fault(do="raise_before", bucket=i % 5, error=KeyError("lm_head")))
            meter.reset()
            failure, seconds = await failure_of(broadcaster.update_weights(source, version=rig.next_version()))
            figures.gap = max(figures.gap, meter.longest)
            figures.runs += 1
            figures.fired += "raise_before at receive" in await rig.fired(name)
            figures.slowest = max(figures.slowest, seconds)
            named = failure.at_fault == (name,) and "lm_head" in str(failure)
            figures.check(named, f"run {i}: {failure}")
            figures.check(not (await lock.status(timeout=60))["held"], f"run {i}: lock held")
        await broadcaster.update_weights(source, version=rig.next_version(), verify="source")
    judge(figures)
    assert figures.slowest <= 1.0 * SLACK


async def test_an_engine_is_killed_in_the_middle_of_a_large_bucket(ray_cluster: RayCluster, judge: Judge) -> None:
    figures = Figures("kill -9 in the middle of 64 MB")
    source, handles = ModuleSource(a_large_model(1)), [start_engine(a_large_model) for _ in range(2)]
    pids = [await call(handle.pid.remote()) for handle in handles]
    delays = [0.0, 0.005, 0.01, 0.015, 0.02]  # a quiet machine sends 64 MB in 50 ms
    killed_at = 0.0

    def kill() -> None:
        nonlocal killed_at
        killed_at = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)

    def strike(event: Any) -> None:
        if event.kind == "bucket_submitted" and event.version % 2:
            asyncio.get_running_loop().call_later(delays[figures.runs], kill)

    engines = [TorchEngine(handle, name=f"large{i}") for i, handle in enumerate(handles)]
    async with (
        measured_gaps(figures) as meter,
        WeightBroadcaster(engines, lock=None, timeouts=LIMITS, progress=False, on_event=strike) as broadcaster,
    ):
        for i in range(len(delays)):
            meter.reset()
            try:
                failure, _ = await failure_of(broadcaster.update_weights(source, version=2 * i + 1))
            except AssertionError:
                figures.check(False, f"{delays[i]}: nobody noticed")
            else:
                after = time.monotonic() - killed_at
                figures.fired += isinstance(failure.__cause__, EngineDied)
                figures.slowest = max(figures.slowest, after)
                figures.check(failure.at_fault == ("large1",), f"{delays[i]}: {failure}")
                figures.check(after <= 1.0 * SLACK, f"{delays[i]}: {after:.2f} s")
            figures.gap = max(figures.gap, meter.longest)
            figures.runs += 1
            handles[1] = start_engine(a_large_model)
            pids[1] = await call(handles[1].pid.remote())
            meter.reset()  # Ray's own share in starting an actor
            await broadcaster.replace_engine("large1", TorchEngine(handles[1], name="large1"))
            await broadcaster.update_weights(source, version=2 * i + 2)
            figures.gap = max(figures.gap, meter.longest)
    for handle in handles:
        ray.kill(handle)
    judge(figures)


def resources(pid: int) -> tuple[int, int]:
    """Open file descriptors and threads of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return len(os.listdir(f"/proc/{pid}/fd")), int(status.split("Threads:")[1].split()[0])


async def test_thirty_connects_and_closes_leave_descriptors_and_threads_as_they_were(
    rig: Rig, lock: BroadcastLock, judge: Judge
) -> None:
    figures = Figures("30 x connect, update, close")
    source = a_source(1)
    pids = {"source": os.getpid(), **rig.pids}
    before: dict[str, tuple[int, int]] = {}
    async with measured_gaps(figures) as meter:
        for i in range(33):
            if i == 3:  # pools and caches are filled by now
                before = {name: resources(pid) for name, pid in pids.items()}
            meter.reset()
            started = time.monotonic()
            async with rig.broadcaster(lock=lock) as broadcaster:
                await broadcaster.update_weights(source, version=rig.next_version())
            figures.slowest = max(figures.slowest, time.monotonic() - started)
            figures.gap = max(figures.gap, meter.longest)
            figures.runs += 1
        await asyncio.sleep(1.0)  # daemon threads drop the last groups
        for name, pid in pids.items():
            (fds, threads), (fds_now, threads_now) = before[name], resources(pid)
            figures.check(fds_now <= fds + 2, f"{name}: {fds} -> {fds_now} descriptors")
            figures.check(threads_now <= threads + 2, f"{name}: {threads} -> {threads_now} threads")
            print(f"{name}: {fds} -> {fds_now} descriptors, {threads} -> {threads_now} threads")
    figures.fired = figures.runs
    judge(figures)
