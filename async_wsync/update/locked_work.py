"""Work under the lock that is no update: connecting, and letting engines go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any, Protocol, runtime_checkable

from async_wsync.errors import Cancelled, LockError
from async_wsync.protocols import HeldLock, UpdateLock
from async_wsync.runtime.cancellation import finish
from async_wsync.runtime.engine_calls import EngineCalls, Interrupt
from async_wsync.runtime.foreign_code import ForeignExit, contained
from async_wsync.types import Timeouts

__all__ = ["LockedWork", "enter", "refuse_holder"]

Work = Callable[[EngineCalls, HeldLock], Awaitable[None]]


@runtime_checkable
class KnowsHolders(Protocol):
    """What our own locks have on top of an `UpdateLock`."""

    def refuse_holder(self) -> None: ...


def refuse_holder(lock: UpdateLock) -> None:
    """Raise `SelfDeadlock` if the current task holds the lock: it would wait for our task, which waits for the lock."""
    if isinstance(lock, KnowsHolders):
        lock.refuse_holder()


async def enter(stack: AsyncExitStack, lock: UpdateLock, *, label: str, timeout: float) -> HeldLock:
    """Hold the lock until ``stack`` is left. A cancellation or an exit that the lock raises itself is a `LockError`."""
    with _as_lock_error("hold() failed"):
        holding = lock.hold(label=label, timeout=timeout)
        held = await holding.__aenter__()

    async def leave(*body: Any) -> bool | None:
        with _as_lock_error("release failed"):
            return await holding.__aexit__(*body)

    stack.push_async_exit(leave)
    return held


@contextmanager
def _as_lock_error(what: str) -> Iterator[None]:
    try:
        with contained(awaits=True):
            yield
    except ForeignExit as error:
        cause = error.__cause__
        raise LockError(f"the lock's {what}: it raised {cause!r}, though nobody asked for that") from cause


class LockedWork:
    """One piece of work under the lock. The engine calls that it starts are settled before the lock goes."""

    def __init__(self, lock: UpdateLock, *, label: str, timeouts: Timeouts) -> None:
        self._lock = lock
        self._label = label
        self._timeouts = timeouts
        self._calls = EngineCalls(Interrupt())
        self._holding = False

    async def run(self, work: Work, *, before: Callable[[], Awaitable[None]] | None = None) -> None:
        """Do ``before``, without the lock, and then ``work`` under it.

        A cancelled caller gets away at once as long as the lock is not ours, and else as soon as all has settled.
        """
        task = asyncio.get_running_loop().create_task(self._go(work, before), name=self._label)

        def stop() -> None:
            if self._holding:
                self.break_off(Cancelled(f"{self._label} was cancelled"))
            else:
                task.cancel()

        await finish(task, on_cancel=stop)

    def break_off(self, reason: Exception) -> None:
        """End it with this failure, wherever it is."""
        self._calls.interrupt.fire(reason)

    async def _go(self, work: Work, before: Callable[[], Awaitable[None]] | None) -> None:
        async with AsyncExitStack() as stack:
            async with self._calls.interrupt.breaks_off():
                if before is not None:
                    await before()
                held = await enter(stack, self._lock, label=self._label, timeout=self._timeouts.lock)
                self._holding = True
            try:
                await work(self._calls, held)
            finally:
                await finish(self._calls.settle(limit=self._drain()), name=f"settling {self._label}")

    def _drain(self) -> float:
        """Seconds for what is under way to settle. Where it was broken off, that is joins of a group that will not be,
        whose members have been given half of ``close`` to leave it."""
        limits = self._timeouts
        return limits.drain if self._calls.interrupt.reason is None else min(limits.drain, limits.close / 4)
