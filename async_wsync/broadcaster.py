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
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext
from types import TracebackType
from typing import Any, Literal, Self, get_args

from async_wsync import arguments
from async_wsync.arguments import at_least, one_of
from async_wsync.errors import Cancelled
from async_wsync.groups.manager import GroupManager, Topology
from async_wsync.lock.null import NullLock
from async_wsync.progress import SafeProgress, make_progress
from async_wsync.protocols import EventHook, Progress, RolloutEngine, UpdateLock, WeightSource
from async_wsync.report import UpdateReport
from async_wsync.rounds.member import RoundMember
from async_wsync.rounds.round import UpdateRound
from async_wsync.runtime.cancellation import finish
from async_wsync.runtime.foreign_code import contained
from async_wsync.runtime.signals import end_quietly_on_sigterm
from async_wsync.sources.reader import SourceReader
from async_wsync.types import EngineState, PauseMode, Timeouts, UpdateEvent
from async_wsync.update.close import close_groups
from async_wsync.update.connect import connect_all
from async_wsync.update.context import BroadcasterContext, Settings, UpdateRequest, Verify, cuda_here
from async_wsync.update.fleet import Fleet, listed
from async_wsync.update.history import UpdateHistory
from async_wsync.update.locked_work import refuse_holder
from async_wsync.update.membership import change_members, close_adapters
from async_wsync.update.recovery import update_failed
from async_wsync.update.shared import SharedUpdate
from async_wsync.update.turns import Turns
from async_wsync.update.update import Update

__all__ = ["WeightBroadcaster"]

logger = logging.getLogger("async_wsync")

