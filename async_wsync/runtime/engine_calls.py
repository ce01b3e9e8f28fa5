"""Every engine call of one update: started as its own task, raced, and settled before the lock goes.

A call that was sent can't be taken back, so its task is never cancelled while the engine may still be
working on it. It ends by an answer, or its engine is quarantined.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from async_wsync.errors import EngineFailed, EngineTimeout, WeightSyncError
from async_wsync.protocols import RolloutEngine
from async_wsync.runtime.cancellation import settle
from async_wsync.runtime.foreign_code import as_raised, contained

__all__ = ["EngineCalls", "Interrupt", "Sent", "asked", "told", "watched"]


T = TypeVar("T")


class Interrupt:
    """The one way to stop an update from outside: a reason that every wait of it races against."""

    def __init__(self) -> None:
        self.reason: Exception | None = None
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fire(self, reason: Exception) -> None:
        if self.reason is None:
            self.reason = reason
            self._future.set_result(None)

    @property
    def future(self) -> asyncio.Future[None]:
        return self._future

    @asynccontextmanager
    async def breaks_off(self) -> AsyncIterator[None]:
        """For waits that do not race against the interrupt themselves: once it fires, they end with its reason.

        What is awaited inside is cancelled for it, so that it must be something that may be given up.
        """
        if self.reason is not None:
            raise self.reason
        loop = asyncio.get_running_loop()
        inside = True
        try:
            async with asyncio.timeout_at(None) as limit:

                def end(_: object) -> None:
                    if inside:
                        limit.reschedule(loop.time())

                self._future.add_done_callback(end)
                try:
                    yield
                finally:
                    inside = False
                    self._future.remove_done_callback(end)
        except TimeoutError as error:
            if not limit.expired() or isinstance(error, WeightSyncError):
                raise
            assert self.reason is not None
            raise self.reason from None


@dataclass(slots=True, eq=False)
class Sent:
    """One call: to whom, in which phase, and the task that waits for its answer. ``given_up``: by us, unanswered."""

    engine: str
    phase: str
    bucket: int | None
    task: asyncio.Task[Any]
    given_up: bool = False

    @property
    def failure(self) -> BaseException | None:
        if not self.task.done() or self.given_up:
            return None
        if self.task.cancelled():
            # Not by us: an adapter let a cancellation out. It is no answer, least of all a good one.
            return EngineFailed(
                f"{self.engine}: {self.phase}: its adapter was cancelled from within",
                engine=self.engine,
                phase=self.phase,
                bucket=self.bucket,
            )
        return self.task.exception()

    def give_up(self) -> None:
        if not self.task.done():
            self.given_up = True
            self.task.cancel()


class _OneEachTurn:
    """Lets those who wait go on one by one, in turns of the event loop of their own."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._held = False

    async def wait(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._held:
            self._held = True
            loop.call_soon(self._next, loop)
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                loop.call_soon(self._next, loop)
                return
        self._held = False


class EngineCalls:
    """The calls of one update, oldest first.

    One call begins in each turn of the event loop: to submit one gives up the GIL several times, which takes 5 ms each
    time while other threads pack buckets, and 16 engines in one turn would stop everything else on the loop.
    """

    def __init__(self, interrupt: Interrupt) -> None:
        self.interrupt = interrupt
        self._turns = _OneEachTurn()
        self._sent: list[Sent] = []

    def start(
        self, engine: RolloutEngine, phase: str, call: Coroutine[Any, Any, Any], *, bucket: int | None = None
    ) -> Sent:
        translated = told(engine.name, phase, self._in_turn(call), bucket=bucket)
        task = watched(translated, name=f"wsync {phase} {engine.name}")
        sent = Sent(engine.name, phase, bucket, task)
        self._sent.append(sent)
        return sent

    async def _in_turn(self, call: Coroutine[Any, Any, T]) -> T:
        try:
            await self._turns.wait()
            return await call
        finally:
            call.close()  # or one that was given up before its turn is reported as never awaited

    async def everyone(
        self,
        phase: str,
        engines: Iterable[RolloutEngine],
        make: Callable[[RolloutEngine], Awaitable[Any]],
        *,
        limit: float,
        field: str,
        also: Iterable[asyncio.Future[Any]] = (),
    ) -> dict[str, Any]:
        """Call all engines at once; their answers by name, or the first failure as soon as it is there.

        ``also``: further futures that must succeed for the phase to be over (a collective, say).
        """
        sent = [self.start(engine, phase, asked(make, engine)) for engine in engines]
        await self.first_failure(sent, also=also, limit=limit, field=field)
        answers = {s.engine: s.task.result() for s in sent}
        self.forget(sent)
        return answers

    async def first_failure(
        self, sent: list[Sent], *, also: Iterable[asyncio.Future[Any]] = (), limit: float, field: str
    ) -> None:
        """Return once all have succeeded; raise the first failure, the interruption, or `EngineTimeout`."""
        waited: set[asyncio.Future[Any]] = {s.task for s in sent} | set(also)
        calls: dict[asyncio.Future[Any], Sent] = {s.task: s for s in sent}
        deadline = asyncio.get_running_loop().time() + limit
        while waited:
            left = deadline - asyncio.get_running_loop().time()
            done, _ = await asyncio.wait(
                waited | {self.interrupt.future}, timeout=max(left, 0.0), return_when=asyncio.FIRST_COMPLETED
            )
            if self.interrupt.reason is not None:
                raise self.interrupt.reason
            for future in done:
                failure = calls[future].failure if future in calls else future.exception()
                if failure is not None:
                    raise failure
            waited -= done
            if not done:
                raise late(sent, field=field, limit=limit)

    async def race(self, work: Coroutine[Any, Any, T]) -> T:
        """The outcome of something other than an engine call, or the interruption, which cancels it."""
        task = watched(work)
        waits: set[asyncio.Future[Any]] = {task, self.interrupt.future}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()  # only where it is not done
        if not task.done():
            assert self.interrupt.reason is not None
            raise self.interrupt.reason
        return task.result()

    def pending(self) -> list[Sent]:
        return [s for s in self._sent if not s.task.done()]

    def failures(self) -> list[Sent]:
        return [s for s in self._sent if s.failure is not None]

    def succeeded(self, phase: str) -> list[Sent]:
        done = [s for s in self._sent if s.phase == phase and s.task.done() and not s.task.cancelled()]
        return [s for s in done if s.task.exception() is None]

    def forget(self, sent: Iterable[Sent]) -> None:
        gone = set(sent)
        self._sent = [s for s in self._sent if s not in gone]

    async def settle(self, *, limit: float) -> dict[str, Sent]:
        """Wait until every call has an outcome; the calls that have none after ``limit`` seconds, by engine.

        Those are given up: their tasks end, and their engines must be quarantined.
        """
        await settle([s.task for s in self._sent], timeout=limit)
        silent = {s.engine: s for s in self.pending()}
        for sent in self.pending():
            sent.give_up()
        await settle([s.task for s in self._sent], timeout=1.0)
        return silent


def late(sent: list[Sent], *, field: str, limit: float) -> EngineTimeout:
    """The error of a phase that ran over its limit, naming all who had not answered."""
    waiting = [s for s in sent if not s.task.done()]
    first = waiting[0] if waiting else sent[0]
    where = first.phase if first.bucket is None else f"{first.phase} {first.bucket}"
    names = ", ".join(s.engine for s in waiting) or "the collective"
    return EngineTimeout(
        f"{where}: no answer from {names} within {limit:g} s (Timeouts.{field}). The engine may be stopped, "
        f"overloaded, or cut off; raise Timeouts.{field} if it only needs longer.",
        engine=first.engine if waiting else "",
        phase=first.phase,
        bucket=first.bucket,
        field=field,
        seconds=limit,
        waiting_for=tuple(s.engine for s in waiting),
    )


async def told(engine: str, phase: str, call: Awaitable[T], *, bucket: int | None = None) -> T:
    """The answer to ``call``. Adapters promise to raise `EngineFailed` and nothing else; hold them to it."""
    try:
        with contained(awaits=True):
            return await call
    except EngineFailed:
        raise
    except Exception as caught:
        error = as_raised(caught)
        raise EngineFailed(f"{engine}: {phase}: {_text(error)}", engine=engine, phase=phase, bucket=bucket) from error


async def asked(method: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
    """An adapter's method, called where it is awaited: it may raise at once, or return nothing to be awaited."""
    return await method(*args, **options)


def _text(error: BaseException) -> str:
    if isinstance(error, WeightSyncError):
        return str(error)
    if isinstance(error, asyncio.CancelledError):
        return "its adapter was cancelled from within"
    return f"{type(error).__name__}: {error}"


def watched(work: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
    """A task whose failure somebody reads later, or nobody does."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(_mark_retrieved)
    return task


def _mark_retrieved(task: asyncio.Task[Any]) -> None:
    # Failures are read from the records, maybe never: asyncio must not report them as unretrieved.
    if not task.cancelled():
        task.exception()
