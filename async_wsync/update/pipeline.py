"""The buckets of one update on their way: staged, announced, sent, acknowledged.

At most ``num_buffers`` buckets exist at once. Of those, one is on the wire and the next is staged, or,
where every engine keeps the order of its calls, already announced behind it. For each, the engines'
answers, the collective and the limit are raced; the first failure ends the transfer, and whoever started
it then breaks up the groups and settles what is still under way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from async_wsync.errors import PhaseTimeout
from async_wsync.groups.manager import Link
from async_wsync.protocols import RolloutEngine
from async_wsync.report import BucketTiming
from async_wsync.runtime.engine_calls import EngineCalls, Sent, late, watched
from async_wsync.sources.reader import StagedBucket
from async_wsync.types import BucketSpec

__all__ = ["BucketInFlight", "BucketPipeline"]


@dataclass(eq=False, slots=True)
class BucketInFlight:
    """One bucket under way: the engines' calls and the collectives it waits for."""

    staged: StagedBucket
    staged_at: float
    submitted_at: float
    calls: list[Sent] = field(default_factory=list)
    collectives: list[tuple[Link, asyncio.Future[None]]] = field(default_factory=list)

    def forget(self, engine: str) -> None:
        """Nothing of this engine is waited for any more."""
        self.calls = [s for s in self.calls if s.engine != engine]
        self.collectives = [(link, c) for link, c in self.collectives if engine not in link.names]

    def waits(self) -> set[asyncio.Future[Any]]:
        return {f for f in (*(s.task for s in self.calls), *(c for _, c in self.collectives)) if not f.done()}


