"""What happens once an attempt has failed, in this order:

1. Nothing new is started, and the groups that may still carry bytes are broken up at both ends.
2. Every call already sent settles, or its engine is quarantined.
3. Each engine's state is written down; the failure that explains the others is found.
4. Sessions left open are closed, and the engines that are whole go on serving. What is sent here settles too.

Only after that may the lock go. Where it is gone already (a lost lease), step 4 goes only to engines that check
fences: the others may be another source's by now. None of it raises: trouble on the way out stands beside the
cause, never in its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from async_wsync.errors import EngineDied, EngineReplaced, EngineTimeout, UpdateFailed
from async_wsync.runtime.engine_calls import Sent, asked, told, watched
from async_wsync.types import EngineOutcome, EngineState
from async_wsync.update.attempt import Attempt
from async_wsync.update.blame import blame

__all__ = ["Recovery", "update_failed"]


class Recovery:
    """Brings a failed attempt to rest and says how it ended."""

    def __init__(self, attempt: Attempt, first: BaseException) -> None:
        self._attempt = attempt
        self._first = first
        self.at_fault: set[str] = set()
        self.notes: list[str] = []
        self._noted: set[str] = set()  # the engines that a note is about

    async def run(self) -> UpdateFailed:
        attempt = self._attempt
        failed_in = attempt.history.phase
        with attempt.history.during("settle"):
            aborting = self._break_up()
            silent = await attempt.calls.settle(limit=attempt.context.cancellation.drain_left())
            for task in aborting:
                task.cancel()
        cause, self.at_fault = blame(self._first, attempt.calls, silent)
        self._write_down(silent, cause)
        await self._close_sessions()
        if not attempt.resumed and attempt.history.held is not None:
            for failure in await attempt.continue_whole():
                self.notes.append(f"not resumed: {failure}")
                self._noted.add(failure.engine)
        await self._quarantine_late()
        self._note_paused()
        return self._error(cause, getattr(cause, "phase", "") or failed_in)

    def _break_up(self) -> list[asyncio.Task[None]]:
        """Break the groups that are in use; the engines are told too, since the source's leaving frees only some."""
        attempt = self._attempt
        stuck = {s.engine for s in attempt.calls.pending() if s.bucket is not None}
        moving = any(attempt.record(e).touched for e in attempt.engines) and not attempt.ended
        if attempt.history.held is None or not (moving or stuck):
            return []  # without the lock nothing of ours is under way
        tasks = []
        for group in attempt.groups:
            group.abort()
            call = attempt.context.call(attempt.settings.timeouts.drain)
            for engine in group.engines:
                if engine.name in stuck:
                    telling = told(engine.name, "abort", asked(engine.abort, call, group.source_end.spec.name))
                    tasks.append(watched(telling))
        return tasks

    def _write_down(self, silent: Mapping[str, Sent], cause: BaseException) -> None:
        attempt = self._attempt
        # An adapter that gave up waiting knows no more than we do about a call that never came back.
        gave_up = {s.engine: s for s in attempt.calls.failures() if isinstance(s.failure, EngineTimeout)}
        silent = {**gave_up, **silent}
        for sent in attempt.calls.succeeded("publish"):
            record = attempt.roster[sent.engine]
            if record.state is EngineState.UPDATING:
                record.publish(attempt.update.version, attempt.update.update_id)
        for sent in attempt.calls.succeeded("receive"):
            record = attempt.roster[sent.engine]
            record.last_bucket = max(sent.bucket or 0, record.last_bucket or 0)
        for sent in attempt.calls.failures():
            record = attempt.roster[sent.engine]
            if record.error is None or isinstance(sent.failure, EngineDied):
                record.error, record.phase = str(sent.failure), sent.phase
            if isinstance(sent.failure, EngineDied | EngineReplaced):
                self._lose(sent.engine)
        for name, sent in silent.items():
            record = attempt.roster[name]
            record.error, record.phase = f"silent: its {sent.phase} call never settled", sent.phase
            self._lose(name)
        for engine in attempt.engines:
            record = attempt.record(engine)
            record.fail()
            if record.state is EngineState.TORN:
                attempt.history.event("engine_torn", engine=engine.name, detail=record.error or str(cause))
        lost = {e.name for e in attempt.engines if attempt.record(e).state is EngineState.LOST}
        for group in attempt.groups:
            if group.names & (lost | self.at_fault):
                group.abort()

    def _lose(self, name: str) -> None:
        record = self._attempt.roster[name]
        if record.state is not EngineState.LOST:
            record.lose()
            record.needs_reset = True
            self._attempt.history.event("engine_lost", engine=name, detail=record.error)

    async def _close_sessions(self) -> None:
        """End what `begin` opened wherever an engine still answers, so that a whole one can serve again."""
        attempt = self._attempt
        open_ones = [e for e in attempt.engines if attempt.record(e).needs_reset and attempt.may_speak_to(e)]
        if not attempt.begun or not open_ones or attempt.history.held is None:
            return
        limit = min(attempt.settings.timeouts.begin, attempt.settings.timeouts.drain)
        call = attempt.context.call(limit)
        sent = {e.name: attempt.calls.start(e, "reset", asked(e.reset, call)) for e in open_ones}
        await asyncio.wait({s.task for s in sent.values()}, timeout=limit)
        for engine in open_ones:
            one = sent[engine.name]
            if one.task.done() and one.failure is None:
                attempt.record(engine).needs_reset = False
            else:
                why = one.failure if one.task.done() else f"no answer within {limit:g} s"
                self.notes.append(f"{engine.name}: its update session could not be closed: {why}")
                self._noted.add(engine.name)
                if isinstance(one.failure, EngineDied | EngineReplaced):
                    self._lose(engine.name)
        await self._quarantine_late()

    async def _quarantine_late(self) -> None:
        """A call of the recovery that has not settled could take effect under the next holder of the lock."""
        for name in await self._attempt.calls.settle(limit=0.0):
            self._lose(name)

    def _note_paused(self) -> None:
        """Every engine that may be paused has been told to go on, is torn or lost, or is named here."""
        records = [self._attempt.record(engine) for engine in self._attempt.engines]
        left = [record.name for record in records if record.paused and record.whole]
        unnamed = [name for name in left if name not in self._noted]
        if unnamed:
            self.notes.append(f"still paused, though whole: {', '.join(unnamed)}")

    def _error(self, cause: BaseException, phase: str) -> UpdateFailed:
        attempt = self._attempt
        bucket = getattr(cause, "bucket", None)
        where = phase if bucket is None else f"bucket {bucket} of {len(attempt.update.buckets)}"
        return update_failed(
            f"failed in {where}",
            cause,
            version=attempt.update.version,
            phase=phase,
            bucket=bucket,
            outcomes=attempt.roster.outcomes(attempt.context.request.targets),
            at_fault=sorted(self.at_fault),
            started=attempt.history.started,
            notes=[f"note: {note}" for note in self.notes],
        )


