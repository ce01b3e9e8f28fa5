"""Opening, closing and changes of members: wholly or not at all, at any moment, whatever else is under way."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_wsync import (
    AcquireTimeout,
    BroadcastLock,
    Cancelled,
    EngineFailed,
    EngineState,
    TorchEngine,
    UpdateFailed,
    WeightBroadcaster,
)
from async_wsync.testing import cancel_at_every_await
from async_wsync.update.life_cycle import Phase
from tests.support.cluster import ROOT, RayCluster
from tests.support.fleet import LIMITS, Rig, a_source, heals, is_free, update_tasks, updating
from tests.support.waiting import until

#: The lock's wait is the long one: whatever must not wait for it ends long before.
CLOSING = replace(LIMITS, lock=60.0, close=1.0, drain=2.0)


def named(rig: Rig, name: str, as_name: str) -> TorchEngine:
    return TorchEngine(rig.handles[name], name=as_name)


async def waits_for(lock: BroadcastLock, *labels: str) -> None:
    async def waiting() -> bool:
        there = [w["label"] for w in (await lock.status(timeout=30))["waiters"]]
        return all(any(label in one for one in there) for label in labels)

    await until(waiting)


@asynccontextmanager
async def a_neighbour(lock: BroadcastLock) -> AsyncIterator[None]:
    """Another task holds the lock."""
    done, holds = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with lock.hold(label="a slow neighbour", timeout=30):
            holds.set()
            await done.wait()

    neighbour = asyncio.ensure_future(hold())
    await holds.wait()
    try:
        yield
    finally:
        done.set()
        await neighbour


# ---------------------------------------------------------------------------- members


@pytest.mark.parametrize("how", ["replace", "remove"])
async def test_a_change_of_members_that_does_not_get_the_lock_changes_nothing(
    rig: Rig, lock: BroadcastLock, how: str
) -> None:
    async with rig.broadcaster(["e0", "e1"], lock=lock, timeouts=replace(LIMITS, lock=0.3)) as broadcaster:
        await broadcaster.update_weights(a_source(1), version=rig.next_version())
        groups = broadcaster._groups.all
        async with a_neighbour(lock):
            with pytest.raises(AcquireTimeout):
                if how == "replace":
                    await broadcaster.replace_engine("e1", named(rig, "e2", "e2"))
                else:
                    await broadcaster.remove_engines(["e1"])
        assert broadcaster.engine_states == {"e0": EngineState.CURRENT, "e1": EngineState.CURRENT}
        assert broadcaster._groups.all == groups
        await heals(rig, broadcaster)
        assert list(broadcaster.engine_states) == ["e0", "e1"]


async def test_a_change_of_members_that_makes_no_sense_changes_nothing(rig: Rig) -> None:
    async with rig.broadcaster(["e0", "e1"]) as broadcaster:
        for change, why in (
            (broadcaster.remove_engines(["e1", "e9"]), "no engine named 'e9'"),
            (broadcaster.remove_engines(["e0", "e1"]), "leave no engine"),
            (broadcaster.remove_engines("e1"), "names must be a list of strings"),
            (broadcaster.replace_engine("e1", named(rig, "e2", "e0")), "duplicate engine 'e0'"),
            (broadcaster.replace_engine("e1", rig.handles["e2"]), "is not a rollout engine"),
            (broadcaster.add_engines([named(rig, "e2", "e2"), named(rig, "e2", "e2")]), "duplicate engine 'e2'"),
        ):
            with pytest.raises(ValueError, match=why):
                await change
        assert list(broadcaster.engine_states) == ["e0", "e1"]
        await broadcaster.remove_engines(["e1", "e1"])
        assert list(broadcaster.engine_states) == ["e0"]


async def test_a_replacement_stands_where_the_old_engine_stood(rig: Rig) -> None:
    async with rig.broadcaster() as broadcaster:
        await broadcaster.replace_engine("e1", named(rig, "e1", "new"))
        assert list(broadcaster.engine_states) == ["e0", "new", "e2"]
        await broadcaster.update_weights(a_source(1), version=rig.next_version())
        assert broadcaster.current_engines() == ("e0", "new", "e2")


@pytest.mark.parametrize(("kind", "first"), [("once", 1), ("twice", 3), ("anyio", 5), ("timeout", 7)])
async def test_a_replace_cancelled_at_any_await_leaves_the_old_member_or_the_new_one(
    rig: Rig, lock: BroadcastLock, kind: Any, first: int
) -> None:
    found: set[tuple[str, ...]] = set()
    async with rig.broadcaster(["e0", "e1"], lock=lock) as broadcaster:
        await broadcaster.update_weights(a_source(1), version=rig.next_version())

        async def exchange() -> None:
            (old,) = set(broadcaster.engine_states) - {"e0"}
            await broadcaster.replace_engine(old, named(rig, new := {"e1": "e2", "e2": "e1"}[old], new))

        before = tuple(broadcaster.engine_states)
        async for run in cancel_at_every_await(exchange, kinds=[kind], at=range(first, 400, 9)):
            assert run.outcome not in ("hung", "raised"), run
            after = tuple(broadcaster.engine_states)
            assert after in (("e0", "e1"), ("e0", "e2")), run
            if run.outcome == "returned":
                assert after != before, run
            found.add((run.outcome, "kept" if after == before else "changed"))
            assert await is_free(lock)
            assert not update_tasks()
            await broadcaster.update_weights(a_source(2), version=rig.next_version())
            assert broadcaster.current_engines() == after
            before = after
    assert any(outcome != "returned" for outcome, _ in found)


async def test_a_removal_cancelled_at_any_await_has_happened_or_has_not(rig: Rig, lock: BroadcastLock) -> None:
    fired = 0
    async with rig.broadcaster(["e0", "e1"], lock=lock) as broadcaster:
        await broadcaster.update_weights(a_source(1), version=rig.next_version())
        async for run in cancel_at_every_await(
            lambda: broadcaster.remove_engines(["e1"]), kinds=["once"], at=range(2, 400, 9)
        ):
            assert run.outcome in ("returned", "cancelled"), run
            fired += run.fired
            after = tuple(broadcaster.engine_states)
            assert after in (("e0", "e1"), ("e0",)), run
            assert await is_free(lock)
            if after == ("e0",):
                await broadcaster.add_engines([named(rig, "e1", "e1")])
            await broadcaster.update_weights(a_source(2), version=rig.next_version())
            assert broadcaster.current_engines() == ("e0", "e1")
    assert fired >= 2


async def test_nobody_who_answers_is_a_failure_to_connect_also_where_engines_may_be_dropped(rig: Rig) -> None:
    nobody = [TorchEngine(rig.handles[name], name=name, method="ping") for name in ("e0", "e1")]
    broadcaster = WeightBroadcaster(nobody, lock=None, backend="gloo", on_engine_failure="drop", progress=False)
    with pytest.raises(EngineFailed, match="e0: hello"):
        await broadcaster.connect()
    with pytest.raises(ValueError, match="is closed"):
        await broadcaster.update_weights(a_source(1), version=1)
    assert broadcaster.version is None


# ----------------------------------------------------------------- opening and closing


@pytest.mark.parametrize(("kind", "first"), [("once", 2), ("anyio", 6)])
async def test_a_connect_cancelled_at_any_await_leaves_nothing_or_is_open(
    rig: Rig, lock: BroadcastLock, kind: Any, first: int
) -> None:
    fired = 0
    broadcaster = rig.broadcaster(["e0", "e1"], lock=lock)
    async for run in cancel_at_every_await(broadcaster.connect, kinds=[kind], at=range(first, 400, 9)):
        assert run.outcome in ("returned", "cancelled"), run
        fired += run.fired
        assert await is_free(lock)
        assert not update_tasks()
        if run.outcome == "cancelled":
            assert broadcaster._turns.phase is Phase.CLOSED
            assert broadcaster._groups.all == ()
        else:
            assert broadcaster._turns.phase is Phase.OPEN
        await broadcaster.connect()
        await broadcaster.aclose()
    assert fired >= 2


async def test_a_close_cancelled_at_any_await_closes_all_the_same(rig: Rig, lock: BroadcastLock) -> None:
    fired = 0
    broadcaster = rig.broadcaster(["e0", "e1"], lock=lock)
    await broadcaster.connect()
    async for run in cancel_at_every_await(broadcaster.aclose, kinds=["once"], at=range(2, 400, 9)):
        assert run.outcome in ("returned", "cancelled"), run
        fired += run.fired
        assert broadcaster._turns.phase is Phase.CLOSED
        assert broadcaster._groups.all == ()
        assert await is_free(lock)
        assert not update_tasks()
        await broadcaster.connect()
    await broadcaster.aclose()
    assert fired >= 2


async def test_a_connect_beside_an_update_waits_for_its_turn(rig: Rig) -> None:
    async with rig.broadcaster(["e0", "e1"], num_buffers=1) as broadcaster:
        update = await updating(rig, broadcaster, seconds=0.5)
        await broadcaster.connect()
        assert update.done()
        assert (await update).version == rig.version
        await heals(rig, broadcaster)


async def test_a_connect_that_still_waits_when_the_broadcaster_is_closed_opens_nothing(
    rig: Rig, lock: BroadcastLock
) -> None:
    broadcaster = rig.broadcaster(["e0"], lock=lock, timeouts=CLOSING)
    before = len(await rig.seen("e0"))
    async with a_neighbour(lock):
        connecting = asyncio.ensure_future(broadcaster.connect())
        await waits_for(lock, "connect")
        started = time.monotonic()
        await broadcaster.aclose()
        assert time.monotonic() - started < CLOSING.close + CLOSING.drain
        with pytest.raises(Cancelled, match="was closed during connect"):
            await connecting
    await until(lambda: is_free(lock))
    assert "join" not in [s.verb for s in (await rig.seen("e0"))[before:]]
    assert broadcaster._groups.all == ()
    assert broadcaster._turns.phase is Phase.CLOSED


async def test_closing_waits_for_nobodys_wait_and_nothing_opens_after_it(rig: Rig, lock: BroadcastLock) -> None:
    """One waits for the lock, the others for their turn; each is told, and nothing of them happens."""
    broadcaster = rig.broadcaster(["e0", "e1"], lock=lock, timeouts=CLOSING)
    await broadcaster.connect()
    await broadcaster.update_weights(a_source(1), version=rig.next_version())
    version = broadcaster.version
    calls: tuple[Callable[[], Awaitable[Any]], ...] = (
        lambda: broadcaster.update_weights(a_source(2), version=rig.next_version()),
        lambda: broadcaster.remove_engines(["e1"]),
        lambda: broadcaster.replace_engine("e1", named(rig, "e2", "e2")),
        lambda: broadcaster.add_engines([named(rig, "e2", "e2")]),
        lambda: broadcaster.catch_up(a_source(1)),
        lambda: broadcaster.connect(),
    )
    for first in range(3):
        await broadcaster.connect()
        async with a_neighbour(lock):
            waiting = [asyncio.ensure_future(call()) for call in (calls[first], *calls)]
            await waits_for(lock, ("update", "remove", "replace")[first])
            started = time.monotonic()
            await broadcaster.aclose()
            assert time.monotonic() - started < CLOSING.close + CLOSING.drain
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        for outcome in outcomes:
            cause = outcome.__cause__ if isinstance(outcome, UpdateFailed) else outcome
            assert isinstance(cause, Cancelled), outcomes
            assert not isinstance(outcome, UpdateFailed) or outcome.started is False
        assert isinstance(outcomes[1], UpdateFailed)
        assert isinstance(outcomes[5], UpdateFailed)
        assert broadcaster._turns.phase is Phase.CLOSED
        assert broadcaster._groups.all == ()
        assert list(broadcaster.engine_states) == ["e0", "e1"]
        assert broadcaster.version == version
        await until(lambda: is_free(lock))
        assert not update_tasks()


async def test_a_closed_broadcaster_neither_updates_nor_catches_up_until_it_is_connected_again(rig: Rig) -> None:
    broadcaster = rig.broadcaster(["e0"])
    await broadcaster.connect()
    await broadcaster.update_weights(a_source(1), version=rig.next_version())
    await broadcaster.aclose()
    await broadcaster.add_engines([named(rig, "e1", "e1")])
    before = len(await rig.seen("e1"))
    with pytest.raises(ValueError, match=r"catch_up: .* is closed"):
        await broadcaster.catch_up(a_source(1))
    with pytest.raises(ValueError, match=r"update_weights: .* is closed"):
        await broadcaster.update_weights(a_source(1), version=rig.next_version())
    assert len(await rig.seen("e1")) == before
    await broadcaster.connect()
    assert (await broadcaster.catch_up(a_source(1))) is not None
    await broadcaster.aclose()


class Stubborn(TorchEngine):
    """``how``: its adapter raises when it is closed, or never gets done with it."""

    def __init__(self, *args: Any, how: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.how = how
        self.asked = 0

    async def aclose(self) -> None:
        self.asked += 1
        if self.how == "raises":
            raise OSError("no such file")
        if self.how == "cancels":
            raise asyncio.CancelledError
        if self.how == "hangs":
            await asyncio.Event().wait()


@pytest.mark.parametrize("how", ["raises", "cancels", "hangs"])
async def test_closing_goes_on_whatever_an_adapter_does(rig: Rig, how: str) -> None:
    limits = replace(LIMITS, close=0.5)
    engines = [Stubborn(rig.handles["e0"], name="e0", how=how), Stubborn(rig.handles["e1"], name="e1", how="behaves")]
    broadcaster = WeightBroadcaster(engines, lock=None, backend="gloo", timeouts=limits, progress=False)
    await broadcaster.connect()
    started = time.monotonic()
    await broadcaster.aclose()
    assert time.monotonic() - started < 2 * limits.close + 1.0
    assert [engine.asked for engine in engines] == [1] * len(engines)
    assert broadcaster._groups.all == ()
    assert broadcaster._turns.phase is Phase.CLOSED
    assert not update_tasks()


AFTER_RAY = """
import asyncio, logging, sys, threading, time
import ray
from async_wsync import BroadcastLock, LeaseLost, LockUnavailable, PolledLock, Timeouts, TorchEngine
from async_wsync import UpdateFailed, WeightBroadcaster
from async_wsync.testing import BoolLockActor, start_engine
from tests.support.fleet import BUCKET_BYTES, a_model, a_source

