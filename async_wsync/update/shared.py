"""One source's way through an update that several sources share; see `rounds.round`.

The leader opens the bracket, everyone sends under the lock, the leader closes it. The lock is never held while
waiting for another source. Each stretch under the lock is settled before the lock goes, as in a lone update.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from async_wsync.engines.update_codec import packed_update, unpack_update
from async_wsync.errors import Cancelled, UpdateFailed
from async_wsync.rounds.member import RoundMember
from async_wsync.rounds.state import Phase
from async_wsync.runtime.cancellation import finish
from async_wsync.runtime.threads import spawn, wait_for
from async_wsync.types import Manifest, ParamMeta, UpdateSpec
from async_wsync.update.attempt import Attempt
from async_wsync.update.context import UpdateContext
from async_wsync.update.recovery import Recovery
from async_wsync.update.update import Update

__all__ = ["SharedUpdate"]


class SharedUpdate(Update):
    """An update as member of a round. Engine failures end it for all sources, whatever ``on_engine_failure`` says."""

    def __init__(self, context: UpdateContext, member: RoundMember) -> None:
        super().__init__(context)
        self.member = member

    async def _carry_out(self, spec: UpdateSpec) -> None:
        attempt = Attempt(
            self.context,
            replace(spec, strict=False),
            backend=self._backend,
            bases=self._bases,
            engines_agreed=True,
            bucket_turn=(lambda: self._turn(attempt)) if self.settings.lock_scope == "bucket" else None,
        )
        async with self._ending_with_the_round(attempt):
            await self._gather(attempt, spec)
            watch = asyncio.get_running_loop().create_task(
                self.member.watch(self.cancellation.interrupt), name="wsync round watch"
            )
            try:
                await (self._lead(attempt, spec) if self.member.leads else self._follow(attempt))
            finally:
                watch.cancel()

    async def _gather(self, attempt: Attempt, spec: UpdateSpec) -> None:
        """Wait until all sources are there. We have touched nothing yet; the others may have, by the time we look."""
        with self.history.during("gather"):
            packed = await packed_update(replace(spec, buckets=()))
            names = tuple(engine.name for engine in attempt.engines)
            await attempt.calls.race(self.member.join(engines=names, manifest=packed))
            attempt.update = replace(attempt.update, update_id=self.member.update_id)
            phases = (Phase.OPENING, Phase.SENDING, Phase.CLOSING)
            await attempt.calls.race(self.member.until(*phases, limit=self.settings.timeouts.lock))

    # -------------------------------------------------------------------------- the two roles

    async def _lead(self, attempt: Attempt, spec: UpdateSpec) -> None:
        async with self._turn_to_send(attempt):
            whole = replace(spec, manifest=await attempt.calls.race(self._union()), buckets=())
            await attempt.check(whole)
            await attempt.connect()
            await attempt.open()
            await attempt.calls.race(self.member.tell("opened"))
        await attempt.calls.race(self.member.tell("sent"))
        await self._until(attempt, Phase.CLOSING)
        async with self._hold():
            async with self._settled(attempt):
                await attempt.close(self.request.verify)
                # Not to be interrupted: the version is out, and the others are to know.
                await self.member.tell("closed", limit=self.settings.timeouts.drain)
            await finish(self._serve_again(attempt), name="resuming after an update")

    async def _follow(self, attempt: Attempt) -> None:
        await self._until(attempt, Phase.SENDING)
        if attempt.update.buckets:
            async with self._turn_to_send(attempt):
                await attempt.join()
        else:
            attempt.mark_updating()
        await attempt.calls.race(self.member.tell("sent"))
        await self._until(attempt, Phase.DONE)
        attempt.published_by_leader()

    async def _union(self) -> Manifest:
        """All parts as one manifest, for the strict check. ValueError if two sources send one name."""
        return await wait_for(spawn(_union_of, await self.member.manifests(), name="wsync-union"))

    # ---------------------------------------------------------------------------- the round

    @property
    def _may_be_empty(self) -> bool:
        return True  # a source with nothing to send takes part all the same

    async def _until(self, attempt: Attempt, phase: Phase) -> None:
        with self.history.during("wait"):
            await attempt.calls.race(self.member.until(phase, Phase.DONE))

    @asynccontextmanager
    async def _turn(self, attempt: Attempt) -> AsyncIterator[None]:
        """The lock, for a stretch of the round; given back only once the stretch has settled."""
        async with self._hold(), self._settled(attempt):
            yield

    @asynccontextmanager
    async def _turn_to_send(self, attempt: Attempt) -> AsyncIterator[None]:
        """A turn that goes on to send our part; where each bucket has a turn of its own, that comes after it."""
        async with self._turn(attempt):
            yield
            if self.settings.lock_scope == "update":
                await attempt.send()
        if self.settings.lock_scope == "bucket":
            await attempt.send()

    @asynccontextmanager
    async def _ending_with_the_round(self, attempt: Attempt) -> AsyncIterator[None]:
        """However our part ends early, it ends for all, and what became of the engines is written down."""
        first: BaseException | None = None
        done = False
        try:
            yield
            done = True
        except UpdateFailed:
            done = True  # in a turn of ours, which settled it
            raise
        except Exception as error:
            first = error
        finally:
            if not done:  # also on the way out of a cancellation
                first = first or sys.exception() or Cancelled("it was cancelled")
                failure = await finish(self._end(attempt, first), name="leaving a failed round")
        if not done and failure is not None:
            raise failure

    async def _end(self, attempt: Attempt, first: BaseException) -> UpdateFailed | None:
        """Nothing of ours is under way between two turns. None where the round has gone well all the same."""
        explained = await self._explain(attempt, first)
        if self.member.published and not self.member.leads:
            attempt.published_by_leader()
            return None
        return await Recovery(attempt, explained).run()

    async def _explain(self, attempt: Attempt, first: BaseException) -> BaseException:
        """Our failure is everyone's, and at once. Theirs, where it came first, is the better explanation of ours."""
        await self.member.give_up(str(first) or "it was cancelled", limit=self.cancellation.drain_left())
        if self.member.may_be_touched and not self.history.published:
            attempt.mark_updating()  # whatever we did, another source may have sent
        failed = self.member.failure
        if failed is None or failed.source == self.context.source:
            return first
        failed.__cause__ = first if first is not failed else None
        return failed


def _union_of(packed_parts: Mapping[str, bytes]) -> Manifest:
    params: dict[str, ParamMeta] = {}
    aliases: dict[str, str] = {}
    tied: tuple[tuple[str, str], ...] = ()
    for source, packed in packed_parts.items():
        part = unpack_update(packed).manifest
        for name in (*(meta.name for meta in part.params), *(alias for alias, _ in part.aliases)):
            if name in params or name in aliases:
                raise ValueError(f"{name!r} is sent by source {source!r} and by another source of the round")
        params.update((meta.name, meta) for meta in part.params)
        aliases.update(part.aliases)
        tied += part.tied
    return Manifest(params=tuple(params.values()), aliases=tuple(aliases.items()), tied=tied)
