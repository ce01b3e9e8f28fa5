"""Engines come and go: membership, catching up, dropping, isolation; short forms of the sweeps in tests/chaos."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import ray

from async_wsync import BroadcastLock, EngineState, TorchEngine, UpdateFailed, WeightBroadcaster
from async_wsync.testing import Fault
from tests.support.changing_fleet import BUCKET_BYTES, LIMITS, Engines, is_free, resources, source, start_engines
from tests.support.cluster import RayCluster
from tests.support.fleet_scenarios import drop_sweep, replace_many


@pytest.fixture(scope="module")
def _handles(ray_cluster: RayCluster) -> Iterator[list[Any]]:
    """Three engines that live through the tests; a dead one is replaced before the next test needs it."""
    handles = start_engines(3)
    yield handles
    for handle in handles:
        ray.kill(handle)


@pytest.fixture
async def engines(_handles: list[Any]) -> AsyncIterator[Engines]:
    """e0, e1 and e2, alive and without a script, and whatever a test puts beside them."""
    engines = Engines({})
    for i, handle in enumerate(_handles):
        try:
            await handle.start_over.remote()
        except ray.exceptions.RayActorError:
            (_handles[i],) = start_engines(1)
    for i, handle in enumerate(_handles):
        await engines.put(f"e{i}", handle)
    yield engines
    for handle in engines.handles.values():
        if handle not in _handles:
            ray.kill(handle)


def broadcaster(engines: Engines, **options: object) -> WeightBroadcaster:
    settings = {"lock": None, "timeouts": LIMITS, "progress": False, "bucket_bytes": BUCKET_BYTES, **options}
    return WeightBroadcaster(engines.adapters(), **settings)  # type: ignore[arg-type]


async def test_an_engine_killed_at_any_event_is_dropped_and_its_replacement_catches_up(ray_cluster: RayCluster) -> None:
    figures = await drop_sweep(victims=("e1",), points=(1, 8, 12))
    assert figures.facts["survivors current"] == "3 of 3"


async def test_a_newcomer_is_stale_until_it_has_caught_up_and_nobody_else_is_disturbed(engines: Engines) -> None:
    """P3"""
    (newcomer,) = start_engines(1)
    await newcomer.pid.remote()
    async with broadcaster(engines) as casting:
        await casting.update_weights(source(1), version=1)
        await casting.add_engines([await engines.put("e3", newcomer)])
        assert casting.engine_states["e3"] is EngineState.STALE
        assert casting.current_engines() == ("e0", "e1", "e2")
        moment = time.time()
        report = await casting.catch_up(source(1))
        assert report is not None
        assert list(report.engines) == ["e3"]
        assert casting.current_engines() == ("e0", "e1", "e2", "e3")
        assert await engines.holds("e3", 1)
        for name in ("e0", "e1", "e2"):
            assert await engines.verbs_since(name, moment) == []
        assert await casting.catch_up(source(1)) is None
        await casting.update_weights(source(2), version=2)
        assert all([await engines.holds(name, 2) for name in engines.handles])


async def test_a_removed_engine_is_out_of_the_group_and_gets_nothing_more(engines: Engines) -> None:
    async with broadcaster(engines) as casting:
        await casting.update_weights(source(1), version=1)
        await casting.remove_engines(["e1"])
        moment = time.time()
        await casting.update_weights(source(2), version=2)
        assert await engines.verbs_since("e1", moment) == []
        assert await engines.holds("e1", 1)
        assert await engines.holds("e2", 2)
        with pytest.raises(ValueError, match="no engine named 'e1'"):
            await casting.remove_engines(["e1"])
        with pytest.raises(ValueError, match="leave no engine"):
            await casting.remove_engines(["e0", "e2"])
        with pytest.raises(ValueError, match="duplicate engine 'e0'"):
            await casting.add_engines([TorchEngine(engines.handles["e1"], name="e0")])


async def test_an_engine_that_ray_restarted_is_noticed_before_the_lock_and_updated(ray_cluster: RayCluster) -> None:
    """Its handle answers as if nothing had happened, without group and without weights."""
    engines = await Engines.start(1)
    from async_wsync.testing import start_engine
    from tests.support.changing_fleet import layers

    restarting = start_engine(layers, max_restarts=1, max_concurrency=4)
    adapter = await engines.put("e1", restarting)
    lock = BroadcastLock.create(name=f"lock-{uuid.uuid4().hex[:8]}", ttl=8.0)
    kinds: list[str] = []
    phases: list[str] = []
    async with WeightBroadcaster(
        [engines.adapters()[0], adapter],
        lock=lock,
        timeouts=LIMITS.scaled(3),
        progress=False,
        on_event=lambda event: kinds.append(event.kind),
    ) as casting:
        await casting.update_weights(source(1), version=1)
        before = engines.pids["e1"]
        engines.kill("e1")
        kinds.clear()
        # Ray needs seconds to start it again, and an update in between says that it is gone.
        while True:
            try:
                report = await casting.update_weights(source(2), version=2)
                break
            except UpdateFailed as error:
                phases.append(error.phase)
        assert set(phases) <= {"hello"}
        assert phases.count("hello") == kinds.count("update_failed")
        await engines.know("e1")
        assert engines.pids["e1"] != before
        assert any("restarted" in note for note in report.engines["e1"].notes) or report.engines["e1"].version == 2
        assert await engines.holds("e1", 2)
    await lock.shutdown()
    engines.close()


async def test_a_replaced_handle_is_noticed_before_the_lock_is_taken(engines: Engines) -> None:
    """P4"""
    lock = BroadcastLock.create(name=f"lock-{uuid.uuid4().hex[:8]}", ttl=8.0)
    async with broadcaster(engines, lock=lock) as casting:
        await casting.update_weights(source(1), version=1)
        ray.kill(engines.handles["e2"])
        grants = (await lock.status())["last_fence"]
        with pytest.raises(UpdateFailed, match="e2") as caught:
            await casting.update_weights(source(2), version=2)
        assert (await lock.status())["last_fence"] == grants
        assert caught.value.outcomes["e2"].state is EngineState.LOST
        assert casting.current_engines() == ("e0", "e1")
    await lock.shutdown()


async def test_fewer_engines_than_min_engines_is_a_failure(engines: Engines) -> None:
    async with broadcaster(engines, on_engine_failure="drop", min_engines=3) as casting:
        await casting.update_weights(source(1), version=1)
        await engines.handles["e1"].set_script.remote([Fault(do="exit", bucket=1)])
        with pytest.raises(UpdateFailed, match="e1") as caught:
            await casting.update_weights(source(2), version=2)
        assert caught.value.at_fault == ("e1",)
        assert caught.value.outcomes["e0"].state is EngineState.TORN


async def test_rebuilds_are_bounded(engines: Engines) -> None:
    async with broadcaster(engines, on_engine_failure="drop", max_rebuilds=1) as casting:
        await casting.update_weights(source(1), version=1)
        await engines.handles["e0"].set_script.remote([Fault(do="raise_before", bucket=0)])
        await engines.handles["e1"].set_script.remote([Fault(do="raise_before", bucket=0, skip=1)])
        with pytest.raises(UpdateFailed) as caught:
            await casting.update_weights(source(2), version=2)
        assert any("max_rebuilds" in note for note in caught.value.__notes__)
        assert [await engines.handles[e].fired.remote() for e in ("e0", "e1")] == [["raise_before at receive"]] * 2


@pytest.mark.parametrize("do", ["exit", "raise_before"])
async def test_in_groups_of_their_own_the_others_are_sent_nothing_twice(engines: Engines, do: str) -> None:
    async with broadcaster(engines, on_engine_failure="drop", topology="per_engine") as casting:
        await casting.update_weights(source(1), version=1)
        await engines.handles["e1"].set_script.remote([Fault(do=do, bucket=1)])  # type: ignore[arg-type]
        moment = time.time()
        report = await casting.update_weights(source(2), version=2)
        assert report.dropped == ("e1",)
        assert report.rebuilds == 0
        assert casting.current_engines() == ("e0", "e2")
        for name in ("e0", "e2"):
            verbs = await engines.verbs_since(name, moment)
            assert (verbs.count("begin"), verbs.count("receive")) == (1, report.num_buckets)
            assert await engines.holds(name, 2)


async def test_replacing_engines_leaves_nothing_behind(ray_cluster: RayCluster) -> None:
    figures = await replace_many(times=3)
    assert figures.facts["fds"] <= 4
    assert figures.facts["threads"] <= 2


async def test_the_lock_is_free_after_a_drop(engines: Engines) -> None:
    lock = BroadcastLock.create(name=f"lock-{uuid.uuid4().hex[:8]}", ttl=8.0)
    async with broadcaster(engines, lock=lock, on_engine_failure="drop") as casting:
        await casting.update_weights(source(1), version=1)
        await engines.handles["e1"].set_script.remote([Fault(do="exit", bucket=1)])
        report = await casting.update_weights(source(2), version=2)
        assert report.dropped == ("e1",)
        assert report.engines["e1"].state is EngineState.LOST
        assert await is_free(lock, within=0.1)
    await lock.shutdown()


def test_resources_see_an_open_file() -> None:
    before = resources()["fds"]
    with open(os.devnull):
        assert resources()["fds"] == before + 1
