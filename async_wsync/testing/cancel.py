"""Replaying a coroutine with a cancellation at each of its awaits."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import anyio

__all__ = ["CANCEL_KINDS", "CancelKind", "CancelRun", "cancel_at_every_await"]

CancelKind = Literal["once", "twice", "anyio", "timeout"]
CANCEL_KINDS: tuple[CancelKind, ...] = ("once", "twice", "anyio", "timeout")

_TWICE_GAP = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRun:
    """One replay. ``fired``: the cancellation was sent, at await number ``at`` (from 1) of ``awaits``.

    ``outcome``: "returned" (``value``), "cancelled", "timeout" (TimeoutError of the ``asyncio.timeout`` around it),
    "raised" (``error``), or "hung": not over ``limit`` seconds after its start, and cancelled by force. ``cancelling``
    is ``task.cancelling()`` at the end less the cancellations that were sent: 0 where the books balance.
    """

    kind: CancelKind
    at: int
    fired: bool
    awaits: int
    outcome: Literal["returned", "cancelled", "timeout", "raised", "hung"]
    value: Any = None
    error: BaseException | None = None
    cancelling: int = 0
    seconds: float = 0.0


async def cancel_at_every_await(
    make: Callable[[], Coroutine[Any, Any, Any]],
    *,
    kinds: Sequence[CancelKind] = CANCEL_KINDS,
    at: Iterable[int] | None = None,
    subtasks: bool = True,
    limit: float = 60.0,
) -> AsyncIterator[CancelRun]:
    """Run ``make()`` over and over, and cancel it at its first await, its second, and so on.

    An await counts when it really suspends. With ``subtasks`` those of all tasks that the coroutine starts count too
    (the cancellation always goes to the coroutine itself, as its caller's would). ``kinds``: a task that is cancelled
    "once", "twice" (2 ms apart), inside an "anyio" scope that is cancelled, inside an ``asyncio.timeout`` ("timeout").
    ``at``: only these awaits. Ends, for each kind, with the first run that was over before its await came.

    Yields a `CancelRun` after each; check what you promise in the loop's body, which runs uncancelled::

        async for run in cancel_at_every_await(lambda: update(broadcaster)):
            assert run.outcome != "hung"
            assert not (await lock.status())["held"]
    """
    for kind in kinds:
        for point in itertools.count(1) if at is None else at:
            run = await _replay(make(), kind, point, subtasks=subtasks, limit=limit)
            yield run
            if not run.fired:
                break


async def _replay(
    coro: Coroutine[Any, Any, Any], kind: CancelKind, point: int, *, subtasks: bool, limit: float
) -> CancelRun:
    started = time.monotonic()
    attack = _Attack(kind)
    counter = _Counter(point, attack.strike)
    with counter.watching(subtasks):
        task = asyncio.get_running_loop().create_task(attack.around(counter.counted(coro)))
        attack.task = task
        await asyncio.wait({task}, timeout=limit)
    hung = not task.done()
    while not task.done():
        attack.cancel()
        await asyncio.wait({task}, timeout=0.1)
    error = None if task.cancelled() else task.exception()
    return CancelRun(
        kind=kind,
        at=point,
        fired=counter.fired,
        awaits=counter.awaits,
        outcome="hung" if hung else attack.outcome(task),
        value=None if task.cancelled() or error is not None else task.result(),
        error=error,
        cancelling=task.cancelling() - attack.sent,
        seconds=time.monotonic() - started,
    )


class _Counter:
    """Counts suspensions of the coroutines it wraps, and strikes once, at number ``point``."""

    def __init__(self, point: int, strike: Callable[[], None]) -> None:
        self._point = point
        self._strike = strike
        self._mine: contextvars.ContextVar[bool] = contextvars.ContextVar("counted", default=False)
        self.awaits = 0
        self.fired = False

    def suspended(self) -> None:
        self.awaits += 1
        if self.awaits == self._point:
            self.fired = True
            self._strike()

    async def counted(self, coro: Coroutine[Any, Any, Any]) -> Any:
        self._mine.set(True)  # tasks inherit it
        return await _Stepped(coro, self)

    def watching(self, subtasks: bool) -> _Factory:
        return _Factory(self, self._mine if subtasks else None)


class _Factory:
    """While entered, the loop's tasks that descend from a counted coroutine are counted."""

    def __init__(self, counter: _Counter, mine: contextvars.ContextVar[bool] | None) -> None:
        self._counter = counter
        self._mine = mine
        self._before: Any = None

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        self._before = loop.get_task_factory()
        if self._mine is not None:
            loop.set_task_factory(self._make)

    def __exit__(self, *_: object) -> None:
        if self._mine is not None:
            asyncio.get_running_loop().set_task_factory(self._before)

    def _make(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        assert self._mine is not None
        if self._mine.get() and asyncio.iscoroutine(coro):
            coro = _Stepped(coro, self._counter)
        if self._before is not None:
            return self._before(loop, coro, **options)
        return asyncio.Task(coro, loop=loop, **options)


class _Stepped(Coroutine[Any, Any, Any]):
    """A coroutine that tells the counter of each suspension. Hands everything through in both directions.

    A task can run it as it is: one that is cancelled before its first step so still reaches the coroutine itself.
    """

    def __init__(self, coro: Coroutine[Any, Any, Any], counter: _Counter) -> None:
        self._coro = coro
        self._counter = counter

    def __await__(self) -> _Stepped:
        return self

    def __iter__(self) -> _Stepped:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        waits_for = self._coro.send(value)
        self._counter.suspended()
        return waits_for

    def throw(self, *error: Any) -> Any:
        waits_for = self._coro.throw(*error)
        self._counter.suspended()
        return waits_for

    def close(self) -> None:
        self._coro.close()


class _Attack:
    """One kind of cancellation, and how its outcome looks."""

    def __init__(self, kind: CancelKind) -> None:
        self._kind = kind
        self.task: asyncio.Task[Any] | None = None
        self.sent = 0
        self._scope: anyio.CancelScope | None = None
        self._timeout: asyncio.Timeout | None = None

    async def around(self, coro: Awaitable[Any]) -> Any:
        if self._kind == "anyio":
            with anyio.CancelScope() as self._scope:
                return await coro
            return _CANCELLED
        if self._kind == "timeout":
            async with asyncio.timeout(None) as self._timeout:
                return await coro
        return await coro

    def strike(self) -> None:
        """Called while the coroutine suspends. The loop runs callbacks in order: ours precede what would resume it."""
        loop = asyncio.get_running_loop()
        if self._kind == "anyio":
            assert self._scope is not None
            loop.call_soon(self._scope.cancel)
        elif self._kind == "timeout":
            assert self._timeout is not None
            self._timeout.reschedule(loop.time())  # which itself goes through a callback
        else:
            loop.call_soon(self.cancel)
            if self._kind == "twice":
                loop.call_later(_TWICE_GAP, self.cancel)

    def cancel(self) -> None:
        # A task that is already over takes no cancellation, so that it doesn't count either.
        if self.task is not None and self.task.cancel():
            self.sent += 1

    def outcome(self, task: asyncio.Task[Any]) -> Literal["returned", "cancelled", "timeout", "raised"]:
        if task.cancelled() or (task.exception() is None and task.result() is _CANCELLED):
            return "cancelled"
        if task.exception() is None:
            return "returned"
        ours = self._timeout is not None and self._timeout.expired() and isinstance(task.exception(), TimeoutError)
        return "timeout" if ours else "raised"


_CANCELLED = object()
