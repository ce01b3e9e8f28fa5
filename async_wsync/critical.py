"""Work under the lock that is no update: connecting, and letting engines go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, runtime_checkable

from async_wsync.calls import EngineCalls, Interrupt
from async_wsync.errors import Cancelled
from async_wsync.runtime.cancellation import finish
from async_wsync.types import HeldLock, Timeouts, UpdateLock

__all__ = ["refuse_holder", "under_lock"]

Work = Callable[[EngineCalls, HeldLock], Awaitable[None]]


@runtime_checkable
class KnowsHolders(Protocol):
    """What our own locks have on top of an `UpdateLock`."""

    def refuse_holder(self) -> None: ...


def refuse_holder(lock: UpdateLock) -> None:
    """Raise `SelfDeadlock` if the current task holds the lock: it would wait for our task, which waits for the lock."""
    if isinstance(lock, KnowsHolders):
        lock.refuse_holder()


async def under_lock(lock: UpdateLock, work: Work, *, label: str, timeouts: Timeouts) -> None:
    """Do ``work`` under the lock; the engine calls that it starts are settled before that goes.

    A cancelled caller gets away at once as long as the lock is not ours, and else as soon as all has settled.
    """
    calls = EngineCalls(Interrupt())
    holding = False

    async def run() -> None:
        nonlocal holding
        async with lock.hold(label=label, timeout=timeouts.lock) as held:
            holding = True
            try:
                await work(calls, held)
            finally:
                await finish(calls.settle(limit=timeouts.drain), name=f"settling {label}")

    task = asyncio.get_running_loop().create_task(run(), name=label)

    def stop() -> None:
        if holding:
            calls.interrupt.fire(Cancelled(f"{label} was cancelled"))
        else:
            task.cancel()

    await finish(task, on_cancel=stop)
