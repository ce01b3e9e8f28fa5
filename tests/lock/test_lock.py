"""The lock over real actors: who gets it, what its errors say, how long it lives."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from typing import Any

import pytest
import ray

from async_wsync.errors import AcquireTimeout, LeaseLost, LockUnavailable, SelfDeadlock
from async_wsync.lock import BroadcastLock, PolledLock, adopt
from async_wsync.rounds.round import UpdateRound
from async_wsync.testing.locks import BoolLockActor
from tests.support.actors import killed
from tests.support.cluster import ROOT
from tests.support.lock_actors import Source
from tests.support.lock_scenarios import many_waiters

pytestmark = pytest.mark.usefixtures("ray_cluster")


def new_name() -> str:
    return f"lock-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def lock() -> BroadcastLock:
    return BroadcastLock.create(name=new_name(), ttl=3.0)


async def hold_in_task(lock: Any, label: str = "holder") -> tuple[asyncio.Task[None], asyncio.Event, Any]:
    """A task that holds until the event is set."""
    leave: asyncio.Event = asyncio.Event()
    ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def run() -> None:
        async with lock.hold(label=label) as held:
            ready.set_result(held)
            await leave.wait()

    task = asyncio.create_task(run())
    return task, leave, await ready


# ------------------------------------------------------------------------------------ taking turns


async def test_the_status_shows_the_holder_and_what_it_is_doing(lock: BroadcastLock) -> None:
    async with lock.hold(label="trainer") as held:
        held.set_stage("bucket 3/12, waiting on engine 2")
        limit = time.monotonic() + 10
        while not (status := await lock.status())["holder"]["stage"]:
            assert time.monotonic() < limit
            await asyncio.sleep(0.01)
        assert status["holder"]["stage"] == "bucket 3/12, waiting on engine 2"
        assert status["holder"]["label"] == "trainer"
        assert status["holder"]["pid"] == os.getpid()
        assert status["holder"]["fence"] == held.fence
        assert "held" in repr(held)
    assert not (await lock.status())["held"]
    assert "released" in repr(held)


async def test_waiters_are_served_in_the_order_they_came(lock: BroadcastLock) -> None:
    task, leave, _ = await hold_in_task(lock)
    order: list[int] = []

    async def wait(number: int) -> None:
        async with lock.hold(label=f"waiter {number}"):
            order.append(number)

    waiters = []
    for number in range(5):
        waiters.append(asyncio.create_task(wait(number)))
        while len((await lock.status())["waiters"]) <= number:
            await asyncio.sleep(0.005)
    leave.set()
    await asyncio.gather(task, *waiters)
    assert order == [0, 1, 2, 3, 4]


async def test_a_thousand_waiters_slow_nobody_down() -> None:
    figures = await many_waiters(1000, 200, limit=15.0)
    assert figures.facts["waiters"] == 1000
    # 100 in a second are promised; the rest is for a busy machine. It was 4 when every waiter polled as if alone.
    assert figures.facts["handovers"] / sum(figures.seconds) > 25


async def test_a_lease_is_kept_alive_for_as_long_as_the_body_runs() -> None:
    lock = BroadcastLock.create(name=new_name(), ttl=0.6)
    async with lock.hold(label="long") as held:
        await asyncio.sleep(1.8)
        held.check()
        assert (await lock.status())["holder"]["fence"] == held.fence


async def test_many_processes_that_create_one_name_share_one_lock() -> None:
    name = new_name()

    @ray.remote(num_cpus=0)
    class Creator:
        async def take(self, seconds: float) -> tuple[float, float, str]:
            # Kept for the actor's life: the lock lives as long as the handle of the one that made it.
            self.lock = BroadcastLock.create(name=name, ttl=10.0)
            async with self.lock.hold(label=f"creator {os.getpid()}"):
                start = time.monotonic()
                await asyncio.sleep(seconds)
                return start, time.monotonic(), (await self.lock.status())["name"]

    creators = [Creator.remote() for _ in range(6)]
    spans = await asyncio.gather(*[c.take.remote(0.05) for c in creators])
    assert all(spans[n][2] == name for n in range(6))
    ordered = sorted(spans)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ordered))
    for creator in creators:
        ray.kill(creator)


async def test_a_lock_can_be_sent_to_an_actor(lock: BroadcastLock) -> None:
    source = ray.remote(Source).options(num_cpus=0).remote()
    async with lock.hold(label="here") as held:
        waiting = source.wait_for.remote(lock, "there", 30.0)
        while not (await lock.status())["waiters"]:
            await asyncio.sleep(0.01)
    _, fence = await waiting
    assert fence > held.fence
    ray.kill(source)


def test_a_lock_survives_pickling_without_a_handle() -> None:
    lock = pickle.loads(pickle.dumps(BroadcastLock(name="n", namespace="s", acquire_timeout=5.0)))
    assert (lock.name, lock.namespace, lock._options["acquire_timeout"]) == ("n", "s", 5.0)


# ------------------------------------------------------------------------------------ waiting in vain


async def test_a_wait_that_is_too_long_names_the_holder_and_its_stage(lock: BroadcastLock) -> None:
    task, leave, held = await hold_in_task(lock, "slow trainer")
    held.set_stage("bucket 1/9")
    await asyncio.sleep(0.3)
    started = time.monotonic()
    with pytest.raises(AcquireTimeout, match=r"slow trainer \(pid \d+ on .*bucket 1/9.*gave up after 0.2 s") as caught:
        async with lock.hold(label="waiter", timeout=0.2):
            pytest.fail("granted")
    assert 0.2 <= time.monotonic() - started < 10
    assert caught.value.status is not None
    assert caught.value.status["holder"]["label"] == "slow trainer"
    assert isinstance(caught.value, TimeoutError)
    assert not (await lock.status())["waiters"]
    leave.set()
    await task


async def test_a_timeout_of_zero_tries_once(lock: BroadcastLock) -> None:
    await lock.status()  # the actor is up
    async with lock.hold(label="free", timeout=0):
        pass
    task, leave, _ = await hold_in_task(lock)
    with pytest.raises(AcquireTimeout):
        async with lock.hold(label="taken", timeout=0):
            pytest.fail("granted")
    leave.set()
    await task


async def test_a_task_that_waits_for_itself_is_told_so(lock: BroadcastLock) -> None:
    twin = BroadcastLock.connect(name=lock.name)
    async with lock.hold(label="outer"):
        with pytest.raises(SelfDeadlock, match="already holds"):
            async with twin.hold(label="inner"):
                pytest.fail("granted")
    async with twin.hold(label="afterwards"):
        pass


async def test_a_long_wait_is_logged_with_the_holder(caplog: pytest.LogCaptureFixture) -> None:
    lock = BroadcastLock.create(name=new_name(), ttl=3.0, warn_interval=0.1)
    task, leave, _ = await hold_in_task(lock, "the holder")
    with caplog.at_level(logging.WARNING, logger="async_wsync"), pytest.raises(AcquireTimeout):
        async with lock.hold(label="waiter", timeout=0.6):
            pytest.fail("granted")
    assert any("waiting for" in m and "the holder" in m for m in caplog.messages), caplog.messages
    leave.set()
    await task


async def test_a_lock_that_is_not_scheduled_says_so() -> None:
    lock = BroadcastLock.create(name=new_name(), actor_options={"num_cpus": 1000})
    with pytest.raises(AcquireTimeout, match="not scheduled"):
        async with lock.hold(label="l6", timeout=0.5):
            pytest.fail("granted")
    handle = ray.remote(BoolLockActor).options(num_cpus=1000).remote()
    with pytest.raises(AcquireTimeout, match="not scheduled"):
        async with PolledLock(handle).hold(label="l6", timeout=0.5):
            pytest.fail("granted")


async def test_a_lock_is_scheduled_on_a_full_cluster() -> None:
    @ray.remote(num_cpus=1)
    class Hog:
        def ready(self) -> None: ...

    free = int(ray.available_resources().get("CPU", 0))
    hogs = [Hog.remote() for _ in range(free)]
    await asyncio.gather(*[h.ready.remote() for h in hogs])
    lock = BroadcastLock.create(name=new_name())
    async with lock.hold(label="full", timeout=60.0):
        assert ray.available_resources().get("CPU", 0) < 1
    for hog in hogs:
        ray.kill(hog)


async def test_a_lock_that_nobody_created_is_unavailable() -> None:
    with pytest.raises(LockUnavailable, match="never created"):
        async with BroadcastLock.connect(name=new_name()).hold(label="x"):
            pytest.fail("granted")


def test_bad_input_is_refused_before_anything_is_touched() -> None:
    with pytest.raises(ValueError, match="name"):
        BroadcastLock(name="")
    with pytest.raises(ValueError, match="ttl"):
        BroadcastLock(name="x", ttl=0.0)
    with pytest.raises(ValueError, match="warn_interval"):
        BroadcastLock(name="x", warn_interval=-1.0)
    with pytest.raises(ValueError, match="timeout"):
        BroadcastLock(name="x").hold(label="x", timeout=-1)
    with pytest.raises(ValueError, match="interval"):
        PolledLock(None, interval=0.0)


# ------------------------------------------------------------------------------------ errors, and whose


async def test_the_bodys_error_comes_out_and_the_lock_is_free(lock: BroadcastLock) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with lock.hold(label="failing"):
            raise KeyError("mine")
    assert not (await lock.status())["held"]


async def test_the_bodys_error_wins_over_a_lock_that_died(lock: BroadcastLock) -> None:
    with pytest.raises(KeyError, match="mine") as caught:
        async with lock.hold(label="failing"):
            await lock.shutdown()
            raise KeyError("mine")
    assert "gone" in "".join(caught.value.__notes__)


async def test_a_body_that_finished_in_its_lease_is_not_failed_by_a_dead_lock(lock: BroadcastLock) -> None:
    async with lock.hold(label="done"):
        await lock.shutdown()


async def test_a_revoked_holder_gets_lease_lost_and_not_a_bare_cancellation() -> None:
    lock = BroadcastLock.create(name=new_name(), ttl=0.9)
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(LeaseLost, match=r"victim lost its lease during 'sending': revoked by hand") as caught:
        async with lock.hold(label="victim") as held:
            held.set_stage("sending")
            await asyncio.sleep(0.2)
            assert await lock.revoke(held.claim)
            await asyncio.sleep(30)
    assert task.cancelling() == 0
    assert caught.value.claim == held.claim
    assert held.lost
    with pytest.raises(LeaseLost):
        held.check()
    async with lock.hold(label="next") as after:
        assert after.fence > held.fence


async def test_a_lost_lease_inside_a_task_group_comes_out_as_lease_lost() -> None:
    lock = BroadcastLock.create(name=new_name(), ttl=0.9)
    cancelled = []

    async def child() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            cancelled.append(True)

    with pytest.raises(LeaseLost):
        async with lock.hold(label="victim") as held:
            await lock.revoke(held.claim)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(child())
                tasks.create_task(child())
    assert cancelled == [True, True]


async def test_a_lease_that_was_lost_unseen_is_told_at_the_end(lock: BroadcastLock) -> None:
    with pytest.raises(LeaseLost, match="already ended"):
        async with lock.hold(label="quick") as held:
            await lock.revoke(held.claim)


async def test_an_error_beside_a_lost_lease_stays_and_carries_the_loss(lock: BroadcastLock) -> None:
    with pytest.raises(KeyError) as caught:
        async with lock.hold(label="quick") as held:
            await lock.revoke(held.claim)
            raise KeyError("mine")
    assert "lost its lease" in "".join(caught.value.__notes__)


async def test_a_cancellation_beside_a_lost_lease_stays_a_cancellation() -> None:
    lock = BroadcastLock.create(name=new_name(), ttl=0.9)
    lost = asyncio.Event()

    async def body() -> None:
        async with lock.hold(label="victim") as held:
            await lock.revoke(held.claim)
            while not held.lost:
                await asyncio.sleep(0.01)

    async def stubborn() -> None:
        try:
            await body()
        except LeaseLost:
            lost.set()
            raise

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0.1)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert not lost.is_set()


async def test_strangers_and_repeated_releases_free_nobody_elses_lock(lock: BroadcastLock) -> None:
    async with lock.hold(label="first") as first:
        pass
    async with lock.hold(label="second") as second:
        handle = lock._link.handle
        assert await handle.release.remote("a stranger") == "not held"
        assert await handle.release.remote(first.claim) == "released"
        assert (await lock.status())["holder"]["claim"] == second.claim


async def test_a_hold_is_for_one_use(lock: BroadcastLock) -> None:
    hold = lock.hold(label="once")
    async with hold:
        pass
    with pytest.raises(RuntimeError, match="one use"):
        await hold.__aenter__()


# ------------------------------------------------------------------------------------ how long it lives


def run_driver(ray_cluster: Any, code: str) -> None:
    script = "import asyncio, ray\nfrom async_wsync.lock import BroadcastLock\n"
    script += f"ray.init(address={ray_cluster.address!r}, namespace={ray_cluster.namespace!r}, log_to_driver=False)\n"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script + textwrap.dedent(code)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


async def test_a_lock_ends_with_its_creator_and_says_so(ray_cluster: Any) -> None:
    name = new_name()

    @ray.remote(num_cpus=0)
    class Creator:
        def __init__(self) -> None:
            self.lock = BroadcastLock.create(name=name)

        def ready(self) -> None: ...

    creator = Creator.remote()
    await creator.ready.remote()
    lock = BroadcastLock.connect(name=name)
    assert not (await lock.status())["held"]
    ray.kill(creator)
    with pytest.raises(LockUnavailable, match="as long as the process that created it"):
        while True:
            async with lock.hold(label="orphan", timeout=30.0):
                await asyncio.sleep(0.05)


@ray.remote(num_cpus=0)
class Maker:
    """Makes a lock and a round of one name each, and goes away with them."""

    def __init__(self, name: str) -> None:
        self.made = [BroadcastLock.create(name=name), UpdateRound.create(name=f"{name}-round", num_sources=1)]

    async def ready(self) -> int:
        for made in self.made:
            await made.status()
        return os.getpid()


@ray.remote(num_cpus=0)
class User:
    """Is given a lock and a round that nobody has used so far."""

    async def use(self, lock: BroadcastLock, round_: UpdateRound) -> int:
        async with lock.hold(label="user", timeout=10.0) as held:
            return int(held.fence and (await round_.status())["num_sources"])


async def test_what_is_created_just_after_its_maker_was_killed_is_made_again() -> None:
    """Both are still to be found then, for some 50 ms: used here first, and by whom they are given to."""
    user = User.remote()
    fired = {"here": 0, "there": 0}
    for where in itertools.islice(itertools.cycle(fired), 16):
        name = new_name()
        maker = Maker.remote(name)
        os.kill(await maker.ready.remote(), signal.SIGKILL)
        lock = BroadcastLock.create(name=name)
        round_ = UpdateRound.create(name=f"{name}-round", num_sources=1)
        found = [lock._link.handle, round_._link.handle]
        if where == "there":
            assert await user.use.remote(lock, round_) == 1
        async with lock.hold(label="heir", timeout=10.0):
            assert (await round_.status())["round"] is None
        fired[where] += [lock._link.handle, round_._link.handle] != found
        assert not (await BroadcastLock.connect(name=name).status())["held"]
        await lock.shutdown()
        ray.kill(round_._link.handle)
        if min(fired.values()) > 0:
            break
    assert min(fired.values()) > 0, fired
    ray.kill(user)


async def test_a_lock_that_is_shut_down_is_not_made_again() -> None:
    name = new_name()
    first, second = (BroadcastLock.create(name=name) for _ in range(2))
    await second.status()
    await second.shutdown()
    with pytest.raises(LockUnavailable):
        async with second.hold(label="late", timeout=10.0):
            pytest.fail("granted")
    with pytest.raises(LockUnavailable):
        await first.status()


async def test_a_detached_lock_outlives_its_creator_until_it_is_shut_down(ray_cluster: Any) -> None:
    name = new_name()
    code = f"""
        lock = BroadcastLock.create(name={name!r}, lifetime="detached")
        asyncio.run(lock.status())
    """
    await asyncio.get_running_loop().run_in_executor(None, run_driver, ray_cluster, code)
    lock = BroadcastLock.connect(name=name)
    async with lock.hold(label="heir"):
        pass
    await lock.shutdown()
    with pytest.raises(LockUnavailable):
        async with lock.hold(label="late", timeout=30.0):
            pytest.fail("granted")
    await lock.shutdown()


# ------------------------------------------------------------------------------------ others' lock actors


async def test_a_polled_lock_is_taken_and_given_back() -> None:
    handle = ray.remote(BoolLockActor).options(num_cpus=0).remote(busy_polls=3)
    fences = []
    for _ in range(3):
        async with PolledLock(handle).hold(label="p") as held:
            assert await handle.held.remote()
            held.set_stage("ignored")
            fences.append(held.fence)
    assert not await handle.held.remote()
    assert fences == sorted(set(fences))
    assert await handle.record.remote() == {"acquires": 6, "granted": 3, "releases": 3, "releases_of_nothing": 0}


async def test_a_polled_lock_keeps_the_first_error() -> None:
    handle = ray.remote(BoolLockActor).options(num_cpus=0).remote(strict=True)
    with pytest.raises(KeyError, match="mine") as caught:
        async with PolledLock(handle).hold(label="p"):
            await handle.release.remote()  # a stranger frees it: such a lock does not care
            raise KeyError("mine")
    assert "not held" in "".join(caught.value.__notes__)


async def test_a_polled_lock_that_died_is_unavailable() -> None:
    handle = ray.remote(BoolLockActor).options(num_cpus=0).remote()
    await handle.held.remote()
    await killed(handle)
    with pytest.raises(LockUnavailable):
        async with PolledLock(handle).hold(label="p", timeout=30.0):
            pytest.fail("granted")


async def test_an_adopted_lock_keeps_old_and_new_callers_apart() -> None:
    name = new_name()
    handle = adopt(name=name)
    lock = BroadcastLock.connect(name=name)
    assert await handle.acquire.remote() is True
    assert await handle.acquire.remote() is False
    with pytest.raises(AcquireTimeout, match="a caller of acquire"):
        async with lock.hold(label="new", timeout=0.2):
            pytest.fail("granted")
    await handle.release.remote()
    async with PolledLock(handle).hold(label="old client"):
        assert (await lock.status())["holder"]["label"] == "a caller of acquire()"
    async with lock.hold(label="new", timeout=30.0) as held:
        assert await handle.acquire.remote() is False
        assert await handle.release.remote() == "not held"
        assert (await lock.status())["holder"]["claim"] == held.claim
    limit = time.monotonic() + 10
    while not await handle.acquire.remote():  # it had a place in the queue, and gets its turn
        assert time.monotonic() < limit
    assert await lock.revoke((await lock.status())["holder"]["claim"])
    async with lock.hold(label="new", timeout=30.0):
        pass
