"""One call of `WeightBroadcaster.update_weights`, from the manifest to the report.

    manifest and plan -> hello to the engines -> hold the lock -> attempt, and again over the survivors -> report

Up to the lock nothing has been touched, and a cancelled caller simply gets away. From then on the update goes to
an end: done, failed or stopped, with every engine in a known state.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from async_wsync.errors import Cancelled, EngineFailed, EngineRejected, LeaseLost, LockError, UpdateFailed
from async_wsync.report import UpdateReport
from async_wsync.runtime.cancellation import finish
from async_wsync.types import Base, EngineInfo, EngineState, Manifest, UpdateSpec
from async_wsync.update.attempt import Attempt
from async_wsync.update.context import UpdateContext
from async_wsync.update.hello import say_hello
from async_wsync.update.locked_work import enter
from async_wsync.update.recovery import Recovery, update_failed

__all__ = ["Update"]

_LOST_HELLO = 2.0  # seconds for an engine that was already lost, if the update can go on without it


class Update:
    """One update."""

    def __init__(self, context: UpdateContext) -> None:
        self.context = context
        self.request = context.request
        self.settings = context.settings
        self.history = context.history
        self.roster = context.fleet.roster
        self.cancellation = context.cancellation
        self.failure: UpdateFailed | None = None
        self._backend = ""
        self._bases: dict[str, Base] = {}

    # ---------------------------------------------------------------------- the script

    async def run(self) -> UpdateReport:
        with self.cancellation.within_total():
            return await self._run()

    async def _run(self) -> UpdateReport:
        done = False
        try:
            async with self.cancellation.interrupt.breaks_off():
                with self.history.during("plan"):
                    spec = await self._plan()
                with self.history.during("hello"):
                    await self._say_hello()
            self._start_bar(spec)
            await self._carry_out(spec)
            done = True
            return self._report(spec)
        except (ValueError, LockError, UpdateFailed, EngineRejected):
            raise
        except Exception as error:
            raise self._ended_outside_an_attempt(error) from error
        finally:
            status = "done" if done else "cancelled" if self.cancellation.was_asked else "failed"
            self.context.progress.close(status=status)
            await finish(self.context.reader.aclose(self.settings.timeouts.close))
            self.history.event("update_finished" if done else "update_failed")

    @property
    def _may_be_empty(self) -> bool:
        return self.request.allow_empty

    def _start_bar(self, spec: UpdateSpec) -> None:
        self.context.progress.start(
            version=spec.version, total_bytes=sum(b.nbytes for b in spec.buckets), num_buckets=len(spec.buckets)
        )

    async def _plan(self) -> UpdateSpec:
        manifest: Manifest = await self.context.reader.manifest()
        if not manifest.params and not self._may_be_empty:
            raise ValueError("the source has no tensors; allow_empty=True publishes the version all the same")
        buckets = await self.context.reader.plan(
            bucket_bytes=self.settings.bucket_bytes, atomic_groups=self.request.atomic_groups
        )
        self.history.event("update_started")
        return UpdateSpec(
            update_id=f"{self.context.source}/{self.history.version}/{uuid.uuid4().hex[:8]}",
            version=self.history.version,
            manifest=manifest,
            buckets=buckets,
            group="",
            strict=self.request.strict,
        )

    async def _say_hello(self) -> None:
        """Find out which engines are there. One that is gone is noticed here, before anybody waits for the lock."""
        context, roster = self.context, self.roster
        roster.start_update()
        engines = context.fleet.taking_part(self.request.targets)
        dropping = self.settings.on_engine_failure == "drop"
        lost = [e for e in engines if dropping and roster[e.name].state is EngineState.LOST]
        rest = [e for e in engines if e not in lost]
        records = {e.name: roster[e.name] for e in engines}
        limit = self.settings.timeouts.begin
        answers = await say_hello(rest, records, source=context.source, limit=limit, all_needed=not dropping)
        answers |= await say_hello(lost, records, source=context.source, limit=min(limit, _LOST_HELLO))
        gone = {name: answer for name, answer in answers.items() if isinstance(answer, EngineFailed)}
        left = [e.name for e in engines if e.name not in gone]
        if gone and (not dropping or len(left) < self.settings.min_engines):
            raise self._unreachable(gone)
        roster.drop(gone)
        infos = [answer for answer in answers.values() if isinstance(answer, EngineInfo)]
        self._backend = context.pick_backend(infos, source_device=context.reader.device.type)
        # Before the first attempt: one that fails may leave them torn, and the next one sends it all again.
        self._bases = roster.bases(self.request.base, left, by_us=self.request.base_is_ours)

    def _ended_outside_an_attempt(self, cause: Exception) -> UpdateFailed:
        """The source, the clock, the round or a closing broadcaster ended it where no attempt was under way."""
        return update_failed(
            "failed" if self.history.started else "not started",
            cause,
            version=self.history.version,
            phase=self.history.phase,
            outcomes=self.roster.outcomes(self.request.targets),
            at_fault=(),
            started=self.history.started,
        )

    def _unreachable(self, gone: dict[str, EngineFailed]) -> UpdateFailed:
        return update_failed(
            "not started",
            next(iter(gone.values())),
            version=self.history.version,
            phase="hello",
            outcomes=self.roster.outcomes(self.request.targets),
            at_fault=gone,
            started=False,
            notes=["replace or remove the lost engines, or let updates go on without them: on_engine_failure='drop'"],
        )

    @asynccontextmanager
    async def _hold(self) -> AsyncIterator[None]:
        label = f"{self.context.source} update {self.history.version}"
        try:
            async with AsyncExitStack() as stack:
                with self.history.during("lock"):
                    async with self.cancellation.interrupt.breaks_off():
                        limit = self.settings.timeouts.lock
                        self.history.held = await enter(stack, self.context.lock, label=label, timeout=limit)
                try:
                    if self.cancellation.interrupt.reason is not None:  # it came with the grant
                        raise self.cancellation.interrupt.reason
                    self.history.event("lock_acquired")
                    self.cancellation.committed = True
                    yield
                finally:
                    self.history.held = None
        except LeaseLost as lost:
            if self.failure is not None:
                lost.add_note(str(self.failure))
            raise

    async def _carry_out(self, spec: UpdateSpec) -> None:
        """Try; if a failure is some engines' fault and the others may go on, try again without those."""
        async with self._hold():
            while True:
                attempt = Attempt(self.context, spec, backend=self._backend, bases=self._bases)
                try:
                    async with self._settled(attempt):
                        await self._bracket(attempt)
                    # To its end, also if the lease is lost meanwhile: the version is out.
                    return await finish(self._serve_again(attempt), name="resuming after an update")
                except UpdateFailed as failure:
                    self._drop_who_failed(attempt, failure)
                self.history.rebuilds += 1
                self._start_bar(spec)

    async def _bracket(self, attempt: Attempt) -> None:
        await attempt.check()
        await attempt.connect()
        await attempt.open()
        await attempt.send()
        await attempt.close(self.request.verify)

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
            self.roster[name].lose()
        left = len(attempt.engines) - len(behind)
        if behind and (self.settings.on_engine_failure == "raise" or left < self.settings.min_engines):
            raise failure
        self.roster.drop(behind)

    def _drop_who_failed(self, attempt: Attempt, failure: UpdateFailed) -> None:
        """Leave those at fault out of the next attempt. Raises the failure if there is to be none."""
        left = [e for e in attempt.engines if e.name not in failure.at_fault]
        may = self.settings.on_engine_failure == "drop" and bool(failure.at_fault) and not self.history.published
        if not may or self.cancellation.ends_it or len(left) < self.settings.min_engines:
            raise failure
        if self.history.rebuilds >= self.settings.max_rebuilds:
            failure.add_note(f"gave up after {self.history.rebuilds} rebuilds (max_rebuilds)")
            raise failure
        self.roster.drop(failure.at_fault)

    # -------------------------------------------------------------- the end, and other ends

    def _report(self, spec: UpdateSpec) -> UpdateReport:
        roster, history = self.roster, self.history
        return UpdateReport(
            version=spec.version,
            nbytes=sum(b.nbytes for b in spec.buckets),
            num_tensors=len(spec.manifest.params),
            num_buckets=len(spec.buckets),
            seconds=time.monotonic() - history.started_at,
            phases=history.phases,
            spans=tuple(history.spans),
            engines=roster.outcomes(self.request.targets),
            checksum=history.checksum,
            notes=tuple(history.notes),
            rebuilds=history.rebuilds,
            dropped=roster.left_out("dropped"),
            behind=roster.left_out("behind"),
            buckets=tuple(history.timings),
            started_at=history.started_at,
        )

    def break_off(self, reason: Exception) -> None:
        """End the update with this failure, wherever it is."""
        self.cancellation.interrupt.fire(reason)
