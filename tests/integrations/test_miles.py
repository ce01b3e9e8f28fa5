"""Every row of `update_bucket`'s table, with a real lock actor, real engine actors and real gloo groups."""

from __future__ import annotations

import asyncio
import pickle
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import timedelta
from typing import Any

import anyio
import pytest
import ray
import torch
import torch.distributed as dist

from async_wsync.errors import EngineDied, EngineFailed, EngineTimeout
from async_wsync.groups.source_end import UpdateGroup
from async_wsync.integrations.miles import update_bucket
from async_wsync.lock import BroadcastLock
from async_wsync.types import Timeouts
from tests.support.cluster import RayCluster
from tests.support.groups import opened
from tests.support.miles_actors import Bar, BoolLock, BrokenBar, MilesEngine, ray_value

GROUP_TIMEOUT = 20.0


@pytest.fixture(scope="module")
def actors(ray_cluster: RayCluster) -> Iterator[list[Any]]:
    """Two engines for the whole module: starting one takes seconds."""
    handles = [MilesEngine.remote() for _ in range(2)]
    yield handles
    for handle in handles:
        ray.kill(handle)


@pytest.fixture(scope="module")
def world(actors: list[Any]) -> Iterator[dist.ProcessGroup]:
    """A plain torch group over this process (rank 0) and both engines. Tests that put it out of step use `connect`."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    refs = [e.join_world.remote("127.0.0.1", store.port, i + 1, 3, GROUP_TIMEOUT) for i, e in enumerate(actors)]
    dist.init_process_group("gloo", store=store, rank=0, world_size=3, timeout=timedelta(seconds=GROUP_TIMEOUT))
    ray.get(refs)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
async def engines(actors: list[Any]) -> list[Any]:
    for engine in actors:
        await ray_value(engine.forget.remote())
    return actors


@pytest.fixture
async def lock(ray_cluster: RayCluster) -> AsyncIterator[Any]:
    handle = BoolLock.remote()
    await ray_value(handle.locked.remote())  # started: a first call waits for the process
    yield handle
    ray.kill(handle)


Connect = Callable[..., Awaitable[UpdateGroup]]


@pytest.fixture
async def connect(ray_cluster: RayCluster) -> AsyncIterator[Connect]:
    """Builds update groups of ours over this process and some engines."""
    groups: list[UpdateGroup] = []

    async def build(engines: list[Any]) -> UpdateGroup:
        rendezvous = await opened(1 + len(engines), timeout=GROUP_TIMEOUT, connect_timeout=30.0)
        refs = [e.join.remote(rendezvous.spec, i + 1, f"engine-{i}") for i, e in enumerate(engines)]
        groups.append(await rendezvous.complete({i + 1: f"engine-{i}" for i in range(len(engines))}))
        for ref in refs:
            await ray_value(ref)
        return groups[-1]

    yield build
    for group in groups:
        await group.aclose(timeout=5.0)


def some_tensors() -> list[tuple[str, torch.Tensor]]:
    return [
        ("a.weight", torch.arange(12, dtype=torch.float32).reshape(3, 4)),
        ("b.weight", torch.arange(20, dtype=torch.bfloat16).reshape(4, 5).t()),
        ("c.weight", torch.nn.Parameter(torch.arange(40, dtype=torch.float32)[::2])),
    ]


async def events(lock: Any) -> list[str]:
    return [what for what, _ in await ray_value(lock.log.remote()) if what != "refused"]


async def num_calls(engines: list[Any]) -> list[int]:
    return [len((await ray_value(e.seen.remote()))["calls"]) for e in engines]


async def released_after_all_engines_finished(lock: Any, engines: list[Any]) -> bool:
    released = max(at for what, at in await ray_value(lock.log.remote()) if what == "released")
    finished = [max((await ray_value(e.seen.remote()))["finished"]) for e in engines]
    return all(at <= released for at in finished)


async def test_success_forwards_all_arguments_delivers_and_clears(
    engines: list[Any], lock: Any, world: dist.ProcessGroup
) -> None:
    sent, tensors, bar = some_tensors(), some_tensors(), Bar()

    await update_bucket("miles-pp_0", world, 7, engines, tensors, selector="target", lock=lock, pbar=bar)

    assert tensors == []
    assert bar.moves == [1]
    assert await events(lock) == ["granted", "released"]
    for engine in engines:
        seen = await ray_value(engine.seen.remote())
        assert seen["calls"] == [
            {
                "names": [name for name, _ in sent],
                "dtypes": [tensor.dtype for _, tensor in sent],
                "shapes": [tensor.shape for _, tensor in sent],
                "group_name": "miles-pp_0",
                "weight_version": "7",
                "selector": "target",
            }
        ]
        for name, tensor in sent:
            assert torch.equal(seen["weights"][name], tensor), name


async def test_success_over_a_group_of_ours(engines: list[Any], lock: Any, connect: Connect) -> None:
    tensors = some_tensors()
    group = await connect(engines)
    await update_bucket(group.spec.name, group, "8", engines, tensors, selector="all", lock=lock, pbar=None)
    assert tensors == []
    assert await events(lock) == ["granted", "released"]
    for engine in engines:
        weights = (await ray_value(engine.seen.remote()))["weights"]
        assert all(torch.equal(weights[name], tensor) for name, tensor in some_tensors())


async def test_a_contended_lock_is_polled_while_the_loop_stays_free(
    engines: list[Any], lock: Any, world: dist.ProcessGroup
) -> None:
    assert await ray_value(lock.acquire.remote())
    tensors, beats = some_tensors(), 0
    update = asyncio.create_task(update_bucket("g", world, 1, engines, tensors, selector="all", lock=lock, pbar=None))
    for _ in range(50):
        await asyncio.sleep(0.01)
        beats += 1
    assert not update.done()
    assert await num_calls(engines) == [0, 0]
    await ray_value(lock.release.remote())
    await update

    log = [what for what, _ in await ray_value(lock.log.remote())]
    assert log.count("refused") >= 2, "it was polled"
    assert log[-2:] == ["granted", "released"]
    assert beats == 50
    assert tensors == []


async def test_a_broadcast_that_cannot_be_set_up_keeps_everything_and_its_own_error(
    engines: list[Any], lock: Any
) -> None:
    for engine in engines:
        await ray_value(engine.set_plan.remote(skip_receive=True, seconds=0.3))
    tensors, bar = some_tensors(), Bar()

    with pytest.raises((ValueError, TypeError, AttributeError, RuntimeError)) as caught:
        await update_bucket("g", object(), 1, engines, tensors, selector="all", lock=lock, pbar=bar)  # type: ignore[arg-type]

    assert not isinstance(caught.value, EngineFailed)
    assert len(tensors) == 3
    assert bar.moves == []
    assert await events(lock) == ["granted", "released"]
    assert await released_after_all_engines_finished(lock, engines)


async def test_an_engine_without_the_method_keeps_everything_and_the_original_error(
    engines: list[Any], lock: Any, world: dist.ProcessGroup
) -> None:
    tensors, bar = some_tensors(), Bar()
    await ray_value(engines[0].set_plan.remote(skip_receive=True, seconds=0.3))
    with pytest.raises(AttributeError, match="update_weights_from_distributed"):
        await update_bucket("g", world, 1, [engines[0], lock], tensors, selector="all", lock=lock, pbar=bar)
    assert len(tensors) == 3
    assert bar.moves == []
    assert await events(lock) == ["granted", "released"]
    assert await released_after_all_engines_finished(lock, engines[:1])


async def test_a_source_that_raises_before_any_call_touches_nothing(
    engines: list[Any], lock: Any, world: dist.ProcessGroup
) -> None:
    tensors = [("ok", torch.zeros(2)), ("ghost", torch.empty(2, device="meta"))]
    with pytest.raises(ValueError, match="ghost"):
        await update_bucket("g", world, 1, engines, tensors, selector="all", lock=lock, pbar=None)
    assert len(tensors) == 2
    assert await events(lock) == []
    assert await num_calls(engines) == [0, 0]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"raise_at_exit": KeyError("model.norm")}, "KeyError"),
        ({"reply": {"success": False, "message": "shape mismatch"}}, "shape mismatch"),
        ({"reply": (False, "no such group")}, "no such group"),
        ({"reply": False}, "False"),
        ({"reply": None}, "None"),
    ],
    ids=["raises", "success False", "tuple", "False", "None"],
)
async def test_a_failing_engine_is_named_and_the_lock_waits_for_the_slow_one(
    engines: list[Any], lock: Any, world: dist.ProcessGroup, plan: dict[str, Any], words: str
) -> None:
    await ray_value(engines[0].set_plan.remote(**plan))
    await ray_value(engines[1].set_plan.remote(seconds=0.7))
    tensors, bar = some_tensors(), Bar()

    with pytest.raises(EngineFailed, match=words) as caught:
        await update_bucket("g", world, 1, engines, tensors, selector="all", lock=lock, pbar=bar)

    assert caught.value.engine.startswith("rollout_engines[0]")
    assert any("rollout_engines[1]" in note and "took the bucket" in note for note in caught.value.__notes__)
    assert len(tensors) == 3
    assert bar.moves == []
    assert await events(lock) == ["granted", "released"]
    assert await released_after_all_engines_finished(lock, engines)

    # Both had taken part, so that the group is still in step: the next call works.
    await update_bucket("g", world, 2, engines, tensors, selector="all", lock=lock, pbar=bar)
    assert tensors == []
    assert bar.moves == [1]
    assert await events(lock) == ["granted", "released"] * 2


async def test_an_engine_that_fails_at_entry_frees_the_other_at_once_and_a_new_group_works(
    engines: list[Any], lock: Any, connect: Connect
) -> None:
    await ray_value(engines[0].set_plan.remote(raise_at_entry=KeyError("model.norm")))
    tensors = [("big", torch.ones(4_000_000))]
    group, started = await connect(engines), time.monotonic()

    with pytest.raises(EngineFailed, match=r"KeyError.*model\.norm") as caught:
        await update_bucket(group.spec.name, group, 1, engines, tensors, selector="all", lock=lock, pbar=None)

    assert time.monotonic() - started < GROUP_TIMEOUT / 2, "nobody waited for the group's timeout"
    assert caught.value.engine.startswith("rollout_engines[0]")
    assert isinstance(caught.value.__cause__, KeyError)
    assert len(tensors) == 1
    assert await released_after_all_engines_finished(lock, engines)

    group = await connect(engines)
    await update_bucket(group.spec.name, group, 2, engines, tensors, selector="all", lock=lock, pbar=None)
    assert tensors == []
    assert await events(lock) == ["granted", "released"] * 2


async def test_a_killed_engine_is_named(engines: list[Any], lock: Any, connect: Connect) -> None:
    engines = [engines[0], MilesEngine.remote()]
    await ray_value(engines[1].set_plan.remote(skip_receive=True, seconds=30.0))
    tensors = [("big", torch.ones(4_000_000))]
    group = await connect(engines)
    update = asyncio.create_task(
        update_bucket(group.spec.name, group, 1, engines, tensors, selector="all", lock=lock, pbar=None)
    )
    await asyncio.sleep(0.5)
    assert not update.done()
    ray.kill(engines[1])

    with pytest.raises(EngineDied) as caught:
        await update

    assert caught.value.engine.startswith("rollout_engines[1]")
    assert len(tensors) == 1
    assert await events(lock) == ["granted", "released"]


async def test_an_engine_that_answers_before_it_received_is_not_believed(
    engines: list[Any], lock: Any, connect: Connect
) -> None:
    await ray_value(engines[0].set_plan.remote(skip_receive=True))
    tensors, bar = [("big", torch.ones(4_000_000))], Bar()
    group = await connect(engines)

    with pytest.raises(EngineFailed):
        await update_bucket(
            group.spec.name,
            group,
            1,
            engines,
            tensors,
            selector="all",
            lock=lock,
            pbar=bar,
            timeouts=Timeouts(bucket=6.0),
        )

    assert len(tensors) == 1
    assert bar.moves == []
    assert await events(lock) == ["granted", "released"]


async def test_an_engine_that_never_answers_is_named_at_the_limit(
    engines: list[Any], lock: Any, connect: Connect
) -> None:
    await ray_value(engines[1].set_plan.remote(seconds=3.0))
    tensors, group = some_tensors(), await connect(engines)
    with pytest.raises(EngineTimeout, match=r"rollout_engines\[1\]") as caught:
        await update_bucket(
            group.spec.name,
            group,
            1,
            engines,
            tensors,
            selector="all",
            lock=lock,
            pbar=None,
            timeouts=Timeouts(bucket=1.0),
        )
    assert caught.value.field == "bucket"
    assert len(tensors) == 3
    assert await released_after_all_engines_finished(lock, engines), "the drain waited for it"


async def test_an_engine_that_raised_is_caught_as_what_it_raised_and_as_ours(
    engines: list[Any], lock: Any, world: dist.ProcessGroup
) -> None:
    await ray_value(engines[0].set_plan.remote(raise_at_exit=RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        await update_bucket("g", world, 1, engines, some_tensors(), selector="all", lock=lock, pbar=None)
    assert isinstance(caught.value, EngineFailed)
    assert type(caught.value.__cause__) is RuntimeError
    copy = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copy, RuntimeError)
    assert isinstance(copy, EngineFailed)
    assert str(copy) == str(caught.value)
    assert (copy.engine, copy.phase) == (caught.value.engine, "receive")
    assert copy.__notes__ == caught.value.__notes__
    assert str(copy.__cause__) == "out of memory"


async def test_an_engine_that_does_not_settle_within_drain_is_quarantined_until_it_does(
    engines: list[Any], lock: Any, connect: Connect
) -> None:
    await ray_value(engines[1].set_plan.remote(seconds=2.5))
    tensors, group = some_tensors(), await connect(engines)
    limits = Timeouts(bucket=0.5, drain=0.5)
    with pytest.raises(EngineTimeout) as caught:
        await update_bucket(group.spec.name, group, 1, engines, tensors, lock=lock, timeouts=limits)
    (name,) = caught.value.unsettled  # type: ignore[attr-defined]
    assert name.startswith("rollout_engines[1]")
    assert await events(lock) == ["granted", "released"]

    with pytest.raises(EngineTimeout, match=r"rollout_engines\[1\].*quarantined"):
        await update_bucket(group.spec.name, group, 1, engines, tensors, lock=lock, timeouts=limits)
    assert await events(lock) == ["granted", "released"], "nothing was begun"
    assert await num_calls(engines) == [1, 1]  # answered only after the call that it was at

    group = await connect(engines)
    await update_bucket(group.spec.name, group, 1, engines, tensors, lock=lock)
    assert tensors == []


@pytest.mark.parametrize("delay", [0.0, 0.0005, 0.002, 0.004, 0.006, 0.01, 0.02, 0.04, 0.1, 0.25])
async def test_cancelled_at_any_await_releases_once_after_all_have_settled(
    engines: list[Any], lock: Any, world: dist.ProcessGroup, delay: float
) -> None:
    for engine in engines:
        await ray_value(engine.set_plan.remote(seconds=0.1))
    tensors = some_tensors()
    update = asyncio.create_task(update_bucket("g", world, 1, engines, tensors, selector="all", lock=lock, pbar=None))
    await asyncio.sleep(delay)
    cancelled = update.cancel()
    await asyncio.sleep(0.005)
    update.cancel()
    if cancelled:
        with pytest.raises(asyncio.CancelledError):
            await update
    await lock_is_free(lock)

    log = await events(lock)
    assert log in ([], ["granted", "released"])
    sent = [(await ray_value(e.seen.remote()))["calls"] for e in engines]
    assert len(sent[0]) == len(sent[1])
    if sent[0]:
        assert tensors == [], "all were delivered"
        assert await released_after_all_engines_finished(lock, engines)
    else:
        assert len(tensors) == 3

    # The group is in step, whatever happened: the next call works.
    await update_bucket("g", world, 2, engines, some_tensors(), selector="all", lock=lock, pbar=None)


async def lock_is_free(lock: Any) -> None:
    for _ in range(200):
        if not await ray_value(lock.locked.remote()):
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the lock stays held")


async def test_cancelled_while_an_engine_fails_keeps_the_tensors_and_the_error_as_cause(
    engines: list[Any], lock: Any, world: dist.ProcessGroup
) -> None:
    await ray_value(engines[0].set_plan.remote(seconds=0.5, raise_at_exit=KeyError("model.norm")))
    tensors = some_tensors()
    update = asyncio.create_task(update_bucket("g", world, 1, engines, tensors, selector="all", lock=lock, pbar=None))
    await asyncio.sleep(0.25)
    update.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await update
    assert "KeyError" in "".join(map(str, getattr(caught.value, "__notes__", []))) + repr(caught.value.__cause__)
    assert len(tensors) == 3
    assert await events(lock) == ["granted", "released"]


async def test_a_cancel_scope_and_a_timeout_show_as_what_they_are(
    engines: list[Any], lock: Any, world: dist.ProcessGroup
) -> None:
    for engine in engines:
        await ray_value(engine.set_plan.remote(seconds=0.3))
    tensors = some_tensors()
    with anyio.move_on_after(0.1) as scope:
        await update_bucket("g", world, 1, engines, tensors, selector="all", lock=lock, pbar=None)
    assert scope.cancelled_caught
    assert await events(lock) == ["granted", "released"]
    assert await released_after_all_engines_finished(lock, engines)

    for engine in engines:
        await ray_value(engine.set_plan.remote(seconds=0.3))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await update_bucket("g", world, 2, engines, some_tensors(), selector="all", lock=lock, pbar=None)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    assert await events(lock) == ["granted", "released"] * 2


async def test_cancelled_while_the_lock_takes_its_time_gives_it_back(
    engines: list[Any], ray_cluster: RayCluster, world: dist.ProcessGroup
) -> None:
    slow, tensors = BoolLock.remote(slow_answer=0.5), some_tensors()
    await ray_value(slow.locked.remote())
    update = asyncio.create_task(update_bucket("g", world, 1, engines, tensors, selector="all", lock=slow, pbar=None))
    await asyncio.sleep(0.2)
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    await lock_is_free(slow)
    assert await events(slow) == ["granted", "released"]
    assert len(tensors) == 3
    assert await num_calls(engines) == [0, 0]
    ray.kill(slow)


async def test_a_lock_that_cannot_be_acquired_keeps_its_own_error(
    engines: list[Any], ray_cluster: RayCluster, world: dist.ProcessGroup
) -> None:
    broken, tensors = BoolLock.remote(broken=True), some_tensors()
    with pytest.raises(Exception, match="the lock is broken"):
        await update_bucket("g", world, 1, engines, tensors, selector="all", lock=broken, pbar=None)
    assert await events(broken) == [], "nobody releases what it does not hold"
    assert len(tensors) == 3
    ray.kill(broken)


async def test_a_broken_bar_fails_nothing_and_an_empty_bucket_calls_nobody(
    engines: list[Any], lock: Any, world: dist.ProcessGroup
) -> None:
    tensors = some_tensors()
    await update_bucket("g", world, 1, engines, tensors, selector="all", lock=lock, pbar=BrokenBar())
    assert tensors == []
    await update_bucket("g", world, 1, engines, tensors, selector="all", lock=lock, pbar=BrokenBar())
    assert await events(lock) == ["granted", "released"]
    assert await num_calls(engines) == [1, 1]


async def test_no_lock_is_fine_for_a_lone_source(engines: list[Any], world: dist.ProcessGroup) -> None:
    tensors = some_tensors()
    await update_bucket("g", world, 1, engines, tensors, selector="all", lock=None, pbar=None)
    assert tensors == []


async def test_a_lock_of_ours_is_taken_and_given_back(
    engines: list[Any], world: dist.ProcessGroup, ray_cluster: RayCluster
) -> None:
    ours = BroadcastLock.create(name=f"miles-{uuid.uuid4().hex[:8]}")
    tensors = some_tensors()
    await update_bucket("g", world, 1, engines, tensors, selector="all", lock=ours, pbar=None)
    assert tensors == []
    assert (await ours.status())["held"] is False

    await ray_value(engines[0].set_plan.remote(raise_at_exit=KeyError("model.norm")))
    with pytest.raises(EngineFailed, match="KeyError"):
        await update_bucket("g", world, 2, engines, some_tensors(), selector="all", lock=ours, pbar=None)
    assert (await ours.status())["held"] is False
    await ours.shutdown()
