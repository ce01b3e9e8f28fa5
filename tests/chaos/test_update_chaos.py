"""Faults done to updates in full, and a table of what came of it; docs/failure-modes.md shows its figures."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from async_wsync import BroadcastLock, EngineDied, ModuleSource, TorchEngine, WeightBroadcaster
from async_wsync.testing import Fault, cancel_at_every_await, start_engine
from tests.chaos.slack import SLACK, STRIDE
from tests.support.cluster import RayCluster
from tests.support.fixtures import Judge
from tests.support.fleet import (
    LIMITS,
    NAMES,
    Rig,
    a_large_model,
    a_model,
    a_source,
    call,
    failure_of,
    side_by_side,
    update_tasks,
)
from tests.support.lock_cancel import new_lock
from tests.support.sweep_figures import PROMISED, Figures, Points, Verdict, measured_gaps
from tests.support.sweeps import SETTINGS, Setting, cancel_sweep, fault_sweep

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1700)]

LIMITS_HERE = PROMISED.times(SLACK)


def every_point() -> range | None:
    return None if STRIDE == 1 else range(1, 2000, STRIDE)


@pytest.mark.parametrize("on_cancel", ["finish", "stop"])
@pytest.mark.parametrize("kind", ["once", "twice", "anyio", "timeout"])
async def test_an_update_is_cancelled_at_every_await(
    rig: Rig, lock: BroadcastLock, kind: Any, on_cancel: Any, judge: Judge
) -> None:
    figures = await cancel_sweep(rig, lock, kinds=[kind], on_cancel=on_cancel, at=every_point(), promised=LIMITS_HERE)
    judge(figures, hits=50 / STRIDE)


@pytest.mark.parametrize("on_cancel", ["finish", "stop"])
@pytest.mark.parametrize("setting", SETTINGS[1:], ids=str)
async def test_another_kind_of_update_is_cancelled_at_every_third_await(
    rig: Rig, lock: BroadcastLock, setting: Setting, on_cancel: Any, judge: Judge
) -> None:
    at = range(1, 2000, 3 * STRIDE)
    figures = await cancel_sweep(
        rig, lock, kinds=["once"], on_cancel=on_cancel, at=at, setting=setting, promised=LIMITS_HERE
    )
    judge(figures, hits=15 / STRIDE)


async def test_connecting_and_closing_are_cancelled_at_every_third_await(
    rig: Rig, lock: BroadcastLock, judge: Judge
) -> None:
    figures, points = Figures("cancel a connect, an update and a close"), Points(range(1, 2000, 3 * STRIDE))
    source = ModuleSource(a_model(1))

    async def scenario() -> None:
        async with rig.broadcaster(NAMES[:2], lock=lock) as broadcaster:
            await broadcaster.update_weights(source, version=rig.next_version())

    async with measured_gaps() as gaps:
        async for run in cancel_at_every_await(scenario, kinds=["once", "anyio"], at=points):
            verdict = Verdict(f"{run.kind} at await {run.at} of {run.awaits}", seconds=run.seconds)
            verdict.held_the_loop(await gaps.end(), limit=LIMITS_HERE.loop_gap)
            verdict.check(run.outcome not in ("hung", "raised"), f"{run.outcome} {run.error!r}")
            verdict.check(not update_tasks(), f"tasks left: {update_tasks()}")
            verdict.check(not (await lock.status(timeout=60))["held"], "lock held")
            figures.settle(verdict, points, hit=run.fired)
            await gaps.begin()
    async with rig.broadcaster(NAMES[:2], lock=lock) as broadcaster:
        await broadcaster.update_weights(source, version=rig.next_version(), verify="source")
    judge(figures)


@pytest.mark.parametrize("victim", NAMES)
async def test_an_engine_is_killed_at_every_event(rig: Rig, lock: BroadcastLock, victim: str, judge: Judge) -> None:
    figures = await fault_sweep(rig, lock, victims=[victim], at=every_point(), promised=LIMITS_HERE)
    figures.what += f" of {victim} at every event"
    judge(figures)


async def stopped(rig: Rig, victim: str, at: range | None, setting: Setting) -> Figures:
    lock = new_lock()
    await lock.status(timeout=90)
    figures = await fault_sweep(
        rig, lock, number=signal.SIGSTOP, victims=[victim], at=at, setting=setting, promised=LIMITS_HERE
    )
    await lock.shutdown()
    return figures


async def test_an_engine_is_stopped_at_every_event(rigs: list[Rig], judge: Judge) -> None:
    sweeps = [partial(stopped, victim=victim, at=every_point(), setting=Setting()) for victim in NAMES]
    for victim, figures in zip(NAMES, await side_by_side(rigs, sweeps), strict=True):
        figures.what += f" of {victim} at every event"
        judge(figures)


def every_second(setting: Setting) -> range:
    return range(1 + SETTINGS.index(setting) % 2, 2000, 2 * STRIDE)


@pytest.mark.parametrize("setting", SETTINGS[1:], ids=str)
async def test_another_kind_of_update_meets_a_kill_at_every_second_event(
    rig: Rig, lock: BroadcastLock, setting: Setting, judge: Judge
) -> None:
    at = every_second(setting)
    figures = await fault_sweep(rig, lock, victims=["e1"], at=at, setting=setting, promised=LIMITS_HERE)
    figures.what += " of e1 at every second event"
    judge(figures)


async def test_another_kind_of_update_meets_a_stop_at_every_second_event(rigs: list[Rig], judge: Judge) -> None:
    settings = SETTINGS[1:]
    sweeps = [partial(stopped, victim="e1", at=every_second(setting), setting=setting) for setting in settings]
    for figures in await side_by_side(rigs, sweeps):
        figures.what += " of e1 at every second event"
        judge(figures)


@pytest.mark.gate
async def test_an_engines_own_error_precedes_a_group_timeout_of_twenty_seconds(
    rig: Rig, lock: BroadcastLock, judge: Judge
) -> None:
    figures, points = Figures("engine error before the collective"), Points(range(20))
    source = a_source(1)
    async with (
        measured_gaps() as gaps,
        rig.broadcaster(lock=lock, timeouts=replace(LIMITS, bucket=20), num_buffers=1) as broadcaster,
    ):
        for i in points:
            verdict, name = Verdict(f"run {i}"), NAMES[i % 3]
            await rig.script(name, Fault(do="raise_before", bucket=i % 5, error=KeyError("lm_head")))
            await gaps.begin()
            failure, seconds = await failure_of(broadcaster.update_weights(source, version=rig.next_version()))
            verdict.held_the_loop(await gaps.end(), limit=LIMITS_HERE.loop_gap)
            verdict.took(seconds, limit=LIMITS_HERE.first_failure)
            verdict.check(failure.at_fault == (name,) and "lm_head" in str(failure), str(failure))
            verdict.check(not (await lock.status(timeout=60))["held"], "lock held")
            figures.settle(verdict, points, hit="raise_before at receive" in await rig.fired(name))
        await broadcaster.update_weights(source, version=rig.next_version(), verify="source")
    judge(figures)
    assert figures.fired == figures.runs


async def test_an_engine_is_killed_in_the_middle_of_a_large_bucket(ray_cluster: RayCluster, judge: Judge) -> None:
    delays = [0.0, 0.005, 0.01, 0.015, 0.02]  # a quiet machine sends 64 MB in 50 ms
    figures, points = Figures("kill -9 in the middle of 64 MB"), Points(range(len(delays)))
    source, handles = ModuleSource(a_large_model(1)), [start_engine(a_large_model) for _ in range(2)]
    pids = [await call(handle.pid.remote()) for handle in handles]
    delay = killed_at = 0.0

    def kill() -> None:
        nonlocal killed_at
        killed_at = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)

    def strike(event: Any) -> None:
        if event.kind == "bucket_submitted" and event.version % 2:
            asyncio.get_running_loop().call_later(delay, kill)

    engines = [TorchEngine(handle, name=f"large{i}") for i, handle in enumerate(handles)]
    versions = itertools.count(1)
    async with (
        measured_gaps() as gaps,
        WeightBroadcaster(engines, lock=None, timeouts=LIMITS, progress=False, on_event=strike) as broadcaster,
    ):
        for i in points:
            delay = delays[i]
            verdict, hit = Verdict(f"{delay} s into the bucket"), False
            await gaps.begin()
            try:
                failure, _ = await failure_of(broadcaster.update_weights(source, version=next(versions)))
            except AssertionError:
                verdict.check(False, "nobody noticed")
            else:
                verdict.took(time.monotonic() - killed_at, limit=LIMITS_HERE.first_failure)
                hit = isinstance(failure.__cause__, EngineDied)
                verdict.check(failure.at_fault == ("large1",), str(failure))
            verdict.held_the_loop(await gaps.end(), limit=LIMITS_HERE.loop_gap)
            handles[1] = start_engine(a_large_model)
            pids[1] = await call(handles[1].pid.remote())
            await broadcaster.replace_engine("large1", TorchEngine(handles[1], name="large1"))
            await broadcaster.update_weights(source, version=next(versions))
            figures.settle(verdict, points, hit=hit)
    for handle in handles:
        ray.kill(handle)
    judge(figures)


def resources(pid: int) -> tuple[int, int]:
    """Open file descriptors and threads of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return len(os.listdir(f"/proc/{pid}/fd")), int(status.split("Threads:")[1].split()[0])


