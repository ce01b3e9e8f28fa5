"""Cancelled at any await, in any way, any number of times: the lock comes back."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Coroutine
from functools import partial
from typing import Any

import anyio
import pytest
import ray

from async_wsync.lock import BroadcastLock, PolledLock
from async_wsync.lock.server import LockServer
from async_wsync.testing.locks import BoolLockActor, SlowLockServer
from tests.support.lock_cancel import (
    FREE_WITHIN,
    KINDS,
    cancel_at,
    every_case,
    new_lock,
    storm,
    until_free,
    use_shortly,
)

pytestmark = pytest.mark.usefixtures("ray_cluster")


async def test_a_cancelled_acquire_or_hold_or_release_gives_the_lock_back() -> None:
    lock = new_lock(ttl=30.0)
    await lock.status()
    assert await every_case(lock, partial(use_shortly, lock)) >= 4 * 3 * 3


async def test_a_cancelled_wait_gives_its_place_back() -> None:
    lock = new_lock(ttl=30.0)
    await lock.status()

    async def other(held: asyncio.Event) -> None:
        async with lock.hold(label="other"):
            held.set()
            await asyncio.sleep(0.02)

    async def victim() -> None:
        async with lock.hold(label="victim"):
            await asyncio.sleep(0)

    fired = 0
    for kind in KINDS:
        for times in (1, 2, 3):
            for at in range(1, 200):
                held = asyncio.Event()
                task = asyncio.create_task(other(held))
                await held.wait()
                outcome = await cancel_at(victim, at=at, kind=kind, times=times)
                await task
                await until_free(lock)
                assert outcome.unbalanced == 0, (kind, times, at, outcome)
                if not outcome.fired:
                    break
                fired += 1
    assert fired >= 4 * 3 * 6


async def test_a_cancelled_heartbeat_goes_on_or_ends_with_its_hold() -> None:
    async def cancelled(kind: str) -> int:
        lock = new_lock(ttl=0.6)
        await lock.status()

        async def long_hold() -> None:
            async with lock.hold(label="victim", ttl=0.3):
                await asyncio.sleep(0.23)

        return await every_case(lock, long_hold, kinds=[kind], cancels=(1, 2))

    # Side by side, as they mostly wait; in a loop each, as all awaits of a loop are counted.
    fired = await asyncio.gather(*[asyncio.to_thread(asyncio.run, cancelled(kind)) for kind in KINDS])
    assert sum(fired) >= 4 * 2 * 5


async def test_cancels_at_random_instants_leave_nothing_behind() -> None:
    lock = new_lock(ttl=60.0)
    await lock.status()
    assert await storm(lock, 300, lambda: until_free(lock)) > 100


class NaiveLock:
    """What everybody writes first: correct try/finally, and no thought for a cancelled acquire."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def hold(self, *, label: str, timeout: float) -> NaiveLock:
        return self

    async def __aenter__(self) -> None:
        while not await self.handle.acquire.remote():
            await asyncio.sleep(0.002)

    async def __aexit__(self, *_: object) -> None:
        await self.handle.release.remote()


async def test_a_naive_client_leaks_in_the_same_storm() -> None:
    leaks = 0
    for _ in range(20):
        handle = ray.remote(BoolLockActor).options(num_cpus=0).remote()
        await handle.held.remote()

        async def settled() -> None:
            await asyncio.sleep(0.02)

        task = asyncio.create_task(storm(NaiveLock(handle), 20, settled))
        await asyncio.wait([task], timeout=5.0)
        if not task.done():  # everybody waits for a lock that nobody has
            task.cancel()
            await asyncio.wait([task])
        leaks += await handle.held.remote()
        ray.kill(handle)
        if leaks:
            return
    pytest.fail("the control client never leaked: this storm proves nothing")


async def test_a_polled_lock_survives_the_storm() -> None:
    handle = ray.remote(BoolLockActor).options(num_cpus=0).remote(strict=True)

    async def free() -> None:
        limit = time.monotonic() + FREE_WITHIN
        while await handle.held.remote():
            assert time.monotonic() < limit, "left held"

    assert await storm(PolledLock(handle, interval=0.002), 300, free) > 100
    record = await handle.record.remote()
    assert record["granted"] == record["releases"]
    assert record["releases_of_nothing"] == 0