_VERIFY = get_args(Verify)


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
        arguments.kind("timeouts", timeouts, Timeouts)
        arguments.text("master_address", master_address, none=True)
        arguments.text("name", name, none=True)
        arguments.function("on_event", on_event)
        if lock is not None and not callable(getattr(lock, "hold", None)):
            raise ValueError(f"lock must be a BroadcastLock, a PolledLock or None, got {lock!r}")
        at_least("bucket_bytes", bucket_bytes, 1)
        at_least("num_buffers", num_buffers, 1)
        at_least("min_engines", min_engines, 1)
        at_least("max_rebuilds", max_rebuilds, 0)
        settings = Settings(
            bucket_bytes=bucket_bytes,
            num_buffers=num_buffers,
            timeouts=timeouts,
            backend=one_of("backend", backend, ("auto", "gloo", "nccl")),
            pause_mode=_pause_mode(pause_mode),
            resume_policy=one_of("resume_policy", resume_policy, ("whole", "current", "never")),
            on_engine_failure=one_of("on_engine_failure", on_engine_failure, ("raise", "drop")),
            on_cancel=one_of("on_cancel", on_cancel, ("finish", "stop")),
            lock_scope=one_of("lock_scope", lock_scope, ("update", "bucket")),
            topology=one_of("topology", topology, ("shared", "per_engine")),
            min_engines=min_engines,
            max_rebuilds=max_rebuilds,
        )
        self._fleet = Fleet(engines)
        self._lock: UpdateLock = lock if lock is not None else NullLock()
        self._on_event = on_event
        self.name = name or f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:6]}"
        self._groups = GroupManager(
            topology=topology,
            master_address=master_address,
            timeouts=timeouts,
            num_buffers=num_buffers,
            is_lost=self._fleet.roster.is_lost,
        )
        self._context = BroadcasterContext(
            source=self.name,
            fleet=self._fleet,
            groups=self._groups,
            lock=self._lock,
            settings=settings,
            progress=SafeProgress(make_progress(progress)),
        )
        self._version: int | None = None
        self._turns = Turns(self.name, self._lock)

    # ------------------------------------------------------------------ entering and leaving

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def connect(self) -> None:
        """Say hello to every engine and form the update groups, under the lock. Bounded by ``timeouts.connect`` each.

        Opens a broadcaster that is new or closed; an update on a new one forms the groups by itself. If it fails, a
        broadcaster that was open stays open, any other is closed. Raises ValueError while the broadcaster is being
        closed, `Cancelled` if it is closed meanwhile, `EngineFailed`, `RendezvousError`, `LockError`.
        """
        end_quietly_on_sigterm()
        async with self._turns.take_to_open() as was_open:
            connected = False
            try:
                with self._turns.locked_work("connect", self._context.settings.timeouts) as locked_work:
                    await connect_all(self._context, locked_work, keep=was_open)
                connected = True
            finally:
                if not (connected or was_open):
                    await finish(self._close(), name=f"{self.name}: close")

    async def aclose(self) -> None:
        """Leave and close all groups. Idempotent and quiet: it never raises for an engine, for the lock or for Ray.

        What another task has under way or waits for (a connect, an update, a change of members) is broken off first,
        fails, and settles within ``timeouts.drain``; the rest is bounded by ``timeouts.close``. After that nothing
        opens by itself; a new `connect` does. Raises `SelfDeadlock`, and closes nothing, where there are groups to
        close and the caller holds the lock.
        """
        if self._groups.all:
            refuse_holder(self._lock)
        await self._turns.close(self._close)

    async def _close(self) -> None:
        await close_groups(self._context)
        await close_adapters(self._fleet.engines, limit=self._context.settings.timeouts.close)

    # ----------------------------------------------------------------------------- updates

    async def update_weights(
        self,
        source: WeightSource,
        *,
        version: int,
        strict: bool = True,
        base: int | None = None,
        allow_empty: bool = False,
        verify: Verify | None = None,
        pause_mode: PauseMode | str | None = None,
        atomic_groups: Sequence[str] = (),
        round: UpdateRound | None = None,
    ) -> UpdateReport:
        """Bring every engine to ``version`` with the tensors of ``source``.

        ``strict=False`` lets the source name only a part of an engine's tensors. Such a part builds on the last version
        that this broadcaster published; with ``base``, on that version, which engines are believed to hold if they say
        so. Engines that lack it, and would be left with a mix, stay as they are: ``behind`` in the report names them.
        In a round, or where fewer than ``min_engines`` are left, the update is refused with `BaseMissing`.
        ``verify`` compares checksums before the version is published: of the "engines" with each other, or of each with
        the "source".
        ``atomic_groups``: regular expressions; tensors whose names match one travel in one bucket.
        ``round``: send ``source`` as one part of an update that several sources share; see `UpdateRound`.

        Raises nothing but ValueError (a bad argument; nothing touched), `EngineRejected` (the engines and the source
        disagree on names, shapes or types; nothing touched), `LockError` (`SelfDeadlock` at once, where the calling
        task holds the lock), and `UpdateFailed` for all else that goes wrong, whose ``started`` is False where
        nothing was touched: the source failed, time was up, a round failed or the broadcaster was closed before that.
        """
        _check_source(source)
        arguments.flag("strict", strict)
        arguments.flag("allow_empty", allow_empty)
        arguments.kind("round", round, UpdateRound, none=True)
        verify = one_of("verify", verify, _VERIFY, none=True)
        groups = arguments.patterns("atomic_groups", atomic_groups)
        _check_version(version)
        member = None if round is None else round.member(self.name, version=version)
        taking_part = (
            nullcontext() if member is None else member.taking_part(limit=self._context.settings.timeouts.drain)
        )
        async with taking_part, self._turn_to_update("update_weights", version):
            self._check_newer(version)
            if base is not None and (strict or isinstance(base, bool) or not isinstance(base, int)):
                raise ValueError(f"base must be an int, and goes with strict=False; got {base!r}")
            request = UpdateRequest(
                version=version,
                targets=self._fleet.names,
                strict=strict,
                base=self._version if base is None else base,
                base_is_ours=base is None,
                allow_empty=allow_empty,
                verify=verify,
                pause_mode=self._pause_mode_of_all(pause_mode),
                atomic_groups=groups,
            )
            return await self._run(source, request, member)

    async def _run(self, source: WeightSource, request: UpdateRequest, member: RoundMember | None) -> UpdateReport:
        end_quietly_on_sigterm()
        history = UpdateHistory(version=request.version, emit=self._emit)
        reader = SourceReader(
            source,
            num_buffers=self._context.settings.num_buffers,
            # Hashed as it is sent: not every source can be read twice, nor by us alone.
            digests=request.verify == "source",
            find_device=self._context.settings.backend != "gloo" and cuda_here(),
        )
        context = self._context.for_update(request, reader=reader, history=history)
        update = Update(context) if member is None else SharedUpdate(context, member)
        task = asyncio.get_running_loop().create_task(update.run(), name=f"{self.name}: update {request.version}")
        try:
            with self._turns.running("the update", update):
                return await finish(task, on_cancel=lambda: context.cancellation.ask(task), name=task.get_name())
        finally:
            if history.published:
                self._version = request.version

    @asynccontextmanager
    async def _turn_to_update(self, call: str, version: int | None) -> AsyncIterator[None]:
        try:
            async with self._turns.take(call):
                yield
        except Cancelled as closed:
            raise update_failed(
                "not started",
                closed,
                version=version or 0,
                phase="turn",
                outcomes=self._fleet.roster.outcomes(),
                at_fault=(),
                started=False,
            ) from closed

    def _check_newer(self, version: int) -> None:
        if self._version is not None and version <= self._version:
            raise ValueError(f"version must increase: {version} after {self._version}")

    def _pause_mode_of_all(self, wanted: PauseMode | str | None) -> PauseMode:
        """The mode to use; ValueError where an engine says (by ``pause_modes``) that it has no such mode."""
        mode = self._context.settings.pause_mode if wanted is None else _pause_mode(wanted)
        for engine in self._fleet.engines:
            modes = getattr(engine, "pause_modes", None)
            if modes is not None and mode not in modes:
                has = ", ".join(m.value for m in PauseMode if m in modes)
                raise ValueError(f"{engine.name} has no pause mode {mode.value!r}: choose pause_mode= among {has}")
        return mode

    # -------------------------------------------------------------------------------- fleet

    async def add_engines(self, engines: Iterable[RolloutEngine]) -> None:
        """Take in more engines. They are stale until the next update, or a `catch_up`, reaches them.

        This and the other changes of members happen wholly or not at all. They raise ValueError where the change
        makes no sense, or while the broadcaster is being closed, and `Cancelled` if it is closed meanwhile.
        """
        joining = listed(engines)
        async with self._turns.take("add_engines"):
            await self._change("add engines", joining=joining)

    async def remove_engines(self, names: Iterable[str]) -> None:
        """Let engines go: their groups are closed under the lock, and the others' are rebuilt when next needed.

        Raises `LockError` too; then, and if it is cancelled before the lock is ours, all are still members.
        """
        leaving = arguments.names("names", names)
        async with self._turns.take("remove_engines"):
            await self._change("remove engines", leaving=leaving)

    async def replace_engine(self, name: str, engine: RolloutEngine) -> None:
        """Put ``engine`` in the place of the one called ``name``, which may be dead. Raises as `remove_engines`."""
        async with self._turns.take("replace_engine"):
            await self._change("replace an engine", leaving=[name], joining=[engine])

    async def _change(self, what: str, *, leaving: Sequence[str] = (), joining: Sequence[RolloutEngine] = ()) -> None:
        with self._turns.locked_work(what, self._context.settings.timeouts) as locked_work:
            await change_members(self._context, locked_work, leaving=leaving, joining=joining)

    async def catch_up(self, source: WeightSource, *, verify: Verify | None = None) -> UpdateReport | None:
        """Bring those engines that are not on the current version to it, over a group of their own.

        ``source`` must still hold all of that version. The engines that are current are neither paused nor spoken to.
        None where there is nothing to do; ValueError before the first update. Raises as `update_weights` for all else.
        """
        _check_source(source)
        verify = one_of("verify", verify, _VERIFY, none=True)
        async with self._turn_to_update("catch_up", self._version):
            if self._version is None:
                raise ValueError("catch_up before the first update: there is no current version yet")
            behind = [n for n in self._fleet.names if n not in self.current_engines()]
            if not behind:
                return None
            request = UpdateRequest(
                version=self._version,
                targets=tuple(behind),
                verify=verify,
                pause_mode=self._context.settings.pause_mode,
                keep_others=True,
            )
            return await self._run(source, request, None)

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
        return f"<WeightBroadcaster {self.name} {self._turns.phase}, version {self._version}, {states}>"


def _check_version(version: Any) -> None:
    if isinstance(version, bool) or not isinstance(version, int):
        raise ValueError(f"version must be an int, got {version!r}")


def _check_source(source: Any) -> None:
    if not all(callable(getattr(source, method, None)) for method in ("manifest", "tensors")):
        raise ValueError(
            f"source must have manifest() and tensors(), got {source!r:.200}: wrap a module in ModuleSource, "
            "a dict in StateDictSource, an iterable in IterableSource"
        )


def _pause_mode(mode: PauseMode | str) -> PauseMode:
    return PauseMode(one_of("pause_mode", mode, tuple(str(m) for m in PauseMode)))
