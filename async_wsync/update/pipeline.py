"""The buckets of one update on their way: staged, announced, sent, acknowledged.

At most ``num_buffers`` buckets exist at once. Of those, one is on the wire and the next is staged, or, if every engine
keeps the order of its calls, already announced behind it. For each, the engines' answers, the collective and the
limit are raced; the first failure ends the transfer, and whoever started it then breaks up the groups and settles
what is still under way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from async_wsync.errors import PhaseTimeout
from async_wsync.groups.manager import EngineGroup
from async_wsync.report import BucketTiming
from async_wsync.runtime.engine_calls import EngineCalls, Sent, asked, late, watched
from async_wsync.sources.reader import StagedBucket
from async_wsync.types import BucketSpec, UpdateSpec
from async_wsync.update.context import UpdateContext

__all__ = ["BucketAcknowledged", "BucketEvent", "BucketPipeline", "BucketStaged", "BucketSubmitted", "EngineDropped"]


@dataclass(frozen=True, slots=True)
class BucketStaged:
    """The bucket is sent as soon as the next event is asked for."""

    bucket: BucketSpec


@dataclass(frozen=True, slots=True)
class BucketSubmitted:
    """The bucket was announced to every engine and its collectives have begun, both just now."""

    bucket: BucketSpec


@dataclass(frozen=True, slots=True)
class BucketAcknowledged:
    """Every engine that still takes part has the bucket."""

    bucket: BucketSpec
    engines: tuple[str, ...]
    timing: BucketTiming


@dataclass(frozen=True, slots=True)
class EngineDropped:
    """The engine failed. It has a group of its own, so that the transfer goes on without it."""

    engine: str
    failure: BaseException


BucketEvent = BucketStaged | BucketSubmitted | BucketAcknowledged | EngineDropped


@dataclass(eq=False, slots=True)
class BucketInFlight:
    """One bucket under way: the engines' calls and the collectives it waits for."""

    staged: StagedBucket
    staged_at: float
    submitted_at: float
    calls: list[Sent] = field(default_factory=list)
    collectives: list[tuple[EngineGroup, asyncio.Future[None]]] = field(default_factory=list)

    def forget(self, engine: str) -> None:
        """Nothing of this engine is waited for any more."""
        self.calls = [s for s in self.calls if s.engine != engine]
        self.collectives = [(group, c) for group, c in self.collectives if engine not in group.names]

    def waits(self) -> set[asyncio.Future[Any]]:
        return {f for f in (*(s.task for s in self.calls), *(c for _, c in self.collectives)) if not f.done()}