# ------------------------------------------------------------------------------------ field cases L2 and A2


async def test_a_grant_that_comes_after_the_cancel_is_given_back_at_once() -> None:
    name = f"slow-{uuid.uuid4().hex[:8]}"
    server = ray.remote(SlowLockServer).options(name=name, num_cpus=0).remote(name, answer_delay=0.5)
    lock = BroadcastLock.connect(name=name)
    await lock.status()
    started = time.monotonic()
    task = asyncio.create_task(lock.hold(label="late").__aenter__())
    await asyncio.sleep(0.2)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert time.monotonic() - started >= 0.45, "it was answered after the cancel"
    status = await lock.status()
    assert not status["held"]
    assert [t["what"] for t in status["transitions"]] == ["granted", "released"]
    ray.kill(server)


async def test_the_same_with_a_bool_lock() -> None:
    handle = ray.remote(BoolLockActor).options(num_cpus=0).remote(answer_delay=0.5)
    await handle.held.remote()
    task = asyncio.create_task(PolledLock(handle).hold(label="late").__aenter__())
    await asyncio.sleep(0.2)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert await handle.record.remote() == {"acquires": 1, "granted": 1, "releases": 1, "releases_of_nothing": 0}


async def test_a_bool_lock_that_answers_after_everybody_left_is_still_released() -> None:
    handle = ray.remote(BoolLockActor).options(num_cpus=0).remote(answer_delay=1.0)
    await handle.held.remote()
    with pytest.raises(TimeoutError, match="never answered"):
        async with PolledLock(handle, release_timeout=0.1).hold(label="late", timeout=0.1):
            pass
    limit = time.monotonic() + 10
    while (await handle.record.remote())["releases"] == 0:
        assert time.monotonic() < limit
    assert not await handle.held.remote()


class SlowRelease(LockServer):
    """Takes its time over releases, and counts them."""

    releases = 0

    def release(self, claim: str) -> Any:
        time.sleep(0.1)
        self.releases += 1
        return super().release(claim)

    def count(self) -> int:
        return self.releases


@pytest.fixture
async def slow_release() -> Any:
    name = f"slow-{uuid.uuid4().hex[:8]}"
    server = ray.remote(SlowRelease).options(name=name, num_cpus=0).remote(name)
    await server.count.remote()
    yield BroadcastLock.connect(name=name), server
    ray.kill(server)


async def use(lock: BroadcastLock, held: asyncio.Event) -> None:
    async with lock.hold(label="a2"):
        held.set()


async def test_cancelling_a_pending_release_twice_sends_it_once(slow_release: Any) -> None:
    lock, server = slow_release
    held = asyncio.Event()
    task = asyncio.create_task(use(lock, held))
    await held.wait()
    for _ in range(2):
        await asyncio.sleep(0.02)
        task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert task.cancelling() == 2
    assert await server.count.remote() == 1


@pytest.mark.parametrize("scope", ["asyncio", "anyio"])
async def test_a_time_limit_that_strikes_in_the_release_shows_as_itself(slow_release: Any, scope: str) -> None:
    lock, server = slow_release
    await lock.status()
    held = asyncio.Event()

    async def limited() -> Coroutine[Any, Any, None] | str:
        if scope == "asyncio":
            try:
                async with asyncio.timeout(None) as limit:
                    asyncio.get_running_loop().call_later(0.05, lambda: None)
                    async with lock.hold(label="a2"):
                        held.set()
                        limit.reschedule(asyncio.get_running_loop().time() + 0.03)
            except TimeoutError:
                return "timeout"
        else:
            with anyio.CancelScope() as cancel:
                async with lock.hold(label="a2"):
                    held.set()
                    cancel.deadline = anyio.current_time() + 0.03
            if cancel.cancelled_caught:
                return "timeout"
        return "missed"

    task = asyncio.create_task(limited())
    assert await task == "timeout"
    assert task.cancelling() == 0
    assert await server.count.remote() == 1
    assert not (await lock.status())["held"]
