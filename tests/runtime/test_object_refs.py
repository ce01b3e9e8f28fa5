"""Awaiting Ray references: outcomes, deaths, cancellation, and nothing reported by the loop."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import ray

from async_wsync.errors import EngineRejected, WeightSyncError
from async_wsync.runtime.object_refs import RemoteDied, RemoteRaised, await_ref, host_address, node_address
from tests.support.actors import killed

pytestmark = pytest.mark.usefixtures("ray_cluster")


class OddError(Exception):
    """Ray cannot rebuild it from its args alone."""

    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"odd {code}")
        self.code = code
        self.hint = hint

    def __reduce__(self) -> Any:
        return (_odd, (self.code, self.hint))


def _odd(code: int, hint: str) -> OddError:
    return OddError(code, hint=hint)


@ray.remote(num_cpus=0)
class Worker:
    def __init__(self) -> None:
        self.calls = 0

    def pid(self) -> int:
        return os.getpid()

    def count(self) -> int:
        return self.calls

    def slow(self, seconds: float) -> str:
        time.sleep(seconds)
        self.calls += 1
        return "slept"

    def raises(self, kind: str) -> None:
        if kind == "key":
            raise KeyError("no such weight")
        if kind == "cancelled":
            raise asyncio.CancelledError("from the engine")
        if kind == "ours":
            raise EngineRejected("2 unknown names", engine="e0", unknown=("a", "b"))
        if kind == "odd":
            raise OddError(7, hint="kept")
        if kind == "group":
            raise ExceptionGroup("several", [ValueError("one"), KeyError("two")])
        raise SystemError(kind)

    def exits(self) -> None:
        os._exit(3)

    async def asks(self, other: Any) -> Any:
        return await other.pid.remote()


@pytest.fixture(scope="module")
def worker(ray_cluster: Any) -> Iterator[Any]:
    handle = Worker.remote()
    yield handle
    ray.kill(handle)


@pytest.fixture(autouse=True)
async def nothing_is_reported_by_the_loop() -> AsyncIterator[None]:
    reports: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
    yield
    gc.collect()
    await asyncio.sleep(0)
    assert not reports, reports


async def test_the_value_arrives_and_a_ref_can_be_awaited_twice(worker: Any) -> None:
    ref = worker.pid.remote()
    assert await await_ref(ref) == await await_ref(ref)


async def test_a_remote_error_is_unwrapped(worker: Any) -> None:
    with pytest.raises(RemoteRaised, match=r"begin of engine 0 raised KeyError: 'no such weight'") as raised:
        await await_ref(worker.raises.remote("key"), what="begin of engine 0")
    assert type(raised.value.cause) is KeyError
    assert raised.value.__cause__ is raised.value.cause
    assert "in raises" in raised.value.remote_traceback
    assert not isinstance(raised.value, KeyError)


async def test_our_own_errors_cross_with_their_facts(worker: Any) -> None:
    with pytest.raises(RemoteRaised) as raised:
        await await_ref(worker.raises.remote("ours"))
    cause = raised.value.cause
    assert type(cause) is EngineRejected
    assert cause.unknown == ("a", "b")
    again = pickle.loads(pickle.dumps(raised.value))
    assert type(again) is RemoteRaised
    assert again.cause.engine == "e0"


async def test_an_error_with_its_own_pickling_keeps_its_facts(worker: Any) -> None:
    with pytest.raises(RemoteRaised) as raised:
        await await_ref(worker.raises.remote("odd"))
    cause = raised.value.cause
    assert isinstance(cause, OddError)
    assert (cause.code, cause.hint) == (7, "kept")


async def test_an_exception_group_is_unwrapped(worker: Any) -> None:
    with pytest.raises(RemoteRaised) as raised:
        await await_ref(worker.raises.remote("group"))
    assert isinstance(raised.value.cause, ExceptionGroup)


async def test_a_remote_cancelled_error_does_not_end_a_task_group_quietly(worker: Any) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.TaskGroup() as group:
            group.create_task(await_ref(worker.raises.remote("cancelled")))
    (error,) = raised.value.exceptions
    assert isinstance(error, RemoteRaised)
    assert not isinstance(error, asyncio.CancelledError)


async def test_cancelling_the_await_leaves_the_remote_call_alone(worker: Any) -> None:
    before = await await_ref(worker.count.remote())
    ref = worker.slow.remote(0.3)
    task = asyncio.create_task(await_ref(ref))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert await await_ref(ref) == "slept"
    assert await await_ref(worker.count.remote()) == before + 1


async def test_a_failure_after_the_await_was_cancelled_is_not_reported(worker: Any) -> None:
    slow, fails = worker.slow.remote(0.2), worker.raises.remote("key")
    task = asyncio.create_task(await_ref(fails))
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.wait([task])
    del task
    await await_ref(slow)
    await asyncio.sleep(0.05)


async def test_a_cancel_at_the_moment_of_the_answer_stays_a_cancel(worker: Any) -> None:
    for _ in range(30):
        task = asyncio.create_task(await_ref(worker.raises.remote("key")))
        while not task.done():
            await asyncio.sleep(0.0005)
            if task._fut_waiter is not None and task._fut_waiter.done():  # type: ignore[attr-defined]
                task.cancel()
        assert task.cancelled() or isinstance(task.exception(), RemoteRaised)


async def test_a_killed_actor_is_told_as_dead_with_its_call() -> None:
    victim = Worker.remote()
    pid = await await_ref(victim.pid.remote())
    ref = victim.slow.remote(30)
    await asyncio.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RemoteDied, match="receive of engine 1: the process that runs it died") as raised:
        await await_ref(ref, what="receive of engine 1")
    assert time.monotonic() - started < 5
    assert isinstance(raised.value, WeightSyncError)
    with pytest.raises(RemoteDied) as later:
        await await_ref(victim.pid.remote())
    assert later.value.certain


async def test_an_actor_that_exits_in_the_call_is_told_as_dead() -> None:
    victim = Worker.remote()
    with pytest.raises(RemoteDied):
        await await_ref(victim.exits.remote())


async def test_an_actor_that_asked_a_dead_one_has_raised_and_is_not_dead(worker: Any) -> None:
    victim = Worker.remote()
    await await_ref(victim.pid.remote())
    await killed(victim)
    with pytest.raises(RemoteDied):
        await await_ref(victim.pid.remote())
    with pytest.raises(RemoteRaised):
        await await_ref(worker.asks.remote(victim))
    assert await await_ref(worker.pid.remote()) > 0


async def test_an_actor_whose_constructor_fails_is_told_as_dead() -> None:
    @ray.remote(num_cpus=0)
    class Broken:
        def __init__(self) -> None:
            raise ValueError("no model here")

        def ping(self) -> None: ...

    with pytest.raises(RemoteDied, match="died"):
        await await_ref(Broken.remote().ping.remote())


def test_the_node_address_is_rays_and_the_hosts_is_an_address() -> None:
    assert node_address() == ray.util.get_node_ip_address()
    assert host_address().count(".") == 3
