"""One try at one update over a fixed set of engines: the bracket, and the buckets within it.

    check -> pause -> reset -> flush -> begin -> buckets -> end -> verify -> publish -> resume

Every step is taken by all engines before the next one starts. Where it fails, `recovery` is the way out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from async_wsync.errors import BaseMissing, EngineFailed
from async_wsync.groups.manager import GroupManager, Link
from async_wsync.protocols import Progress, RolloutEngine
from async_wsync.runtime.engine_calls import EngineCalls
from async_wsync.sources.reader import BucketStream, SourceReader
from async_wsync.transfer.checksum import combined_digest
from async_wsync.types import Base, BucketSpec, Call, EngineState, PauseMode, UpdateSpec
from async_wsync.update.context import Settings, UpdateHistory, Verify
from async_wsync.update.fleet import Fleet
from async_wsync.update.pipeline import BucketPipeline
from async_wsync.update.retries import GRACE, flush, not_resumed, resume
from async_wsync.update.roster import EngineRecord
from async_wsync.update.verification import HasOwnChecks, check_own

__all__ = ["Attempt"]


@dataclass(eq=False, kw_only=True)
class Attempt:
    """One try. ``engines`` are its targets; all state about them is in the fleet's roster."""

    update: UpdateSpec
    engines: list[RolloutEngine]
    fleet: Fleet
    links: GroupManager
    calls: EngineCalls
    reader: SourceReader
    progress: Progress
    settings: Settings
    history: UpdateHistory
    source: str
    backend: str
    pause_mode: PauseMode
    keep_others: bool = False
    bases: Mapping[str, Base] = field(default_factory=dict)
    may_leave_behind: bool = True
    turn: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext
    should_stop: Callable[[], Exception | None] = lambda: None
    drain_left: Callable[[], float] | None = None
    used: tuple[Link, ...] = ()
    begun: bool = False
    ended: bool = False
    resumed: bool = False
    lease_lost: bool = False
    _specs: dict[str, UpdateSpec] = field(default_factory=dict)
    _staged: BucketStream | None = None

    # ------------------------------------------------------------------ small helpers

    def call(self, limit: float) -> Call:
        assert self.history.held is not None
        # The deadline is ours. The adapter keeps asking through the drain, or a call could not settle in it.
        patience = limit + self.settings.timeouts.drain
        return Call(source=self.source, fence=self.history.held.fence, timeout=patience)

    def drain(self) -> float:
        """Seconds for what is under way to settle."""
        return self.settings.timeouts.drain if self.drain_left is None else self.drain_left()

    def record(self, engine: RolloutEngine) -> EngineRecord:
        return self.fleet.roster[engine.name]

    async def _everyone(self, phase: str, verb: Callable[[RolloutEngine, Call], Any], *, field: str, **kw: Any) -> Any:
        limit: float = getattr(self.settings.timeouts, field) + kw.pop("grace", 0.0)
        call = self.call(limit)
        engines: Iterable[RolloutEngine] = kw.pop("engines", self.engines)
        return await self.calls.everyone(phase, engines, lambda e: verb(e, call), limit=limit, field=field)

    # ------------------------------------------------------------------------- steps

    async def check(self, whole: UpdateSpec | None = None) -> None:
        """Agree on the manifest with every engine, before anything is paused, let alone sent.

        ``whole``: what all sources of a round send together. An engine that lacks what a partial update builds on is
        left as it is.
        """
        update = whole or self.update
        with self.history.during("check"):
            notes = await self._everyone("check", lambda e, c: self._fits(e, c, update), field="begin")
            if behind := {name: said for name, said in notes.items() if isinstance(said, BaseMissing)}:
                self._leave_behind(behind)
        for engine in self.engines:
            known = self.record(engine).notes
            known.extend(note for note in notes[engine.name] if note not in known)

    async def _fits(self, engine: RolloutEngine, call: Call, update: UpdateSpec) -> tuple[str, ...] | BaseMissing:
        offered = update if update.strict else replace(update, base=self.bases.get(engine.name))
        try:
            return await engine.check(call, offered)
        except BaseMissing as lacking:
            return lacking

    def _leave_behind(self, behind: Mapping[str, BaseMissing]) -> None:
        for name, lacking in behind.items():
            self.fleet.roster[name].doubt(torn=lacking.torn, holds=lacking.holds)
        left = [e for e in self.engines if e.name not in behind]
        if not self.may_leave_behind or len(left) < self.settings.min_engines:
            first, *others = behind.values()
            for other in others:
                first.add_note(str(other))
            raise first
        self.engines[:] = left
        for name, lacking in behind.items():
            self.fleet.roster[name].notes.append(f"left out of a partial update: {lacking}")
        self.history.leave_behind(behind)

    async def connect(self) -> None:
        if not self.update.buckets:
            return
        with self.history.during("connect"):
            self.used = await self.links.ensure(
                self.engines,
                backend=self.backend,
                incarnation=lambda name: self.fleet.roster[name].incarnation,
                calls=self.calls,
                call=self.call(self.settings.timeouts.connect),
                keep_others=self.keep_others,
                source_device=self.reader.device,
            )
        self.history.event("connected")
        # Staged from now on: while the engines pause and begin, the first buckets are read and packed.
        formats = {link.wire for link in self.used}
        self._staged = self.reader.buckets(self.update.buckets, formats, device=self.used[0].group.device)

    async def open(self) -> None:
        """Pause, close what a dead source left open, flush, begin: in step, so that no byte meets a running engine."""
        self.history.started = True
        with self.history.during("pause"):
            for engine in self.engines:
                self.record(engine).begin()
                self.record(engine).paused = True  # from here on it may be, whatever it answers
            await self._everyone("pause", lambda e, c: e.pause(c, self.pause_mode), field="pause")
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
        for link in self.used:
            if engine.name in link.names:
                return self._spec_over(link)
        return self.update

    def _spec_over(self, link: Link) -> UpdateSpec:
        # One object a group, so that an adapter packs a long manifest once for all of its engines.
        name = link.group.spec.name
        if name not in self._specs:
            self._specs[name] = replace(self.update, group=name)
        return self._specs[name]

    async def send(self) -> None:
        """All buckets to all engines; see `BucketPipeline`."""
        if self._staged is None:
            return
        transfer = BucketPipeline(
            links=self.used,
            calls=self.calls,
            receive=self._receive,
            turn=self.turn,
            submitted=self._submitted,
            acknowledged=self._acknowledged,
            isolate=self._isolate,
            is_dropped=self.fleet.roster.is_lost,
            bucket_limit=self.settings.timeouts.bucket,
            idle_limit=self.settings.timeouts.idle,
            one_at_a_time=self.settings.lock_scope == "bucket" or not all(e.pipelined for e in self.engines),
            should_stop=self.should_stop,
            timings=self.history.timings,
        )
        with self.history.during("receive"):
            await transfer.run(self._staged)

    async def _receive(self, engine: RolloutEngine, bucket: BucketSpec, link: Link) -> None:
        # Announced behind others, it may wait for those as long as our own limit lets each of them take.
        limit = self.settings.timeouts.bucket * self.settings.num_buffers
        await engine.receive(self.call(limit), self._spec_over(link), bucket)

    def _submitted(self, bucket: BucketSpec) -> None:
        for engine in self.engines:
            self.record(engine).touched = True
        self.history.stage(f"bucket {bucket.index + 1}/{len(self.update.buckets)}")
        self.history.event("bucket_submitted", bucket=bucket.index)

    def _acknowledged(self, bucket: BucketSpec, engines: Sequence[str]) -> None:
        for name in engines:
            self.fleet.roster[name].last_bucket = bucket.index
        self.progress.advance(nbytes=bucket.nbytes, bucket=bucket.index)
        self.history.event("bucket_done", bucket=bucket.index)

    def _isolate(self, name: str, failure: BaseException) -> bool:
        """May the transfer go on without this engine? Only where its group is its own, and enough others remain."""
        alone = self.settings.topology == "per_engine" and self.settings.on_engine_failure == "drop"
        if not alone or len(self.engines) - 1 < self.settings.min_engines:
            return False
        engine = next(e for e in self.engines if e.name == name)
        self.engines.remove(engine)
        self.used = tuple(link for link in self.used if name not in link.names)
        record = self.record(engine)
        record.error, record.phase = str(failure), "receive"
        record.lose()
        self.history.dropped.append(name)
        self.history.event("engine_lost", engine=name, detail=str(failure))
        return True

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
        self.fleet.roster.published(update.version, [e.name for e in self.engines], update_id=update.update_id)

    async def verify(self, against: Verify) -> None:
        """Compare the engines' checksums with each other, or with the source's."""
        answers = await self._everyone("verify", lambda e, c: e.checksums(c), field="end")
        names = [meta.name for meta in self.update.manifest.params]
        wanted: dict[str, str] | None = await self.calls.race(self.reader.digests()) if against == "source" else None
        first = "the source" if wanted is not None else ""
        await self._verify_by_own_means([e for e in self.engines if answers[e.name] is None], against)
        for engine in self.engines:
            digests: dict[str, str] | None = answers[engine.name]
            if digests is None:
                continue
            mine = {name: digests[name] for name in names if name in digests}
            if wanted is None:
                wanted, first = mine, engine.name
            differing = [name for name in names if mine.get(name) != wanted.get(name)]
            if differing:
                raise EngineFailed(
                    f"{engine.name}: {len(differing)} tensors differ from {first} after the update, "
                    f"first {', '.join(differing[:3])}",
                    engine=engine.name,
                    phase="verify",
                )
        self.history.checksum = combined_digest(wanted) if wanted else None

    async def _verify_by_own_means(self, engines: Sequence[RolloutEngine], against: Verify) -> None:
        own = [e for e in engines if isinstance(e, HasOwnChecks)]
        notes = {e.name: "has no checksums to compare" for e in engines}
        if own:
            notes |= await check_own(
                own,
                partial(self._everyone, "verify", engines=own, field="end"),
                against=against,
                manifest=self.update.manifest,
                first_rows=lambda names: self.calls.race(self.reader.first_rows(names)),
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
        call = self.call(limit)
        sent = [self.calls.start(e, "resume", resume(e, call, limit=limit)) for e in engines]
        if sent:
            await asyncio.wait({s.task for s in sent}, timeout=limit + GRACE)
        for engine, one in zip(engines, sent, strict=True):
            self.record(engine).paused = not (one.task.done() and one.failure is None)
        self.calls.forget([s for s in sent if s.task.done() and s.failure is None])
        return [not_resumed(one, limit) for one in sent if self.fleet.roster[one.engine].paused]

    def may_speak_to(self, engine: RolloutEngine) -> bool:
        """Without the lock, only to engines that would notice; never to one that is lost."""
        return self.record(engine).state is not EngineState.LOST and (not self.lease_lost or engine.supports_fence)

    def may_resume(self, engine: RolloutEngine) -> bool:
        record = self.record(engine)
        policy = self.settings.resume_policy
        if policy == "never" or not record.paused or not self.may_speak_to(engine):
            return False
        return record.state is EngineState.CURRENT or (policy == "whole" and record.whole)