async def main():
    engines = [TorchEngine(start_engine(a_model), name=f"e{i}") for i in range(1)]
    locks = {
        "none": None,
        "broadcast": BroadcastLock.create(name="after-ray"),
        "polled": PolledLock(ray.remote(BoolLockActor).options(num_cpus=0).remote()),
    }
    limits = Timeouts(connect=60, lock=30, drain=3, close=2)
    casters = {
        how: WeightBroadcaster(engines, lock=lock, bucket_bytes=BUCKET_BYTES, backend="gloo", timeouts=limits,
                               progress=False) for how, lock in locks.items()
    }
    for version, caster in enumerate(casters.values()):
        await caster.connect()
    await casters["broadcast"].update_weights(a_source(1), version=1)
    try:
        async with locks["broadcast"].hold(label="held while Ray goes", timeout=30) as held:
            ray.shutdown()
            held.set_stage("Ray is gone")
            await asyncio.Event().wait()
    except LeaseLost:
        print("lost the lock")
    async with asyncio.timeout(5):
        try:
            async with locks["polled"].hold(label="too late", timeout=1):
                pass
        except LockUnavailable:
            print("no polled lock")
    for how, caster in casters.items():
        try:
            await caster.update_weights(a_source(2), version=2)
        except Exception as error:
            print("update:", type(error).__name__)
        started = time.monotonic()
        await caster.aclose()
        await caster.aclose()
        assert time.monotonic() - started < 2 * limits.close + 1, time.monotonic() - started
        assert caster._groups.all == ()
    assert not ray.is_initialized()
    deadline = time.monotonic() + 10
    while left := [t.name for t in threading.enumerate() if t.name.startswith(("wsync", "async-wsync"))]:
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.01)
    print("closed, without Ray")

ray.init(address=sys.argv[1], namespace=sys.argv[2], log_to_driver=False, configure_logging=False)
asyncio.run(main())
assert not ray.is_initialized()
"""


def test_closing_after_ray_was_shut_down_is_quiet_and_starts_no_cluster(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    script = tmp_path / "after_ray.py"
    script.write_text(AFTER_RAY)
    done = subprocess.run(
        [sys.executable, str(script), ray_cluster.address, ray_cluster.namespace],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("lost the lock", "no polled lock", "closed, without Ray"):
        assert line in done.stdout
    assert done.stdout.count("update: UpdateFailed") == 3
    assert "Started a local Ray instance" not in done.stderr
