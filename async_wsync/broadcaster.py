"""`WeightBroadcaster`: moves fresh weights from a trainer into running rollout engines.

    async with WeightBroadcaster([TorchEngine(handle), ...], lock=lock) as broadcaster:
        report = await broadcaster.update_weights(ModuleSource(model), version=7)

What an update does, in order, is `_update` and `_attempts` below. What it promises:

* One source at a time: groups are built, used and closed under ``lock``, which is released exactly once, after
  every engine call has an answer or its engine is quarantined.
* The first failure ends it, and comes out as `UpdateFailed` with the state of every engine. No engine that may hold
  a mix of weights is told to go on.
* A cancelled caller gets CancelledError after the engines are in a known state, never before.
* ``version`` is published only after every engine has acknowledged the end of the update.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

from async_wsync.calls import EngineCalls
from async_wsync.critical import refuse_holder, under_lock
from async_wsync.errors import Cancelled, EngineFailed, LockError
from async_wsync.fleet import Fleet
from async_wsync.greeting import greet
from async_wsync.links import Link, Links, Topology
from async_wsync.no_lock import NoLock
from async_wsync.progress import SafeProgress, make_progress
from async_wsync.report import UpdateReport
from async_wsync.round_update import RoundUpdate
from async_wsync.rounds import UpdateRound
from async_wsync.runtime.cancellation import finish
from async_wsync.runtime.foreign import contained
from async_wsync.sources.pump import SourcePump
from async_wsync.story import Settings, Story, Verify
from async_wsync.types import (
    Call,
    EngineInfo,
    EngineState,
    EventHook,
    HeldLock,
    PauseMode,
    Progress,
    RolloutEngine,
    Timeouts,
    UpdateEvent,
    UpdateLock,
    WeightSource,
)
from async_wsync.update import Update

__all__ = ["WeightBroadcaster"]

logger = logging.getLogger("async_wsync")


class WeightBroadcaster:
    """Sends weight versions from this process (rank 0) to ``engines``. Use it as an async context manager.

    ``lock``: shared with every other source that sends to the same engines; None for a lone source.
    ``backend``: "nccl", "gloo", or "auto": nccl where source and engines are on CUDA, else gloo.
    ``bucket_bytes``: how much is announced, sent and acknowledged at once; ``num_buffers`` of these exist at most.
    ``progress``: True for a tqdm bar, False, a `Progress`, or a callable that is given a `ProgressState`.
    ``pause_mode``: what happens to running requests, see `PauseMode`.
    ``resume_policy``: which engines are told to go on after a failure: "whole" ones (on a published version, or
    untouched by the failed update), only "current" ones, or "never". Torn engines stay paused under each.
    ``on_engine_failure``: "raise", or "drop": go on with the others, rebuilding the group at most ``max_rebuilds``
    times, as long as ``min_engines`` remain.
    ``on_cancel``: "finish" the update in flight within ``timeouts.drain``, or "stop" at the next bucket.
    ``lock_scope``: hold the lock for a whole "update", or for each "bucket", so that one source can gather while
    another sends (`UpdateRound` only: outside a round, buckets of two updates must not mix).
    ``topology``: one "shared" group, or a group "per_engine", so that one bad engine never blocks another.
    ``on_event``: called with an `UpdateEvent` on the loop; what it raises is logged.

    Raises ValueError for what can be seen to be wrong beforehand.
    """

    def __init__(
        self,
        engines: Iterable[RolloutEngine],
        *,
        lock: UpdateLock | None,
        backend: Literal["auto", "gloo", "nccl"] = "auto",
        bucket_bytes: int = 64 * 1024 * 1024,
        num_buffers: int = 2,
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - frozen
        progress: bool | Progress | Callable[..., object] = True,
        pause_mode: PauseMode | str = PauseMode.DRAIN,
        resume_policy: Literal["whole", "current", "never"] = "whole",
        on_engine_failure: Literal["raise", "drop"] = "raise",
        on_cancel: Literal["finish", "stop"] = "finish",
        lock_scope: Literal["update", "bucket"] = "update",
        topology: Topology = "shared",
        min_engines: int = 1,
        max_rebuilds: int = 3,
        master_address: str | None = None,
        name: str | None = None,
        on_event: EventHook | None = None,
    ) -> None:
        _one_of("backend", backend, ("auto", "gloo", "nccl"))
        _at_least("bucket_bytes", bucket_bytes, 1)
        _at_least("num_buffers", num_buffers, 1)
        _at_least("min_engines", min_engines, 1)
        _at_least("max_rebuilds", max_rebuilds, 0)
        self._settings = Settings(
            bucket_bytes=bucket_bytes,
            num_buffers=num_buffers,
            timeouts=timeouts,
            pause_mode=_pause_mode(pause_mode),
            resume_policy=_one_of("resume_policy", resume_policy, ("whole", "current", "never")),
            on_engine_failure=_one_of("on_engine_failure", on_engine_failure, ("raise", "drop")),
            on_cancel=_one_of("on_cancel", on_cancel, ("finish", "stop")),
            lock_scope=_one_of("lock_scope", lock_scope, ("update", "bucket")),
            topology=_one_of("topology", topology, ("shared", "per_engine")),
            min_engines=min_engines,
            max_rebuilds=max_rebuilds,
        )
        self._fleet = Fleet(engines)
        self._lock: UpdateLock = lock if lock is not None else NoLock()
        self._backend = backend
        self._progress = SafeProgress(make_progress(progress))
        self._on_event = on_event
        self.name = name or f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:6]}"
        self._links = Links(
            topology=topology,
            master_address=master_address,
            timeouts=timeouts,
            num_buffers=num_buffers,
            is_lost=self._fleet.roster.is_lost,
        )
        self._version: int | None = None
        self._turn = asyncio.Lock()  # one update or change of members at a time in this process
        self._open = False
        self._closed = False
        self._greeted: dict[str, EngineInfo] = {}
        self._running: Update | None = None

    # ------------------------------------------------------------------ entering and leaving

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def connect(self) -> None:
        """Greet every engine and form the update groups, under the lock. Bounded by ``timeouts.connect`` each."""
        refuse_holder(self._lock)
        connected = False
        self._closed = False
        try:
            await self._greet_all()
            await self._under_lock("connect", self._connect)
            connected = True
        finally:
            if not connected:
                await self.aclose()
        self._open = True

    async def _under_lock(self, what: str, work: Callable[[EngineCalls, HeldLock], Awaitable[None]]) -> None:
        await under_lock(self._lock, work, label=f"{self.name} {what}", timeouts=self._settings.timeouts)

    async def _greet_all(self) -> None:
        limits = self._settings.timeouts
        roster = self._fleet.roster
        records = {name: roster[name] for name in self._fleet.names}
        answers = await greet(self._fleet.engines, records, source=self.name, limit=limits.connect, field="connect")
        dropping = self._settings.on_engine_failure == "drop"
        for answer in answers.values():
            if isinstance(answer, EngineFailed) and not dropping:
                raise answer
        self._greeted = {name: answer for name, answer in answers.items() if isinstance(answer, EngineInfo)}

    async def _connect(self, calls: EngineCalls, held: HeldLock) -> None:
        limits = self._settings.timeouts
        await self._links.ensure(
            [engine for engine in self._fleet.engines if engine.name in self._greeted],
            backend=self._pick_backend(list(self._greeted.values())),
            incarnation=lambda name: self._fleet.roster[name].incarnation,
            calls=calls,
            # The deadline is ours, and knows who is missing; an adapter that gave up first would blame its engine.
            call=Call(source=self.name, fence=held.fence, timeout=limits.connect + limits.drain),
        )

    def _pick_backend(self, infos: Sequence[EngineInfo], *, source_device: str | None = None) -> str:
        if self._backend != "auto":
            return self._backend
        cuda = [info.device.startswith("cuda") for info in infos]
        here = _cuda_here() if source_device is None else source_device.startswith("cuda")
        return "nccl" if here and all(cuda) else "gloo"

    async def aclose(self) -> None:
        """Leave and close all groups. Idempotent, bounded by ``timeouts``, and quiet: it never raises for an engine.

        An update that another task has under way is broken off first, and fails. Raises `SelfDeadlock`, and closes
        nothing, where there are groups to close and the caller holds the lock.
        """
        if self._links.all:
            refuse_holder(self._lock)
        self._open = False
        self._closed = True
        await finish(self._close(), name=f"{self.name}: close")

    async def _close(self) -> None:
        limits = self._settings.timeouts
        if self._running is not None:
            self._running.break_off(Cancelled("the broadcaster was closed during the update"))
        async with self._turn:
            await self._close_links(limits)
            for engine in self._fleet.engines:
                await engine.aclose()

    async def _close_links(self, limits: Timeouts) -> None:
        if self._links.all:
            call = Call(source=self.name, fence=0, timeout=limits.close)
            try:
                async with self._lock.hold(label=f"{self.name} close", timeout=limits.close) as held:
                    await self._links.aclose(Call(source=self.name, fence=held.fence, timeout=limits.close))
            except LockError as error:
                # Our own end must go all the same; the engines notice that we have left.
                logger.warning("%s: closing without the lock: %s", self.name, error)
                for link in self._links.all:
                    link.abort()
                await self._links.aclose(call)

    # ----------------------------------------------------------------------------- updates

    async def update_weights(
        self,
        source: WeightSource,
        *,
        version: int,
        strict: bool = True,
        allow_empty: bool = False,
        verify: Verify | None = None,
        pause_mode: PauseMode | str | None = None,
        atomic_groups: Sequence[str] = (),
        round: UpdateRound | None = None,
    ) -> UpdateReport:
        """Bring every engine to ``version`` with the tensors of ``source``.

        ``strict=False`` lets the source name only a part of an engine's tensors. ``verify`` compares checksums before
        the version is published: of the "engines" with each other, or of each with the "source".
        ``atomic_groups``: regular expressions; tensors whose names match one travel in one bucket.
        ``round``: send ``source`` as one part of an update that several sources share; see `UpdateRound`.

        Raises ValueError (a bad argument, nothing touched), `EngineRejected` (the engines and the source disagree on
        names, shapes or types; nothing touched), `LockError` (`SelfDeadlock` at once, where the calling task holds the
        lock), and `UpdateFailed` for all that goes wrong after that.
        """
        async with self._exclusive():
            self._check_version(version)
            return await self._run(
                source,
                version=version,
                targets=self._fleet.names,
                strict=strict,
                allow_empty=allow_empty,
                verify=verify,
                pause_mode=self._pause_mode_of_all(pause_mode),
                atomic_groups=atomic_groups,
                round=round,
            )

    @asynccontextmanager
    async def _exclusive(self) -> AsyncIterator[None]:
        """Our turn at work that takes the lock. A task that holds it would wait for itself, and is told so at once."""
        refuse_holder(self._lock)
        async with self._turn:
            yield

    async def _run(
        self,
        source: WeightSource,
        *,
        version: int,
        verify: Verify | None,
        round: UpdateRound | None = None,
        **options: Any,
    ) -> UpdateReport:
        story = Story(version=version, emit=self._emit)
        kind: Callable[..., Update] = Update if round is None else partial(RoundUpdate, member=round.member(self.name))
        update = kind(
            fleet=self._fleet,
            links=self._links,
            lock=self._lock,
            settings=self._settings,
            story=story,
            progress=self._progress,
            # Hashed as it is sent: not every source can be read twice, nor by us alone.
            pump=SourcePump(source, num_buffers=self._settings.num_buffers, digests=verify == "source"),
            source=self.name,
            choose_backend=self._pick_backend,
            verify=verify,
            **options,
        )
        task = asyncio.get_running_loop().create_task(update.run(), name=f"{self.name}: update {version}")
        self._running = update
        try:
            return await finish(task, on_cancel=lambda: update.cancelled(task), name=task.get_name())
        finally:
            self._running = None
            if story.published:
                self._version = version

    def _check_version(self, version: int) -> None:
        if isinstance(version, bool) or not isinstance(version, int):
            raise ValueError(f"version must be an int, got {version!r}")
        if self._closed:
            raise ValueError(f"{self.name} is closed: connect() it again, or make a new broadcaster")
        if self._version is not None and version <= self._version:
            raise ValueError(f"version must increase: {version} after {self._version}")

    def _pause_mode_of_all(self, wanted: PauseMode | str | None) -> PauseMode:
        """The mode to use; ValueError where an engine says (by ``pause_modes``) that it has no such mode."""
        mode = self._settings.pause_mode if wanted is None else _pause_mode(wanted)
        for engine in self._fleet.engines:
            modes = getattr(engine, "pause_modes", None)
            if modes is not None and mode not in modes:
                has = ", ".join(m.value for m in PauseMode if m in modes)
                raise ValueError(f"{engine.name} has no pause mode {mode.value!r}: choose pause_mode= among {has}")
        return mode

    # -------------------------------------------------------------------------------- fleet

    async def add_engines(self, engines: Iterable[RolloutEngine]) -> None:
        """Take in more engines. They are stale until the next update, or a `catch_up`, reaches them."""
        async with self._turn:
            self._fleet.add(engines)

    async def remove_engines(self, names: Iterable[str]) -> None:
        """Let engines go: their groups are closed under the lock, and the others' are rebuilt when next needed."""
        async with self._exclusive():
            await self._remove(list(names))

    async def replace_engine(self, name: str, engine: RolloutEngine) -> None:
        """Put ``engine`` in the place of the one called ``name``, which may be dead."""
        async with self._exclusive():
            if engine.name != name and engine.name in self._fleet.names:
                raise ValueError(f"duplicate engine {engine.name!r}")
            await self._remove([name], keep_one=False)
            self._fleet.add([engine])

    async def _remove(self, names: list[str], *, keep_one: bool = True) -> None:
        unknown = [n for n in names if n not in self._fleet.names]
        if not unknown and keep_one and len(set(names)) >= len(self._fleet):
            raise ValueError("that would leave no engine: close the broadcaster instead, or add others first")
        gone = self._fleet.remove(names)
        links = [link for link in self._links.all if link.names & set(names)]
        if links:
            await self._under_lock("remove engines", partial(self._leave, links))
        for engine in gone:
            await engine.aclose()

    async def _leave(self, links: list[Link], calls: EngineCalls, held: HeldLock) -> None:
        limit = self._settings.timeouts.close
        await self._links.drop(links, Call(source=self.name, fence=held.fence, timeout=limit))

    async def catch_up(self, source: WeightSource, *, verify: Verify | None = None) -> UpdateReport | None:
        """Bring those engines that are not on the current version to it, over a group of their own.

        ``source`` must still hold that version. The engines that are current are neither paused nor spoken to. None
        where there is nothing to do; ValueError before the first update.
        """
        async with self._exclusive():
            if self._version is None:
                raise ValueError("catch_up before the first update: there is no current version yet")
            behind = [n for n in self._fleet.names if n not in self.current_engines()]
            if not behind:
                return None
            return await self._run(
                source,
                version=self._version,
                targets=behind,
                strict=True,
                allow_empty=False,
                verify=verify,
                pause_mode=self._settings.pause_mode,
                atomic_groups=(),
                keep_others=True,
            )

    @property
    def version(self) -> int | None:
        """The last version that was published, None before the first."""
        return self._version

    @property
    def engine_states(self) -> dict[str, EngineState]:
        return self._fleet.roster.states()

    def current_engines(self) -> tuple[str, ...]:
        """Names of the engines on the last published version: the ones to route requests to."""
        return self._fleet.roster.current()

    def _emit(self, event: UpdateEvent) -> None:
        if self._on_event is None:
            return
        try:
            with contained():
                self._on_event(event)
        except Exception:
            logger.exception("on_event failed for %s", event)

    def __repr__(self) -> str:
        states = ", ".join(f"{name} {state}" for name, state in self.engine_states.items())
        phase = "open" if self._open else "closed"
        return f"<WeightBroadcaster {self.name} {phase}, version {self._version}, {states}>"


def _one_of(what: str, value: Any, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise ValueError(f"{what} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def _at_least(what: str, value: int, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{what} must be an int of at least {least}, got {value!r}")


def _pause_mode(mode: PauseMode | str) -> PauseMode:
    return PauseMode(_one_of("pause_mode", str(mode), tuple(str(m) for m in PauseMode)))


def _cuda_here() -> bool:
    import torch

    return torch.cuda.is_available()