class BucketPipeline:
    """Sends staged buckets to the engines of ``groups`` until there are none left.

    ``groups``: what an engine in a group is told about the update, by group. ``one_at_a_time``: a bucket is sent once
    all have the one before it. ``may_drop``: the transfer may go on without engines, if the settings allow it.
    """

    def __init__(
        self,
        context: UpdateContext,
        calls: EngineCalls,
        groups: Mapping[EngineGroup, UpdateSpec],
        *,
        one_at_a_time: bool,
        may_drop: bool,
    ) -> None:
        settings = context.settings
        self._context = context
        self._calls = calls
        self._groups = groups
        self._one_at_a_time = one_at_a_time
        self._may_drop = may_drop and settings.topology == "per_engine" and settings.on_engine_failure == "drop"
        self._limit = settings.timeouts.bucket
        self._in_flight: deque[BucketInFlight] = deque()
        self._head_since = 0.0

    @property
    def idle(self) -> bool:
        """Every bucket that was sent is acknowledged."""
        return not self._in_flight

    async def run(self, staged: AsyncIterator[StagedBucket]) -> AsyncGenerator[BucketEvent, None]:
        """Send everything; ends once every engine has acknowledged the last bucket.

        A bucket's `BucketSubmitted` comes before anything else can run on the loop. A cancelled update that is to stop
        does so here, after what was announced is sent: so the engines agree on where it ended.
        """
        loop = asyncio.get_running_loop()
        while True:
            pull = watched(_pull(staged))
            try:
                async for event in self._watch(pull):
                    yield event
                bucket = pull.result()
            finally:
                pull.cancel()
            stop = None if bucket is None else self._context.cancellation.stop
            if bucket is None or stop is not None:
                break
            staged_at = loop.time()
            yield BucketStaged(bucket.bucket)
            self._submit(bucket, staged_at)
            yield BucketSubmitted(bucket.bucket)
            if self._one_at_a_time:
                async for event in self._watch():
                    yield event
        async for event in self._watch():
            yield event
        if stop is not None:
            raise stop

    def _submit(self, staged: StagedBucket, staged_at: float) -> None:
        """Announce the bucket to every engine, then start the collectives: submitted before the next await."""
        now = asyncio.get_running_loop().time()
        if not self._in_flight:
            self._head_since = now
        sent = BucketInFlight(staged, staged_at, now)
        self._in_flight.append(sent)
        # Announced behind others, it may wait for those as long as our own limit lets each of them take.
        call = self._context.call(self._limit * self._context.settings.num_buffers)
        bucket = staged.bucket
        for group, update in self._groups.items():
            if all(map(self._is_dropped, group.names)):
                continue
            hints = [getattr(engine, "hint_collective_done", None) for engine in group.engines]
            for engine in group.engines:
                receive = asked(engine.receive, call, update, bucket)
                sent.calls.append(self._calls.start(engine, "receive", receive, bucket=bucket.index))
            collective = group.source_end.broadcast(staged.wire[group.wire], settled=True)
            for hint in hints:
                if hint is not None:
                    collective.add_done_callback(_calling(hint))
            sent.collectives.append((group, collective))

    async def _watch(self, pull: asyncio.Task[StagedBucket | None] | None = None) -> AsyncIterator[BucketEvent]:
        """What becomes of the buckets in flight, until ``pull`` is done; without one, until none is in flight."""
        loop = asyncio.get_running_loop()
        idle_since = loop.time()
        while self._in_flight if pull is None else not pull.done():
            if self._in_flight:
                await self._wait(pull)
                for event in self._outcomes():
                    yield event
                idle_since = loop.time()
            else:
                assert pull is not None
                await self._wait_for_source(pull, idle_since + self._context.settings.timeouts.idle)

    async def _wait_for_source(self, pull: asyncio.Task[StagedBucket | None], until: float) -> None:
        left = until - asyncio.get_running_loop().time()
        waits: set[asyncio.Future[Any]] = {pull, self._calls.interrupt.future}
        done, _ = await asyncio.wait(waits, timeout=max(left, 0.0), return_when=asyncio.FIRST_COMPLETED)
        self._raise_if_interrupted()
        if not done:
            limit = self._context.settings.timeouts.idle
            raise PhaseTimeout(
                f"the source yielded nothing for {limit:g} s (Timeouts.idle): it may wait in a collective "
                "for a trainer rank that does not take part",
                phase="source",
                field="idle",
                seconds=limit,
            )

    async def _wait(self, pull: asyncio.Task[StagedBucket | None] | None) -> None:
        """Until something happens to the buckets in flight, or to ``pull``, or the oldest bucket is late."""
        waits: set[asyncio.Future[Any]] = {self._calls.interrupt.future}
        if pull is not None:
            waits.add(pull)
        for sent in self._in_flight:
            waits |= sent.waits()
        left = self._head_since + self._limit - asyncio.get_running_loop().time()
        await asyncio.wait(waits, timeout=max(left, 0.0), return_when=asyncio.FIRST_COMPLETED)
        self._raise_if_interrupted()

    def _outcomes(self) -> Iterator[BucketEvent]:
        yield from self._failures()
        yield from self._acknowledged()
        if self._in_flight and asyncio.get_running_loop().time() - self._head_since >= self._limit:
            yield from self._late(self._in_flight[0])
            yield from self._acknowledged()

    def _raise_if_interrupted(self) -> None:
        if self._calls.interrupt.reason is not None:
            raise self._calls.interrupt.reason

    def _failures(self) -> Iterator[EngineDropped]:
        """Raise the first failure of the oldest bucket, unless its engine is in a group of its own and may go."""
        for sent in self._in_flight:
            # Engines before collectives: an engine knows its own error, a collective only that something broke.
            for call in list(sent.calls):
                if (failure := call.failure) is not None:
                    yield from self._drop(call.engine, failure)
            for group, collective in list(sent.collectives):
                error = collective.exception() if collective.done() else None
                if error is not None:
                    for engine in group.engines:
                        yield from self._drop(engine.name, error)

    def _late(self, sent: BucketInFlight) -> Iterator[EngineDropped]:
        """Raise for what is waited for, or drop it. Whoever answered without its broadcast is waited for too."""
        error = late(sent.calls, field="bucket", limit=self._limit)
        waiting = [s.engine for s in sent.calls if not s.task.done()]
        waiting += [e.name for group, c in sent.collectives if not c.done() for e in group.engines]
        for name in dict.fromkeys(waiting):
            yield from self._drop(name, error)

    def _drop(self, name: str, failure: BaseException) -> Iterator[EngineDropped]:
        """Go on without this engine. Raises its failure, unless its group is its own and enough others remain."""
        left = {e for group in self._groups for e in group.names if not self._is_dropped(e)}
        if not self._may_drop or len(left) - 1 < self._context.settings.min_engines:
            raise failure
        roster = self._context.fleet.roster
        record = roster[name]
        record.error, record.phase = str(failure), "receive"
        record.lose()
        roster.drop([name])
        for group in self._groups:
            if name in group.names:
                group.abort()
        for sent in self._in_flight:
            sent.forget(name)
        yield EngineDropped(name, failure)

    def _is_dropped(self, name: str) -> bool:
        return self._context.fleet.roster[name].left_out is not None

    def _acknowledged(self) -> Iterator[BucketAcknowledged]:
        """Give back the buckets that every remaining engine has, oldest first."""
        now = asyncio.get_running_loop().time()
        while self._in_flight and not self._in_flight[0].waits():
            sent = self._in_flight.popleft()
            self._head_since = now
            bucket = sent.staged.bucket
            timing = BucketTiming(
                index=bucket.index,
                nbytes=bucket.nbytes,
                staged_at=sent.staged_at,
                submitted_at=sent.submitted_at,
                done_at=now,
            )
            self._calls.forget(sent.calls)
            sent.staged.release()
            yield BucketAcknowledged(bucket, tuple(s.engine for s in sent.calls), timing)


def _calling(hint: Callable[[], None]) -> Callable[[object], None]:
    return lambda _: hint()


async def _pull(staged: AsyncIterator[StagedBucket]) -> StagedBucket | None:
    return await anext(staged, None)
