"""Updates that are cancelled, and broadcasters that are closed, at bad moments."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from async_wsync import BroadcastLock, EngineState, TorchEngine, UpdateFailed, WeightBroadcaster
from async_wsync.testing import Fault
from async_wsync.types import Call
from tests.support.cluster import ROOT, RayCluster
from tests.support.fleet import (
    BUCKET_BYTES,
    LIMITS,
    NUM_BUCKETS,
    SOON,
    Bar,
    Rig,
    a_model,
    a_source,
    failure_of,
    has_fired,
    heals,
    is_free,
    set_limits,
    update_tasks,
    updating,
)
from tests.support.waiting import until

# ---------------------------------------------------------- cancellation


async def test_a_cancelled_update_is_finished_first(rig: Rig, lock: BroadcastLock) -> None:
    async with rig.broadcaster(["e0", "e1"], lock=lock, num_buffers=1) as broadcaster:
        update = await updating(rig, broadcaster)
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
        update = await updating(rig, broadcaster)
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
        set_limits(broadcaster, LIMITS)
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


class Peculiar(TorchEngine):
    """Its checksums can only be compared with those of its like, as SGLang's."""

    answered = False

    async def checksums(self, call: Call) -> Any:
        return None

    async def own_checksums(self, call: Call) -> dict[str, str]:
        sums = await super().checksums(call)
        self.answered = True
        return sums

    async def sample(self, call: Call, names: Sequence[str], *, rows: int = 1) -> dict[str, Any]:
        return {}


@asynccontextmanager
async def comparing(rig: Rig, *, drain: float) -> AsyncIterator[tuple[Peculiar, WeightBroadcaster, asyncio.Task[Any]]]:
    """e0, the broadcaster, and an update that waits for the checksums of e0 and e1 and has just been cancelled."""
    engines = [Peculiar(rig.handles[name], name=name) for name in ("e0", "e1")]
    async with WeightBroadcaster(
        engines,
        lock=None,
        bucket_bytes=BUCKET_BYTES,
        timeouts=replace(LIMITS, drain=drain),
        progress=False,
        on_cancel="stop",
    ) as broadcaster:
        work = broadcaster.update_weights(a_source(3), version=rig.next_version(), verify="engines")
        update = asyncio.create_task(work)
        for name in ("e0", "e1"):
            await until(partial(has_fired, rig, name))
        update.cancel()
        yield engines[0], broadcaster, update


async def test_an_engine_that_still_compares_when_the_drain_is_over_is_quarantined(rig: Rig) -> None:
    for name in ("e0", "e1"):
        await rig.script(name, Fault(do="delay", at="checksums", seconds=0.1 if name == "e1" else 60))
    async with comparing(rig, drain=2.0) as (slow, broadcaster, update):
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await update
        assert isinstance(failure := cancelled.value.__cause__, UpdateFailed)
        assert not slow.answered
        assert broadcaster.engine_states == {"e0": EngineState.LOST, "e1": EngineState.TORN}
        assert "its verify call never settled" in str(failure.outcomes["e0"].error)
        assert not update_tasks()


async def test_an_engine_that_dies_while_they_compare_ends_the_update_after_the_others_answers(rig: Rig) -> None:
    for name in ("e0", "e1"):
        await rig.script(name, Fault(do="delay", at="checksums", seconds=3 if name == "e0" else 60))
    async with comparing(rig, drain=LIMITS.drain) as (slow, broadcaster, update):
        rig.kill("e1")
        assert not slow.answered
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await update
        assert isinstance(failure := cancelled.value.__cause__, UpdateFailed)
        assert (failure.phase, failure.at_fault) == ("verify", ("e1",))
        assert slow.answered
        assert broadcaster.engine_states == {"e0": EngineState.TORN, "e1": EngineState.LOST}
        assert not update_tasks()


# --------------------------------------------------------------- closing


async def test_closing_twice_after_a_failure_and_with_an_update_under_way(rig: Rig, lock: BroadcastLock) -> None:
    broadcaster = rig.broadcaster(["e0", "e1"], lock=lock, num_buffers=1)
    await broadcaster.connect()
    await rig.script("e0", Fault(do="raise_before", bucket=1))
    await failure_of(broadcaster.update_weights(a_source(1), version=rig.next_version()))
    await broadcaster.aclose()
    await broadcaster.aclose()
    await broadcaster.connect()
    update = await updating(rig, broadcaster, seconds=1.0)
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
from tests.support.fleet import BUCKET_BYTES, Events, a_model, a_source

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


ENDS = ("closed", "forgotten")
ScriptEnd = tuple[subprocess.CompletedProcess[str], float]


def _run_script(cluster: RayCluster, script: Path, how: str) -> ScriptEnd:
    """How it ended, and when."""
    done = subprocess.run(
        [sys.executable, "-X", "dev", str(script), cluster.address, cluster.namespace, how],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONASYNCIODEBUG": "0"},
        check=False,
    )
    return done, time.time()


@pytest.fixture(scope="module")
def stalled_scripts(
    ray_cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[ScriptEnd]]]:
    """Side by side, as they mostly wait."""
    script = tmp_path_factory.mktemp("stalled") / "stalled.py"
    script.write_text(SCRIPT)
    with ThreadPoolExecutor(max_workers=len(ENDS)) as pool:
        yield {how: pool.submit(_run_script, ray_cluster, script, how) for how in ENDS}


@pytest.mark.parametrize("how", ENDS)
def test_a_script_that_is_cancelled_with_a_stalled_peer_exits_quietly_within_its_limits(
    stalled_scripts: dict[str, Future[ScriptEnd]], how: str
) -> None:
    done, exited = stalled_scripts[how].result()
    assert done.returncode == 0, done.stderr
    assert "failed as scripted ('e0', 'e1')" in done.stdout
    assert "'e0': 'torn', 'e1': 'lost'" in done.stdout
    (cancelled,) = re.findall(r"cancelled at ([\d.]+)", done.stdout)
    # drain 3 s, close 2 s to leave the groups and 2 s for the group; the rest is the interpreter's and Ray's own end.
    assert exited - float(cancelled) < 3 + 4 + 10
    for complaint in ("never retrieved", "was destroyed", "never awaited", "RuntimeWarning", "Exception ignored"):
        assert complaint not in done.stderr, done.stderr
