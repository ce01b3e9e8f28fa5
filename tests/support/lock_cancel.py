"""Cancelling a coroutine when it, or a task that it started, suspends for the k-th time; and holds of a lock, so."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

from async_wsync.lock import BroadcastLock

KINDS = ("native", "anyio", "timeout", "sibling")


@dataclass
class Outcome:
    """``ended``: returned, cancelled, timeout, scope (an anyio scope took its own cancellation), or an error's name.
    ``unbalanced``: what `task.cancelling()` was left at, less the native cancellations that were sent to the task."""

    fired: bool
    ended: str
    unbalanced: int


class _Counted:
    """Awaits ``coro`` and calls ``suspended`` at each of its suspensions."""

    def __init__(self, coro: Coroutine[Any, Any, Any], suspended: Callable[[], None]) -> None:
        self.coro, self.suspended = coro, suspended

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self.coro.__await__()
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                pending = inner.send(value) if error is None else inner.throw(error)
            except StopIteration as stop:
                return stop.value
            self.suspended()
            value = error = None
            try:
                value = yield pending
            except BaseException as thrown:
                error = thrown


class _Attack:
    def __init__(self, at: int, times: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.at, self.times = at, times
        self.count = self.sent = 0
        self.trigger: Callable[[], object] = self.native
        self.task: asyncio.Task[Any] | None = None

    def native(self) -> None:
        if self.task is not None and not self.task.done():
            self.sent += 1
            self.task.cancel()

    def suspended(self) -> None:
        self.count += 1
        if self.count == self.at:
            self.loop.call_soon(self.trigger)
            for n in range(1, self.times):
                self.loop.call_later(0.002 * n, self.native)

    async def counted(self, coro: Coroutine[Any, Any, Any]) -> None:
        """``coro`` with its suspensions, and those of every task that starts meanwhile, counted."""

        async def wrapped(inner: Any) -> Any:
            return await _Counted(inner, self.suspended)

        self.loop.set_task_factory(lambda loop, inner, **given: asyncio.Task(wrapped(inner), loop=loop, **given))
        try:
            await _Counted(coro, self.suspended)
        finally:
            self.loop.set_task_factory(None)


async def cancel_at(make: Callable[[], Coroutine[Any, Any, Any]], *, at: int, kind: str, times: int) -> Outcome:
    """Run ``make()`` under a cancellation of ``kind`` at suspension ``at``, and ``times - 1`` native ones after it."""
    attack = _Attack(at, times)

    async def victim() -> str:
        attack.task = asyncio.current_task()
        if kind == "anyio":
            with anyio.CancelScope() as scope:
                attack.trigger = scope.cancel
                await attack.counted(make())
            return "scope" if scope.cancelled_caught else "returned"
        if kind == "timeout":
            async with asyncio.timeout(None) as limit:
                attack.trigger = lambda: limit.reschedule(attack.loop.time())
                await attack.counted(make())
        else:
            await attack.counted(make())
        return "returned"

    async def with_sibling() -> str:
        fail = asyncio.Event()
        attack.trigger = fail.set

        async def sibling() -> None:
            await fail.wait()
            raise ValueError("the sibling failed")

        async with asyncio.TaskGroup() as tasks:
            child = tasks.create_task(victim())
            other = tasks.create_task(sibling())
            await asyncio.wait([child])
            other.cancel()
        return child.result()

    task = asyncio.create_task(with_sibling() if kind == "sibling" else victim())
    await asyncio.wait([task])
    assert attack.task is not None
    if task.cancelled():
        ended = "cancelled"
    elif (error := task.exception()) is not None:
        ended = "timeout" if isinstance(error, TimeoutError) else type(error).__name__
    else:
        ended = task.result()
    groups_own = 1 if kind == "sibling" and ended == "ExceptionGroup" else 0
    return Outcome(attack.count >= at, ended, attack.task.cancelling() - attack.sent - groups_own)


#: What the lock promises is 100 ms; a busy machine may add to that.
FREE_WITHIN = 2.0


def new_lock(**options: Any) -> BroadcastLock:
    return BroadcastLock.create(name=f"cancel-{uuid.uuid4().hex[:8]}", **options)


async def until_free(lock: BroadcastLock) -> float:
    """Seconds until nobody holds and nobody waits."""
    started = time.monotonic()
    while time.monotonic() < started + FREE_WITHIN:
        status = await lock.status()
        if not status["held"] and not status["waiters"]:
            return time.monotonic() - started
        await asyncio.sleep(0.002)
    pytest.fail(f"left held or queued: {status}")


async def use_shortly(lock: BroadcastLock) -> None:
    async with lock.hold(label="victim") as held:
        held.set_stage("working")
        await asyncio.sleep(0.001)


async def every_case(
    lock: BroadcastLock,
    make: Any,
    *,
    kinds: Any = KINDS,
    cancels: Any = (1, 2, 3),
    seconds: list[float] | None = None,
) -> int:
    """Cancel at every await, in every way; returns how many cases fired. ``seconds`` takes how long after each of
    them the lock was free."""
    fired = 0
    for kind in kinds:
        for times in cancels:
            for at in range(1, 200):
                outcome = await cancel_at(make, at=at, kind=kind, times=times)
                free_after = await until_free(lock)
                if seconds is not None:
                    seconds.append(free_after)
                if not outcome.fired:
                    assert outcome.ended == "returned"
                    break
                fired += 1
                assert outcome.unbalanced == 0, (kind, times, at, outcome)
                wanted = {"cancelled", "returned"}
                if times == 1:
                    wanted = {
                        "native": {"cancelled"},
                        "anyio": {"scope"},
                        "timeout": {"timeout"},
                        "sibling": {"ExceptionGroup"},
                    }[kind] | {"returned"}
                elif kind != "native":
                    wanted |= {"scope", "timeout", "ExceptionGroup"}
                assert outcome.ended in wanted, (kind, times, at, outcome)
    return fired


async def storm(lock: Any, tries: int, free: Any, *, longest: float = 0.012) -> int:
    """Cancel ``tries`` holds at random instants; returns how many were cancelled."""
    rng = random.Random(7)
    cancelled = 0

    async def hold() -> None:
        async with lock.hold(label="victim", timeout=20.0):
            await asyncio.sleep(rng.uniform(0, 0.002))

    for _ in range(tries // 2):
        tasks = [asyncio.create_task(hold()) for _ in range(2)]
        for task in tasks:
            await asyncio.sleep(rng.uniform(0, longest / 2))
            task.cancel()
        await asyncio.wait(tasks)
        cancelled += sum(task.cancelled() for task in tasks)
    await free()
    return cancelled
