"""`UpdateRound`: several sources, one update.

Pipeline stages each own a part of the model. In a round their updates become one: the engines are paused once, every
source sends its part under the lock, and the version is published only if all parts arrived. If one source fails or
dies, all learn it, the engines stay torn and paused, and the next round heals them.

    round_ = UpdateRound.create(name="pp", num_sources=2)                       # in the driver
    await broadcaster.update_weights(source, version=7, round=round_)           # in each source
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import Any

from async_wsync import arguments
from async_wsync.calls import Interrupt
from async_wsync.core.round_state import Phase, RoundState, View
from async_wsync.errors import LockError, RoundFailed
from async_wsync.lock_link import LockLink
from async_wsync.lock_watch import ClientCard, Obituaries
from async_wsync.runtime.object_refs import RemoteDied

__all__ = ["RoundMember", "RoundServer", "UpdateRound"]

logger = logging.getLogger("async_wsync")

_POLL_FIRST, _POLL_LAST = 0.005, 0.25
_ANSWER = 5.0  # seconds for one answer of the round's actor
_OVER = (Phase.DONE, Phase.FAILED)


class RoundServer:
    """The Ray actor of an `UpdateRound`: `core.round_state` with a clock and obituaries. Its methods never wait."""

    def __init__(self, *, num_sources: int, silence: float) -> None:
        prefix = f"round-{uuid.uuid4().hex[:8]}"
        self._state = RoundState(num_sources=num_sources, silence=silence, prefix=prefix)
        self._obituaries = Obituaries()
        self._manifests: dict[str, dict[str, bytes]] = {}

    def watch(self, card: ClientCard, refs: list[Any], beacon: Any = None) -> None:
        self._obituaries.watch(card, refs[0] if refs else None, beacon)

    def join(
        self,
        source: str,
        member: str,
        client: str,
        version: int,
        engines: tuple[str, ...],
        num_sources: int | None,
        manifest: bytes,
    ) -> View:
        view = self._state.join(
            source,
            client,
            member=member,
            version=version,
            engines=engines,
            num_sources=num_sources,
            now=self._now(),
        )
        self._obituaries.heard(client)
        if view.phase is not Phase.FAILED:
            self._manifests.setdefault(view.round_id, {})[source] = manifest
        while len(self._manifests) > 2:
            del self._manifests[next(iter(self._manifests))]
        return view

    def manifests(self, round_id: str) -> dict[str, bytes]:
        """Source to its packed part."""
        return self._manifests.get(round_id, {})

    def leave(self, source: str, member: str, why: str) -> View | None:
        """For a member that does not know whether it has joined; None where it has not."""
        self._now()
        return self._state.leave(source, member, why)

    def tell(self, verb: str, round_id: str, source: str, member: str, client: str, *args: str) -> View:
        """``verb``: view, opened, sent, closed or fail."""
        self._obituaries.heard(client)
        self._state.spoke(round_id, source, member)
        step = {
            "view": self._state.view,
            "opened": self._state.opened,
            "sent": self._state.sent,
            "closed": self._state.closed,
            "fail": self._state.fail,
        }[verb]
        view: View = step(round_id, source, *args, now=self._now())  # type: ignore[operator]
        return view

    def status(self) -> dict[str, object]:
        return self._state.status(now=self._now())

    def _now(self) -> float:
        for client, why in self._obituaries.drain():
            self._state.died(client, why, now=time.monotonic())
        return time.monotonic()


class UpdateRound:
    """A handle on a named round of ``num_sources`` sources, used for one update after another. Picklable.

    ``silence``: seconds without a word from a source after which the round fails for all; a source whose process
    ends is noticed within 2 s whatever this says.
    """

    def __init__(
        self, *, name: str, namespace: str | None = None, handle: Any = None, num_sources: int | None = None
    ) -> None:
        arguments.text("the name of a round", name)
        arguments.text("namespace", namespace, none=True)
        self.name = name
        self.namespace = namespace
        self._num_sources = num_sources
        self._link = LockLink(name=name, namespace=namespace, handle=handle, beacon=False, what="round")

    @classmethod
    def create(
        cls,
        *,
        name: str,
        num_sources: int,
        namespace: str | None = None,
        silence: float = 30.0,
        lifetime: str | None = None,
    ) -> UpdateRound:
        """The round called ``name``, made now if there is none. It lives as long as the process that made it, or,
        with ``lifetime="detached"``, until it is killed."""
        arguments.text("the name of a round", name)
        arguments.at_least("num_sources", num_sources, 1)
        arguments.seconds("silence", silence)
        import ray

        namespace = namespace or ray.get_runtime_context().namespace
        actor = ray.remote(RoundServer).options(
            name=name,
            namespace=namespace,
            get_if_exists=True,
            lifetime=lifetime,
            num_cpus=0,
            max_concurrency=1,
            enable_task_events=False,
        )
        round_ = cls(name=name, namespace=namespace, num_sources=num_sources)
        round_._link.get_or_make(lambda: actor.remote(num_sources=num_sources, silence=silence))
        return round_

    @classmethod
    def connect(cls, *, name: str, namespace: str | None = None) -> UpdateRound:
        """The round called ``name``, which must exist by the time of its first use."""
        import ray

        return cls(name=name, namespace=namespace or ray.get_runtime_context().namespace)

    def __repr__(self) -> str:
        return f"<UpdateRound {self.name!r} in {self.namespace!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.name, self.namespace, self._link.handle, self._num_sources)

    async def status(self) -> dict[str, Any]:
        """Plain data: ``round``, ``version``, ``phase``, ``leader``, ``sources`` (seconds since heard), ``failure``."""
        await self._link.ready(_ANSWER)
        answer: dict[str, Any] = await self._link.ask("status", timeout=_ANSWER)
        return answer

    def member(self, source: str) -> RoundMember:
        return RoundMember(self.name, self._link, source, num_sources=self._num_sources)


class RoundMember:
    """One source's part in one round. Every error here is a `RoundFailed`."""

    def __init__(self, name: str, link: LockLink, source: str, *, num_sources: int | None) -> None:
        self._name = name
        self._link = link
        self._source = source
        self._num_sources = num_sources
        self._member = uuid.uuid4().hex
        self._version = 0
        self._asked = False  # to be let in, answered or not
        self.view: View | None = None

    @property
    def leads(self) -> bool:
        return self.view is not None and self.view.leader == self._source

    @property
    def update_id(self) -> str:
        assert self.view is not None
        return self.view.round_id

    async def join(self, *, version: int, engines: tuple[str, ...], manifest: bytes) -> None:
        self._version = version
        try:
            await self._link.ready(_ANSWER)
        except LockError as error:
            raise self._failed(str(error)) from error
        self._link.register()
        self._asked = True
        about = (self._source, self._member, self._link.client, version, engines, self._num_sources, manifest)
        self._take_in(await self._ask("join", *about))

    async def manifests(self) -> dict[str, bytes]:
        answer: dict[str, bytes] = await self._ask("manifests", self.update_id)
        return answer

    async def tell(self, verb: str, *args: str, limit: float = _ANSWER) -> View:
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
        """Tell the others that we can't go on, and learn how far they are."""
        if not self._asked or (self.view is not None and self.view.phase in _OVER):
            return
        try:
            if self.view is None:
                self.view = await self._ask("leave", self._source, self._member, why, limit=limit)
                self._asked = self.view is not None
            else:
                self.view = await self._tell("fail", why, limit=limit)
        except RoundFailed as error:
            logger.warning("round %r could not be told that %s gave up: %s", self._name, self._source, error)

    async def _tell(self, verb: str, *args: str, limit: float = _ANSWER) -> View:
        who = (self._source, self._member, self._link.client)
        view: View = await self._ask("tell", verb, self.update_id, *who, *args, limit=limit)
        return view

    def _take_in(self, view: View) -> View:
        self.view = view
        if view.phase is Phase.FAILED:
            raise self._failed(view.failure, view.failed_source)
        return view

    async def _ask(self, method: str, *args: Any, limit: float = _ANSWER) -> Any:
        limit = min(limit, _ANSWER)
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


def _rebuild(name: str, namespace: str | None, handle: Any, num_sources: int | None) -> UpdateRound:
    return UpdateRound(name=name, namespace=namespace, handle=handle, num_sources=num_sources)