@dataclass(kw_only=True)
class BucketPipeline:
    """Sends staged buckets over ``links`` until there are none left.

    ``receive(engine, bucket, link)`` makes the call that announces a bucket to an engine; ``turn()`` is entered
    around each bucket (the lock, where it is held for each bucket); ``acknowledged(bucket)`` is told once every
    engine has one. ``isolate`` is asked about an engine's failure: True drops it and lets the transfer go on without
    it. ``is_dropped`` tells who was.
    """

    links: Sequence[Link]
    calls: EngineCalls
    receive: Callable[[RolloutEngine, BucketSpec, Link], Coroutine[Any, Any, None]]
    turn: Callable[[], AbstractAsyncContextManager[Any]]
    submitted: Callable[[BucketSpec], None]
    acknowledged: Callable[[BucketSpec, Sequence[str]], None]
    isolate: Callable[[str, BaseException], bool]
    is_dropped: Callable[[str], bool]
    bucket_limit: float
    idle_limit: float
    one_at_a_time: bool
    should_stop: Callable[[], Exception | None]
    timings: list[BucketTiming] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._flights: deque[BucketInFlight] = deque()
        self._head_since = 0.0

    async def run(self, staged: AsyncIterator[StagedBucket]) -> None:
        """Send everything; returns once every engine has acknowledged the last bucket."""
        while (bucket := await self._next(staged)) is not None:
            stop = self.should_stop()
            if stop is not None:
                while self._flights:  # what was announced is sent: so the engines agree on where it ended
                    await self._step()
                raise stop
            await self._send(bucket)
        while self._flights:
            await self._step()

    async def _send(self, staged: StagedBucket) -> None:
        staged_at = asyncio.get_running_loop().time()
        if not self.one_at_a_time:
            self._launch(staged, staged_at)
            return
        async with self.turn():
            self._launch(staged, staged_at)
            while self._flights:
                await self._step()

    def _launch(self, staged: StagedBucket, staged_at: float) -> None:
        """Announce the bucket to every engine, then start the collectives: submitted before the next await."""
        now = asyncio.get_running_loop().time()
        if not self._flights:
            self._head_since = now
        flight = BucketInFlight(staged, staged_at, now)
        self._flights.append(flight)
        for link in self._live_links():
            hints = [getattr(engine, "hint_collective_done", None) for engine in link.engines]
            for engine in link.engines:
                call = self.receive(engine, staged.bucket, link)
                flight.calls.append(self.calls.start(engine, "receive", call, bucket=staged.bucket.index))
            collective = link.group.broadcast(staged.wire[link.wire], settled=True)
            for hint in hints:
                if hint is not None:
                    collective.add_done_callback(_calling(hint))
            flight.collectives.append((link, collective))
        self.submitted(staged.bucket)

    def _live_links(self) -> list[Link]:
        return [link for link in self.links if not all(self.is_dropped(name) for name in link.names)]

    async def _next(self, staged: AsyncIterator[StagedBucket]) -> StagedBucket | None:
        """Wait for the next staged bucket while watching those under way."""
        loop = asyncio.get_running_loop()
        pull = watched(_pull(staged))
        idle_since = loop.time()
        try:
            while not pull.done():
                if self._flights:
                    await self._step({pull})
                    idle_since = loop.time()
                else:
                    await self._wait_for_source(pull, idle_since + self.idle_limit)
            return pull.result()
        finally:
            pull.cancel()

    async def _wait_for_source(self, pull: asyncio.Task[StagedBucket | None], until: float) -> None:
        left = until - asyncio.get_running_loop().time()
        waits: set[asyncio.Future[Any]] = {pull, self.calls.interrupt.future}
        done, _ = await asyncio.wait(waits, timeout=max(left, 0.0), return_when=asyncio.FIRST_COMPLETED)
        self._raise_if_interrupted()
        if not done:
            raise PhaseTimeout(
                f"the source yielded nothing for {self.idle_limit:g} s (Timeouts.idle): it may wait in a collective "
                "for a trainer rank that does not take part",
                phase="source",
                field="idle",
                seconds=self.idle_limit,
            )

    async def _step(self, also: Iterable[asyncio.Future[Any]] = ()) -> None:
        """Wait until something happens to the flights (or to ``also``), and deal with it."""
        waits: set[asyncio.Future[Any]] = {self.calls.interrupt.future, *also}
        for flight in self._flights:
            waits |= flight.waits()
        now = asyncio.get_running_loop().time()
        left = self._head_since + self.bucket_limit - now
        await asyncio.wait(waits, timeout=max(left, 0.0), return_when=asyncio.FIRST_COMPLETED)
        self._raise_if_interrupted()
        self._raise_failures()
        self._land()
        if self._flights and asyncio.get_running_loop().time() - self._head_since >= self.bucket_limit:
            self._raise_late(self._flights[0])
            self._land()

    def _raise_if_interrupted(self) -> None:
        if self.calls.interrupt.reason is not None:
            raise self.calls.interrupt.reason

    def _raise_failures(self) -> None:
        """Raise the first failure of the oldest bucket, unless its engine is in a group of its own and may go."""
        for flight in self._flights:
            # Engines before collectives: an engine knows its own error, a collective only that something broke.
            for sent in list(flight.calls):
                failure = sent.failure
                if failure is not None and not self._drop(sent.engine, failure):
                    raise failure
            for link, collective in list(flight.collectives):
                error = collective.exception() if collective.done() else None
                if error is not None and not all(self._drop(e.name, error) for e in link.engines):
                    raise error

    def _drop(self, engine: str, failure: BaseException) -> bool:
        if not self.isolate(engine, failure):
            return False
        for link in self.links:
            if engine in link.names:
                link.abort()
        for flight in self._flights:
            flight.forget(engine)
        return True

    def _raise_late(self, flight: BucketInFlight) -> None:
        """Raise for what is waited for, or drop it. Whoever answered without its broadcast is waited for too."""
        error = late(flight.calls, field="bucket", limit=self.bucket_limit)
        waiting = [s.engine for s in flight.calls if not s.task.done()]
        waiting += [e.name for link, c in flight.collectives if not c.done() for e in link.engines]
        if not all(self._drop(name, error) for name in dict.fromkeys(waiting)):
            raise error

    def _land(self) -> None:
        """Give back the buckets that every remaining engine has, oldest first."""
        now = asyncio.get_running_loop().time()
        while self._flights and self._landed(self._flights[0]):
            flight = self._flights.popleft()
            self._head_since = now
            bucket = flight.staged.bucket
            self.timings.append(
                BucketTiming(
                    index=bucket.index,
                    nbytes=bucket.nbytes,
                    staged_at=flight.staged_at,
                    submitted_at=flight.submitted_at,
                    done_at=now,
                )
            )
            self.calls.forget(flight.calls)
            flight.staged.release()
            self.acknowledged(bucket, [s.engine for s in flight.calls])

    def _landed(self, flight: BucketInFlight) -> bool:
        return not flight.waits()


def _calling(hint: Callable[[], None]) -> Callable[[object], None]:
    return lambda _: hint()


async def _pull(staged: AsyncIterator[StagedBucket]) -> StagedBucket | None:
    return await anext(staged, None)
