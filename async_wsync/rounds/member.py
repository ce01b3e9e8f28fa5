"""One source's part in one round."""

from __future__ import annotations

import asyncio
import logging
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from async_wsync.errors import LockError, RoundFailed, UpdateFailed
from async_wsync.rounds.state import Phase, View
from async_wsync.runtime.actor_client import ActorClient
from async_wsync.runtime.cancellation import finish
from async_wsync.runtime.engine_calls import Interrupt
from async_wsync.runtime.object_refs import RemoteDied

__all__ = ["RoundMember"]


logger = logging.getLogger("async_wsync")


_POLL_FIRST, _POLL_LAST = 0.005, 0.25


ANSWER_LIMIT = 5.0  # seconds for one answer of the round's actor


_OVER = (Phase.DONE, Phase.FAILED)


class RoundMember:
    """One source's part in one round. Every error here is a `RoundFailed`."""

    def __init__(self, name: str, link: ActorClient, source: str, *, version: int, num_sources: int | None) -> None:
        self._name = name
        self._link = link
        self._source = source
        self._num_sources = num_sources
        self._member = uuid.uuid4().hex
        self._version = version
        self._asked = False  # to be let in, answered or not
        self._gave_up = False  # and the others know it, as far as they can be told
        self.view: View | None = None

    @property
    def leads(self) -> bool:
        return self.view is not None and self.view.leader == self._source

    @property
    def update_id(self) -> str:
        assert self.view is not None
        return self.view.round_id

    async def join(self, *, engines: tuple[str, ...], manifest: bytes) -> None:
        try:
            await self._link.ready(ANSWER_LIMIT)
        except LockError as error:
            self._gave_up = True  # there is nobody to tell
            raise self._failed(str(error)) from error
        self._link.register()
        self._asked = True
        about = (self._source, self._member, self._link.client, self._version, engines, self._num_sources, manifest)
        self._take_in(await self._ask("join", *about))

    async def manifests(self) -> dict[str, bytes]:
        answer: dict[str, bytes] = await self._ask("manifests", self.update_id)
        return answer

    async def tell(self, verb: str, *args: str, limit: float = ANSWER_LIMIT) -> View:
        """Say how far we are; returns how far the round is. Raises `RoundFailed` if it is over for us."""
        return self._take_in(await self._tell(verb, *args, limit=limit))

    async def until(self, *phases: Phase, limit: float | None = None) -> View:
        """Wait for the round to reach one of ``phases``."""
        loop = asyncio.get_running_loop()
        deadline = None if limit is None else loop.time() + limit
        delay = _POLL_FIRST
        while True:
            view = await self.tell("view")
            if view.phase in phases:
                return view
            if deadline is not None and loop.time() > deadline:
                raise self._failed(f"still waiting for {', '.join(view.waiting_for)} after {limit:g} s (Timeouts.lock)")
            await asyncio.sleep(delay)
            delay = min(2 * delay, _POLL_LAST)

    async def watch(self, interrupt: Interrupt) -> None:
        """Interrupt our update as soon as the round fails; also tells the round that we are alive."""
        while interrupt.reason is None:
            try:
                await self.tell("view")
            except RoundFailed as error:
                interrupt.fire(error)
            await asyncio.wait({interrupt.future}, timeout=_POLL_LAST)

    @property
    def failure(self) -> RoundFailed | None:
        """Why the round ended, where it failed."""
        view = self.view
        if view is None or view.phase is not Phase.FAILED:
            return None
        return self._failed(view.failure, view.failed_source)

    @property
    def published(self) -> bool:
        return self.view is not None and self.view.phase is Phase.DONE

    @property
    def may_be_touched(self) -> bool:
        """Whether some source may have sent, as far as we know. To be asked after `give_up`.

        A round that may have let us in and has not answered since may have gone on without our knowledge.
        """
        if self.view is None:
            return self._asked
        return self.view.opened or self.view.phase not in _OVER

    async def give_up(self, why: str, *, limit: float) -> None:
        """Tell the others that we can't go on, also if we never came, and learn how far they are. Raises nothing."""
        if self._gave_up or (self.view is not None and self.view.phase in _OVER):
            return
        self._gave_up = True
        try:
            if self.view is None:
                await self._link.ready(min(limit, ANSWER_LIMIT))
                self.view = await self._ask("leave", self._source, self._member, self._version, why, limit=limit)
                self._asked = self.view is not None
            else:
                self.view = await self._tell("fail", why, limit=limit)
        except (RoundFailed, LockError) as error:
            logger.warning("round %r could not be told that %s gave up: %s", self._name, self._source, error)

    @asynccontextmanager
    async def taking_part(self, *, limit: float) -> AsyncIterator[None]:
        """If the body fails, before it has joined or after, the others are told. ``limit``: seconds for that."""
        done = False
        try:
            yield
            done = True
        finally:
            if not done:
                await finish(self.give_up(_reason(sys.exception()), limit=limit), name=f"leaving round {self._name}")

    async def _tell(self, verb: str, *args: str, limit: float = ANSWER_LIMIT) -> View:
        who = (self._source, self._member, self._link.client)
        view: View = await self._ask("tell", verb, self.update_id, *who, *args, limit=limit)
        return view

    def _take_in(self, view: View) -> View:
        self.view = view
        if view.phase is Phase.FAILED:
            raise self._failed(view.failure, view.failed_source)
        return view

    async def _ask(self, method: str, *args: Any, limit: float = ANSWER_LIMIT) -> Any:
        limit = min(limit, ANSWER_LIMIT)
        try:
            return await self._link.ask(method, *args, timeout=limit)
        except TimeoutError as error:
            raise self._failed(f"its actor did not answer within {limit:g} s") from error
        except RemoteDied as error:
            raise self._failed(f"its actor can't be reached: {error}") from error
        except LockError as error:
            raise self._failed(str(error)) from error

    def _failed(self, why: str, source: str = "") -> RoundFailed:
        by = f" for source {source!r}" if source else ""
        round_id = self.view.round_id if self.view is not None else ""
        return RoundFailed(
            f"round {self._name!r}, version {self._version}: failed{by}: {why}", source=source, round_id=round_id
        )


def _reason(error: BaseException | None) -> str:
    cause = error.__cause__ if isinstance(error, UpdateFailed) and error.__cause__ is not None else error
    return str(cause or "") or "it was cancelled"
