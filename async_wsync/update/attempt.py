"""One try at one update over a fixed set of engines: the bracket, and the buckets within it.

    check -> pause -> reset -> flush -> begin -> buckets -> end -> verify -> publish -> resume

Every step is taken by all engines before the next one starts. Where it fails, `recovery` is the way out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from async_wsync.errors import BaseMissing, EngineFailed
from async_wsync.groups.manager import EngineGroup
from async_wsync.protocols import RolloutEngine
from async_wsync.runtime.engine_calls import EngineCalls
from async_wsync.runtime.threads import spawn, wait_for
from async_wsync.sources.reader import BucketStream
from async_wsync.types import Base, Call, EngineState, UpdateSpec
from async_wsync.update.context import UpdateContext, Verify
from async_wsync.update.pipeline import BucketAcknowledged, BucketPipeline, BucketStaged, BucketSubmitted, EngineDropped
from async_wsync.update.retries import GRACE, flush, not_resumed, resume
from async_wsync.update.roster import EngineRecord
from async_wsync.update.verification import HasOwnChecks, check_own, compare_checksums

__all__ = ["Attempt"]

T = TypeVar("T")


class Attempt:
    """One try. All state about its engines, also which of them still take part, is in the fleet's roster.

    ``bases``: what a partial update builds on, by engine that holds it. ``engines_agreed``: several sources send to
    these engines, so that none may be left out. ``bucket_turn``: entered around each bucket, if the lock is held for
    each bucket.
    """

    def __init__(
        self,
        context: UpdateContext,
        update: UpdateSpec,
        *,
        backend: str,
        bases: Mapping[str, Base],
        engines_agreed: bool = False,
        bucket_turn: Callable[[], AbstractAsyncContextManager[Any]] | None = None,
    ) -> None:
        self.context = context
        self.update = update
        self.settings = context.settings
        self.history = context.history
        self.roster = context.fleet.roster
        self.calls = EngineCalls(context.cancellation.interrupt)
        self.begun = False
        self.ended = False
        self.resumed = False
        self.lease_lost = False
        self._backend = backend
        self._bases = bases
        self._engines_agreed = engines_agreed
        self._bucket_turn = bucket_turn
        self._groups: dict[EngineGroup, UpdateSpec] = {}
        self._staged: BucketStream | None = None

    # ------------------------------------------------------------------ small helpers

    @property
    def engines(self) -> list[RolloutEngine]:
        return self.context.fleet.taking_part(self.context.request.targets)

    @property
    def groups(self) -> list[EngineGroup]:
        """Those in use: of an engine that takes part."""
        return [g for g in self._groups if any(self.roster[name].left_out is None for name in g.names)]

    def record(self, engine: RolloutEngine) -> EngineRecord:
        return self.roster[engine.name]

    async def _everyone(
        self,
        phase: str,
        verb: Callable[[RolloutEngine, Call], Coroutine[Any, Any, T]],
        *,
        field: str,
        engines: Sequence[RolloutEngine] | None = None,
        grace: float = 0.0,
    ) -> dict[str, T]:
        limit: float = getattr(self.settings.timeouts, field) + grace
        call = self.context.call(limit)
        asked = self.engines if engines is None else engines
        return await self.calls.everyone(phase, asked, lambda e: verb(e, call), limit=limit, field=field)

    # ------------------------------------------------------------------------- steps

    async def check(self, whole: UpdateSpec | None = None) -> None:
        """Agree on the manifest with every engine, before anything is paused, let alone sent.

        ``whole``: what all sources of a round send together. An engine that lacks what a partial update builds on is
        left as it is.
        """
        update = whole or self.update
        with self.history.during("check"):
            answers = await self._everyone("check", lambda e, c: self._fits(e, c, update), field="begin")
            if behind := {name: said for name, said in answers.items() if isinstance(said, BaseMissing)}:
                self._leave_behind(behind)
        for name, notes in answers.items():
            if not isinstance(notes, BaseMissing):
                known = self.roster[name].notes
                known.extend(note for note in notes if note not in known)

    async def _fits(self, engine: RolloutEngine, call: Call, update: UpdateSpec) -> tuple[str, ...] | BaseMissing:
        offered = update if update.strict else replace(update, base=self._bases.get(engine.name))
        try:
            return await engine.check(call, offered)
        except BaseMissing as lacking:
            return lacking

    def _leave_behind(self, behind: Mapping[str, BaseMissing]) -> None:
        for name, lacking in behind.items():
            self.roster[name].doubt(torn=lacking.torn, holds=lacking.holds)
        left = [e for e in self.engines if e.name not in behind]
        if self._engines_agreed or len(left) < self.settings.min_engines:
            first, *others = behind.values()
            for other in others:
                first.add_note(str(other))
            raise first
        for name, lacking in behind.items():
            self.roster[name].left_out = "behind"
            self.roster[name].notes.append(f"left out of a partial update: {lacking}")
        self.history.leave_behind(behind)

    async def connect(self) -> None:
        if not self.update.buckets:
            return
        with self.history.during("connect"):
            groups = await self.context.groups.ensure(
                self.engines,
                backend=self._backend,
                incarnation=lambda name: self.roster[name].incarnation,
                calls=self.calls,
                call=self.context.call(self.settings.timeouts.connect),
                keep_others=self.context.request.keep_others,
                source_device=self.context.reader.device,
            )
            # One object a group, so that an adapter packs a long manifest once for all of its engines.
            self._groups = {group: replace(self.update, group=group.source_end.spec.name) for group in groups}
        self.history.event("connected")
        # Staged from now on: while the engines pause and begin, the first buckets are read and packed.
        formats = {group.wire for group in groups}
        device = groups[0].source_end.device
        self._staged = self.context.reader.buckets(self.update.buckets, formats, device=device)

    async def open(self) -> None:
        """Pause, close what a dead source left open, flush, begin: in step, so that no byte meets a running engine."""
        self.history.started = True
        with self.history.during("pause"):
            for engine in self.engines:
                self.record(engine).begin()
                self.record(engine).paused = True  # from here on it may be, whatever it answers
            await self._everyone("pause", lambda e, c: e.pause(c, self.context.request.pause_mode), field="pause")
        self.history.event("paused")
        unsure = [e for e in self.engines if self.record(e).needs_reset]
        if unsure:
            with self.history.during("reset"):
                await self._everyone("reset", lambda e, c: e.reset(c), field="begin", engines=unsure)
            for engine in unsure:
                self.record(engine).needs_reset = False
        with self.history.during("flush"):
            limit = self.settings.timeouts.flush
            await self._everyone("flush", lambda e, c: flush(e, c, limit=limit), field="flush", grace=GRACE)
        self.history.event("flushed")
        await self.begin()

    async def begin(self) -> None:
        with self.history.during("begin"):
            self.begun = True
            for engine in self.engines:
                self.record(engine).needs_reset = True  # until its end has been acknowledged
            await self._everyone("begin", lambda e, c: e.begin(c, self._spec_for(e)), field="begin")
        self.history.event("begun")

    async def join(self) -> None:
        """Add our part to an update that the leader of our round has opened."""
        self.mark_updating()
        await self.connect()
        await self.begin()

    def mark_updating(self) -> None:
        """Another source has opened the update, and may have sent."""
        self.history.started = True
        for engine in self.engines:
            record = self.record(engine)
            if record.state in (EngineState.LOST, EngineState.UPDATING):
                record.touched = True
                continue
            record.begin()
            record.touched = record.paused = record.needs_reset = True

    def published_by_leader(self) -> None:
        """The leader has ended, published and resumed."""
        self._write_published()
        for engine in self.engines:
            self.record(engine).paused = self.record(engine).needs_reset = False
        self.history.published = True
        self.history.event("published")

    def _spec_for(self, engine: RolloutEngine) -> UpdateSpec:
        return next((spec for group, spec in self._groups.items() if engine.name in group.names), self.update)

    async def send(self) -> None:
        """All buckets to all engines; see `BucketPipeline`."""
        if self._staged is None:
            return
        pipeline = BucketPipeline(
            self.context,
            self.calls,
            self._groups,
            one_at_a_time=self.settings.lock_scope == "bucket" or not all(e.pipelined for e in self.engines),
            may_drop=not self._engines_agreed,
        )
        with self.history.during("receive"):
            async with AsyncExitStack() as turn, aclosing(pipeline.run(self._staged)) as events:
                async for event in events:
                    match event:
                        case BucketStaged():
                            if self._bucket_turn is not None:
                                await turn.enter_async_context(self._bucket_turn())
                        case BucketSubmitted():
                            self._submitted(event)
                        case BucketAcknowledged():
                            self._acknowledged(event)
                            if self._bucket_turn is not None and pipeline.idle:
                                await turn.aclose()
                        case EngineDropped():
                            self.history.event("engine_lost", engine=event.engine, detail=str(event.failure))

    def _submitted(self, event: BucketSubmitted) -> None:
        for engine in self.engines:
            self.record(engine).touched = True
        index = event.bucket.index
        self.history.stage(f"bucket {index + 1}/{len(self.update.buckets)}")
        self.history.event("bucket_submitted", bucket=index)

    def _acknowledged(self, event: BucketAcknowledged) -> None:
        bucket = event.bucket
        for name in event.engines:
            self.roster[name].last_bucket = bucket.index
        self.history.timings.append(event.timing)
        self.context.progress.advance(nbytes=bucket.nbytes, bucket=bucket.index)
        self.history.event("bucket_done", bucket=bucket.index)

    async def close(self, verify: Verify | None) -> None:
        """End on every engine, compare on request, then publish on every engine: never before all have ended."""
        with self.history.during("end"):
            await self._everyone("end", lambda e, c: e.end(c, self._spec_for(e)), field="end")
            self.ended = True
            for engine in self.engines:
                self.record(engine).needs_reset = False
        self.history.event("ended")
        if verify is not None:
            with self.history.during("verify"):
                await self.verify(verify)
        with self.history.during("publish"):
            await self._everyone("publish", lambda e, c: e.publish(c, self.update.version), field="end")
            self._write_published()
            self.history.published = True
        self.history.event("published")

    def _write_published(self) -> None:
        update = self.update
        self.roster.published(update.version, [e.name for e in self.engines], update_id=update.update_id)

    async def verify(self, against: Verify) -> None:
        """Compare the engines' checksums with each other, or with the source's."""
        answers: dict[str, dict[str, str] | None] = await self._everyone(
            "verify", lambda e, c: e.checksums(c), field="end"
        )
        wanted: dict[str, str] | None = (
            await self.calls.race(self.context.reader.digests()) if against == "source" else None
        )
        await self._verify_by_own_means([e for e in self.engines if answers[e.name] is None], against)
        told = {name: digests for name, digests in answers.items() if digests is not None}
        del answers
        # In a thread: with many engines of many tensors it takes long.
        compared = spawn(compare_checksums, told, self.update.manifest, wanted, name="wsync-verify")
        self.history.checksum = await self.calls.race(wait_for(compared))

    async def _verify_by_own_means(self, engines: Sequence[RolloutEngine], against: Verify) -> None:
        own = [e for e in engines if isinstance(e, HasOwnChecks)]
        notes = {e.name: "has no checksums to compare" for e in engines}
        if own:
            notes |= await check_own(
                own,
                partial(self._everyone, "verify", engines=own, field="end"),
                against=against,
                manifest=self.update.manifest,
                first_rows=lambda names: self.calls.race(self.context.reader.first_rows(names)),
            )
        for engine in engines:
            self.record(engine).notes.append(notes[engine.name])

    async def resume(self) -> list[EngineFailed]:
        """Let every whole engine of ours that is paused serve again; the failures, each after retries."""
        with self.history.during("resume"):
            self.resumed = True
            failures = await self.continue_whole()
        self.history.event("resumed")
        return failures

    async def continue_whole(self) -> list[EngineFailed]:
        """Tell the engines that may serve to go on, each whatever the others answer; the failures."""
        engines = [e for e in self.engines if self.may_resume(e)]
        limit = self.settings.timeouts.resume
        call = self.context.call(limit)
        sent = [self.calls.start(e, "resume", resume(e, call, limit=limit)) for e in engines]
        if sent:
            await asyncio.wait({s.task for s in sent}, timeout=limit + GRACE)
        for engine, one in zip(engines, sent, strict=True):
            self.record(engine).paused = not (one.task.done() and one.failure is None)
        self.calls.forget([s for s in sent if s.task.done() and s.failure is None])
        return [not_resumed(one, limit) for one in sent if self.roster[one.engine].paused]

    def may_speak_to(self, engine: RolloutEngine) -> bool:
        """Without the lock, only to engines that would notice; never to one that is lost."""
        return self.record(engine).state is not EngineState.LOST and (not self.lease_lost or engine.supports_fence)

    def may_resume(self, engine: RolloutEngine) -> bool:
        record = self.record(engine)
        policy = self.settings.resume_policy
        if policy == "never" or not record.paused or not self.may_speak_to(engine):
            return False
        return record.state is EngineState.CURRENT or (policy == "whole" and record.whole)