@pytest.mark.gate
async def test_thirty_connects_and_closes_leave_descriptors_and_threads_as_they_were(
    rig: Rig, lock: BroadcastLock, judge: Judge
) -> None:
    figures, points = Figures("30 x connect, update, close"), Points(range(33))
    source = a_source(1)
    pids = {"source": os.getpid(), **rig.pids}
    before: dict[str, tuple[int, int]] = {}
    async with measured_gaps() as gaps:
        for i in points:
            if i == 3:  # pools and caches are filled by now
                before = {name: resources(pid) for name, pid in pids.items()}
            await gaps.begin()
            started = time.monotonic()
            async with rig.broadcaster(lock=lock) as broadcaster:
                await broadcaster.update_weights(source, version=rig.next_version())
            verdict = Verdict(f"run {i}", seconds=time.monotonic() - started)
            verdict.held_the_loop(await gaps.end(), limit=LIMITS_HERE.loop_gap)
            figures.settle(verdict, points)
        await asyncio.sleep(1.0)  # daemon threads drop the last groups
    for name, pid in pids.items():
        (fds, threads), (fds_now, threads_now) = before[name], resources(pid)
        print(f"{name}: {fds} -> {fds_now} descriptors, {threads} -> {threads_now} threads")
        if fds_now > fds + 2 or threads_now > threads + 2:
            figures.wrong.append(f"{name}: {fds} -> {fds_now} descriptors, {threads} -> {threads_now} threads")
    judge(figures)
