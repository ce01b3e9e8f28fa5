"""One call of `WeightBroadcaster.update_weights`, from the manifest to the report.

    manifest and plan -> greet the engines -> hold the lock -> attempt, and again over the survivors -> report

Up to the lock nothing has been touched, and a cancelled caller simply gets away. From then on the update goes to
an end: done, failed or stopped, with every engine in a known state.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from async_wsync.errors import Cancelled, EngineFailed, EngineRejected, LeaseLost, LockError, PhaseTimeout, UpdateFailed
from async_wsync.groups.manager import GroupManager
from async_wsync.protocols import Progress, RolloutEngine, UpdateLock
from async_wsync.report import UpdateReport
from async_wsync.runtime.cancellation import finish
from async_wsync.runtime.engine_calls import EngineCalls, Interrupt
from async_wsync.sources.reader import SourceReader
from async_wsync.types import Base, EngineInfo, EngineState, Manifest, PauseMode, UpdateSpec
from async_wsync.update.attempt import Attempt
from async_wsync.update.context import Settings, UpdateHistory, Verify
from async_wsync.update.fleet import Fleet
from async_wsync.update.hello import greet
from async_wsync.update.locked_work import enter
from async_wsync.update.recovery import Recovery, update_failed

__all__ = ["Update"]

_LOST_HELLO = 2.0  # seconds for an engine that was already lost, where the update can go on without it
_LEAVE_SHARE = 0.75  # of the close limit: what an update that was cancelled before it touched anything may still take
_SETTLE_SHARE = 0.25  # of the drain: what a cancelled update keeps of it for settling, if it cannot finish


@dataclass(eq=False, kw_only=True)
class Update:
    """One update. ``targets``: the names of the engines it is for."""

    fleet: Fleet
    links: GroupManager
    lock: UpdateLock
    settings: Settings
    history: UpdateHistory
    progress: Progress
    reader: SourceReader
    source: str
    choose_backend: Callable[..., str]
    targets: Sequence[str]
    builds_on: int | None  # the version that a partial update builds on
    builds_on_ours: bool  # whether we must have brought it to the engines, or they are believed
    pause_mode: PauseMode
    strict: bool
    allow_empty: bool
    verify: Verify | None
    atomic_groups: Sequence[str]
    keep_others: bool = False
    committed: bool = False
    stopped: Cancelled | None = None
    failure: UpdateFailed | None = None
    interrupt: Interrupt = field(default_factory=Interrupt)
    backend: str = ""
    _drain: float = 0.0
    _drained_by: float | None = None  # since the caller was cancelled
    _timers: list[asyncio.TimerHandle] = field(default_factory=list)
    _bases: dict[str, Base] = field(default_factory=dict)

    # ---------------------------------------------------------------------- the script

    async def run(self) -> UpdateReport:
        loop = asyncio.get_running_loop()
        limit = self.settings.timeouts.total
        self._timers.append(loop.call_later(limit, lambda: self.interrupt.fire(self._out_of_time())))
        done = False
        try:
            async with self.interrupt.breaks_off():
                with self.history.during("plan"):
                    spec = await self._plan()
                with self.history.during("hello"):
                    engines = await self._greet()
            self._start_bar(spec)
            await self._carry_out(spec, engines)
            done = True
            return self._report(spec)
        except (ValueError, LockError, UpdateFailed, EngineRejected):
            raise
        except Exception as error:
            raise self._ended_outside_an_attempt(error) from error
        finally:
            for timer in self._timers:
                timer.cancel()
            cancelled = self._drained_by is not None
            self.progress.close(status="done" if done else "cancelled" if cancelled else "failed")
            await finish(self.reader.aclose(self.settings.timeouts.close))
            self.history.event("update_finished" if done else "update_failed")

    @property
    def _may_be_empty(self) -> bool:
        return self.allow_empty

    def _start_bar(self, spec: UpdateSpec) -> None:
        self.progress.start(
            version=spec.version, total_bytes=sum(b.nbytes for b in spec.buckets), num_buckets=len(spec.buckets)
        )

    async def _plan(self) -> UpdateSpec:
        manifest: Manifest = await self.reader.manifest()
        if not manifest.params and not self._may_be_empty:
            raise ValueError("the source has no tensors; allow_empty=True publishes the version all the same")
        buckets = await self.reader.plan(bucket_bytes=self.settings.bucket_bytes, atomic_groups=self.atomic_groups)
        self.history.event("update_started")
        return UpdateSpec(
            update_id=f"{self.source}/{self.history.version}/{uuid.uuid4().hex[:8]}",
            version=self.history.version,
            manifest=manifest,
            buckets=buckets,
            group="",
            strict=self.strict,
        )

    async def _greet(self) -> list[RolloutEngine]:
        """The engines that this update goes to. One that is gone is noticed here, before anybody waits for the lock."""
        roster = self.fleet.roster
        engines = self.fleet.pick(self.targets)
        dropping = self.settings.on_engine_failure == "drop"
        lost = [e for e in engines if dropping and roster[e.name].state is EngineState.LOST]
        rest = [e for e in engines if e not in lost]
        records = {e.name: roster[e.name] for e in engines}
        limit = self.settings.timeouts.begin
        answers = await greet(rest, records, source=self.source, limit=limit, all_needed=not dropping)
        answers |= await greet(lost, records, source=self.source, limit=min(limit, _LOST_HELLO))
        gone = {name: answer for name, answer in answers.items() if isinstance(answer, EngineFailed)}
        left = [e for e in engines if e.name not in gone]
        if gone and (not dropping or len(left) < self.settings.min_engines):
            raise self._unreachable(gone)
        self.history.dropped.extend(gone)
        infos = [answer for answer in answers.values() if isinstance(answer, EngineInfo)]
        self.backend = self.choose_backend(infos, source_device=self.reader.device.type)
        # Before the first attempt: one that fails may leave them torn, and the next one sends it all again.
        self._bases = roster.bases(self.builds_on, [e.name for e in left], by_us=self.builds_on_ours)
        return left

    def _ended_outside_an_attempt(self, cause: Exception) -> UpdateFailed:
        """The source, the clock, the round or a closing broadcaster ended it where no attempt was under way."""
        return update_failed(
            "failed" if self.history.started else "not started",
            cause,
            version=self.history.version,
            phase=self.history.phase,
            outcomes=self.fleet.roster.outcomes(self.targets),
            at_fault=(),
            started=self.history.started,
        )

    def _unreachable(self, gone: dict[str, EngineFailed]) -> UpdateFailed:
        return update_failed(
            "not started",
            next(iter(gone.values())),
            version=self.history.version,
            phase="hello",
            outcomes=self.fleet.roster.outcomes(self.targets),
            at_fault=gone,
            started=False,
            notes=["replace or remove the lost engines, or let updates go on without them: on_engine_failure='drop'"],
        )

    @asynccontextmanager
    async def _hold(self) -> AsyncIterator[None]:
        label = f"{self.source} update {self.history.version}"
        try:
            async with AsyncExitStack() as stack:
                with self.history.during("lock"):
                    async with self.interrupt.breaks_off():
                        limit = self.settings.timeouts.lock
                        self.history.held = await enter(stack, self.lock, label=label, timeout=limit)
                try:
                    if self.interrupt.reason is not None:  # it came with the grant
                        raise self.interrupt.reason
                    self.history.event("lock_acquired")
                    self.committed = True
                    yield
                finally:
                    self.history.held = None
        except LeaseLost as lost:
            if self.failure is not None:
                lost.add_note(str(self.failure))
            raise

    async def _carry_out(self, spec: UpdateSpec, engines: list[RolloutEngine]) -> None:
        """Try; where a failure is some engines' fault and the others may go on, try again without those."""
        async with self._hold():
            while True:
                attempt = self._attempt(spec, engines)
                try:
                    async with self._settled(attempt):
                        await self._bracket(attempt)
                    # To its end, also where the lease is lost meanwhile: the version is out.
                    return await finish(self._serve_again(attempt), name="resuming after an update")
                except UpdateFailed as failure:
                    engines = self._survivors(attempt, failure)
                self.history.rebuilds += 1
                self._start_bar(spec)

    async def _bracket(self, attempt: Attempt) -> None:
        await attempt.check()
        await attempt.connect()
        await attempt.open()
        await attempt.send()
        await attempt.close(self.verify)

    def _attempt(self, spec: UpdateSpec, engines: list[RolloutEngine]) -> Attempt:
        return Attempt(
            update=spec,
            engines=list(engines),
            fleet=self.fleet,
            links=self.links,
            calls=EngineCalls(self.interrupt),
            reader=self.reader,
            progress=self.progress,
            settings=self.settings,
            history=self.history,
            source=self.source,
            backend=self.backend,
            pause_mode=self.pause_mode,
            keep_others=self.keep_others,
            bases=self._bases,
            should_stop=lambda: self.stopped,
            drain_left=self._drain_left,
        )

    @asynccontextmanager
    async def _settled(self, attempt: Attempt) -> AsyncIterator[None]:
        """Whatever happens inside, nothing of it is under way any more when this is left."""
        first: BaseException | None = None
        done = False
        try:
            yield
            done = True
        except Exception as error:
            first = error
        finally:
            # Also on the way out of a cancellation, which here means that the lease was lost.
            if not done:
                first = first or sys.exception() or Cancelled("the update was cancelled from within")
                failure = await finish(self._settle(attempt, first), name="settling a failed update")
        if not done:
            cause = failure.__cause__
            # A refused manifest says it all, as long as nothing was started.
            raise cause if isinstance(cause, EngineRejected) and not self.history.started else failure

    async def _settle(self, attempt: Attempt, first: BaseException) -> UpdateFailed:
        attempt.lease_lost = isinstance(first, asyncio.CancelledError)
        self.failure = await Recovery(attempt, await self._explain(attempt, first)).run()
        return self.failure

    async def _explain(self, attempt: Attempt, first: BaseException) -> BaseException:
        return first

    async def _serve_again(self, attempt: Attempt) -> None:
        """The version is out, and nothing takes it back. An engine that can't be told to go on is lost all the same."""
        failures = await attempt.resume()
        if not failures and not attempt.calls.pending():
            return
        first = failures[0] if failures else Cancelled("left behind during the update")
        failure = await finish(Recovery(attempt, first).run(), name="settling the engines left behind")
        behind = {f.engine for f in failures}
        for name in behind:
            self.fleet.roster[name].lose()
        left = len(attempt.engines) - len(behind)
        if behind and (self.settings.on_engine_failure == "raise" or left < self.settings.min_engines):
            raise failure
        self.history.dropped.extend(sorted(behind))

    def _survivors(self, attempt: Attempt, failure: UpdateFailed) -> list[RolloutEngine]:
        if self.history.published:
            raise failure
        left = [e for e in attempt.engines if e.name not in failure.at_fault]
        may = self.settings.on_engine_failure == "drop" and bool(failure.at_fault)
        interrupted = self.interrupt.reason is not None or self.stopped is not None
        if not may or interrupted or len(left) < self.settings.min_engines:
            raise failure
        if self.history.rebuilds >= self.settings.max_rebuilds:
            failure.add_note(f"gave up after {self.history.rebuilds} rebuilds (max_rebuilds)")
            raise failure
        self.history.dropped.extend(failure.at_fault)
        return left

    # -------------------------------------------------------------- the end, and other ends

    def _report(self, spec: UpdateSpec) -> UpdateReport:
        roster, history = self.fleet.roster, self.history
        return UpdateReport(
            version=spec.version,
            nbytes=sum(b.nbytes for b in spec.buckets),
            num_tensors=len(spec.manifest.params),
            num_buckets=len(spec.buckets),
            seconds=time.monotonic() - history.started_at,
            phases=history.phases,
            spans=tuple(history.spans),
            engines=roster.outcomes(self.targets),
            checksum=history.checksum,
            notes=tuple(history.notes),
            rebuilds=history.rebuilds,
            dropped=tuple(dict.fromkeys(history.dropped)),
            behind=tuple(history.behind),
            buckets=tuple(history.timings),
            started_at=history.started_at,
        )

    def _out_of_time(self) -> PhaseTimeout:
        limit = self.settings.timeouts.total
        return PhaseTimeout(
            f"the update took longer than {limit:g} s (Timeouts.total), in {self.history.phase}",
            phase=self.history.phase,
            field="total",
            seconds=limit,
        )

    def _drain_left(self) -> float:
        if self._drained_by is None:
            return self.settings.timeouts.drain
        return max(self._drained_by - asyncio.get_running_loop().time(), _SETTLE_SHARE * self._drain)

    def break_off(self, reason: Exception) -> None:
        """End the update with this failure, wherever it is."""
        self.interrupt.fire(reason)

    def cancelled(self, task: asyncio.Task[UpdateReport]) -> None:
        """The caller was cancelled. Before anything was touched, leave; after that, finish or stop within ``drain``."""
        loop = asyncio.get_running_loop()
        limits = self.settings.timeouts
        # What may still be under way before an engine was paused is joins, of a group that will not be.
        self._drain = drain = limits.drain if self.history.started else min(limits.drain, _LEAVE_SHARE * limits.close)
        self._drained_by = loop.time() + drain
        if not self.committed:
            task.cancel()
            return
        if not self.history.started:
            self.interrupt.fire(Cancelled("the update was cancelled before any engine was paused"))
            return
        if self.settings.on_cancel == "stop":
            self.stopped = Cancelled("the update was cancelled and stopped at a bucket boundary (on_cancel='stop')")
        late = Cancelled(f"the update was cancelled and could not end within {drain:g} s (Timeouts.drain)")
        self._timers.append(loop.call_later((1 - _SETTLE_SHARE) * drain, self.interrupt.fire, late))
