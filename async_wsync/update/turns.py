"""One piece of work of a broadcaster at a time, as its life cycle allows; closing breaks off whatever has the turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

from async_wsync.errors import Cancelled
from async_wsync.protocols import UpdateLock
from async_wsync.runtime.cancellation import finish
from async_wsync.types import Timeouts
from async_wsync.update.life_cycle import LifeCycle, Phase
from async_wsync.update.locked_work import LockedWork, refuse_holder

__all__ = ["Turns"]


class _Work(Protocol):
    def break_off(self, reason: Exception) -> None: ...


class Turns:
    """The turns of the broadcaster called ``name``, all of whose work takes ``lock``."""

    def __init__(self, name: str, lock: UpdateLock) -> None:
        self._name = name
        self._lock = lock
        self._life = LifeCycle(name)
        self._turn = asyncio.Lock()
        self._running: tuple[str, _Work] | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def phase(self) -> Phase:
        return self._life.phase

    @asynccontextmanager
    async def take(self, call: str) -> AsyncIterator[None]:
        """Our turn, for a call that the life cycle admits.

        Raises `SelfDeadlock` at once in a task that holds the lock, ValueError if the call may not begin now, and
        `Cancelled` if the broadcaster is closed before the turn comes.
        """
        refuse_holder(self._lock)
        admitted = self._life.admit(call)
        async with self._turn:
            self._life.still_wanted(call, admitted)
            yield

    @asynccontextmanager
    async def take_to_open(self) -> AsyncIterator[bool]:
        """The turn of a connect; yields whether the broadcaster is open already. It is open once the body is done.

        Raises as `take`, and `Cancelled` if it is closed before the body is done.
        """
        async with self.take("connect"):
            done = False
            try:
                yield self.phase is Phase.OPEN
                self._life.opened("connect")
                done = True
            finally:
                if not done:
                    self._life.failed_to_open()

    @contextmanager
    def running(self, what: str, work: _Work) -> Iterator[None]:
        """``work`` has our turn, and is what `close` breaks off."""
        self._running = what, work
        try:
            yield
        finally:
            self._running = None

    @contextmanager
    def locked_work(self, what: str, timeouts: Timeouts) -> Iterator[LockedWork]:
        """Work under the lock that has our turn."""
        locked_work = LockedWork(self._lock, label=f"{self._name} {what}", timeouts=timeouts)
        with self.running(what, locked_work):
            yield locked_work

    async def close(self, end: Callable[[], Awaitable[None]]) -> None:
        """Break off what is under way, then do ``end``; a second call while it runs waits for the same."""
        if self._closing is None:
            self._life.closing()
            if self._running is not None:
                what, work = self._running
                work.break_off(Cancelled(f"{self._name} was closed during {what}"))
            self._closing = asyncio.get_running_loop().create_task(self._close(end), name=f"{self._name}: close")
        await finish(self._closing, name=self._closing.get_name())

    async def _close(self, end: Callable[[], Awaitable[None]]) -> None:
        try:
            async with self._turn:
                await end()
        finally:
            self._closing = None
            self._life.closed()