def update_failed(
    how: str,
    cause: BaseException,
    *,
    version: int,
    phase: str,
    outcomes: dict[str, EngineOutcome],
    at_fault: Iterable[str],
    started: bool,
    notes: Iterable[str] = (),
    bucket: int | None = None,
) -> UpdateFailed:
    """The error of an update, raised from ``cause``: what failed, a line an engine, and the notes."""
    head = f"update to version {version} {how}: {cause}"
    error = UpdateFailed(
        "\n".join([head, *_table(outcomes), *(f"  {note}" for note in notes)]),
        version=version,
        phase=phase,
        bucket=bucket,
        outcomes=outcomes,
        at_fault=tuple(at_fault),
        started=started,
    )
    error.__cause__ = cause
    return error


def _table(outcomes: Mapping[str, EngineOutcome]) -> list[str]:
    """A line an engine: state, version, last bucket, and its own error."""
    width = max((len(name) for name in outcomes), default=0)
    lines = []
    for o in outcomes.values():
        has = "-" if o.version is None else str(o.version)
        last = "none" if o.last_bucket is None else str(o.last_bucket)
        error = f"  {o.error.splitlines()[0]}" if o.error else ""
        lines.append(f"  {o.engine:<{width}}  {o.state:<8}  version {has:<6}  last bucket {last:<5}{error}")
    return lines
