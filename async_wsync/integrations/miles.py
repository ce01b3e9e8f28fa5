"""Drop-in for the per-bucket weight broadcast of slime, miles and relatives: awaited, and safe to fail.

Those frameworks send one bucket with a blocking function: poll the lock actor's ``acquire``, call
``update_weights_from_distributed.remote(...)`` on every engine, ``dist.broadcast`` each tensor from rank 0, wait,
``ray.get`` the calls, clear the list, release the lock, move the bar. `update_bucket` does the same, and stays
right when any of it fails, hangs or is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist

from async_wsync import arguments
from async_wsync.engines.replies import failure_in, looks_collective, short
from async_wsync.errors import BroadcastFailed, EngineDied, EngineFailed, EngineTimeout
from async_wsync.groups.source_end import UpdateGroup
from async_wsync.integrations.own_errors import as_its_cause
from async_wsync.integrations.quarantine import quarantine, refuse_quarantined
from async_wsync.lock import PolledLock
from async_wsync.runtime.cancellation import finish, settle
from async_wsync.runtime.cuda_streams import SideStream, queued_by_now
from async_wsync.runtime.object_refs import RemoteDied, RemoteRaised, await_ref, submit
from async_wsync.runtime.threads import DaemonWorker, start_daemon
from async_wsync.types import Timeouts

__all__ = ["update_bucket"]

logger = logging.getLogger("async_wsync")

#: Seconds that a broadcast gets to end by itself once an engine failed, or once all engines say they have it.
_GRACE, _EARLY = 0.25, 5.0


class _Bar(Protocol):
    def update(self, n: int, /) -> Any: ...


async def update_bucket(
    group_name: str,
    group: dist.ProcessGroup | UpdateGroup,
    weight_version: int | str,
    rollout_engines: Sequence[Any],
    converted_named_tensors: list[tuple[str, torch.Tensor]],
    *,
    selector: str = "all",
    lock: Any,
    pbar: _Bar | None = None,
    timeouts: Timeouts | None = None,
) -> None:
    """Broadcast one bucket of named tensors from rank 0 of ``group`` to all ``rollout_engines``, under ``lock``.

    ``rollout_engines`` are Ray actor handles with SGLang's method ``update_weights_from_distributed(names, dtypes,
    shapes, selector, group_name, weight_version)``. ``lock`` is an actor handle with ``acquire() -> bool`` and
    ``release()``, a `BroadcastLock`, or None for a lone source. ``timeouts``: ``lock`` bounds the wait for the lock,
    ``bucket`` the engines' work, ``drain`` the wait for the rest once something failed.

    On success the list is cleared and the bar moves by one. On any failure the list is kept, the bar stays, and the
    first error is raised: what the set-up of the broadcast raised, or `EngineFailed` (`EngineDied`, `EngineTimeout`)
    that names the engine, with the others' outcomes as notes and in ``outcomes``. If the engine raised, it is also an
    instance of the class of what it raised, as it was with ``ray.get``. A cancelled call finishes what it has sent,
    then raises CancelledError. In each case the lock is released once, after every engine call has settled or, after
    ``drain``, its engine is quarantined: it stands in ``unsettled`` of the error, and until that call has an outcome
    this process refuses every further bucket for it, with `EngineTimeout` and before anything is sent.

    After a failure ``group`` may be out of step at its members: build a new one under a new name before the next call,
    unless every engine is known to have taken part. An `UpdateGroup` is broken up at once when an engine fails, which
    frees the engines that wait in it; a plain gloo group can't be, and its members wait for their own timeout, at
    most ``drain`` seconds of which are awaited here.
    """
    arguments.text("group_name", group_name)
    arguments.kind("timeouts", timeouts, Timeouts, none=True)
    if isinstance(weight_version, bool) or not isinstance(weight_version, int | str):
        raise ValueError(f"weight_version must be an int or a string, got {weight_version!r}")
    limits = timeouts or Timeouts()
    named = _checked(converted_named_tensors)
    refuse_quarantined(rollout_engines)
    if not named:
        return
    if not rollout_engines:
        raise ValueError("rollout_engines is empty")
    told = {
        "names": [name for name, _ in named],
        "dtypes": [tensor.dtype for _, tensor in named],
        "shapes": [tensor.shape for _, tensor in named],
        "selector": selector,
        "group_name": group_name,
        "weight_version": str(weight_version),
    }

    async def send() -> None:
        await _Bucket(group, rollout_engines, [tensor for _, tensor in named], limits).send(told)
        converted_named_tensors.clear()
        _advance(pbar)

    async with _held(lock, label=f"{group_name} version {weight_version}", timeout=limits.lock):
        await finish(send(), name=f"a bucket of {group_name}")


class _Bucket:
    """One bucket under way: the engines' replies and the broadcast, raced and then settled."""

    def __init__(self, group: Any, engines: Sequence[Any], tensors: Sequence[torch.Tensor], limits: Timeouts) -> None:
        self.group = group
        self.engines = engines
        self.tensors = tensors
        self.limits = limits
        self.replies: dict[str, asyncio.Task[None]] = {}
        self.calls: dict[str, tuple[Any, Any]] = {}  # each engine, and the reference to its answer
        self.unsettled: tuple[str, ...] = ()
        self.failures: list[EngineFailed] = []  # in the order of their arrival
        self.setting_up = True

    async def send(self, arguments: dict[str, Any]) -> None:
        worker = DaemonWorker("wsync-bucket")
        sending: asyncio.Task[None] | None = None
        try:
            for index, engine in enumerate(self.engines):
                name = f"rollout_engines[{index}] {engine!r}"
                ref = submit(engine.update_weights_from_distributed, **arguments)
                self.calls[name] = engine, ref
                self.replies[name] = _start(self._reply(name, ref))
            sending = _start(self._broadcast(worker))
            await self._all_or_first_failure(sending)
        except Exception as first:
            # A broadcast that can't be set up is the caller's to know as it is; later errors explain each other.
            error = first if self.setting_up else None
            await self._wind_up(sending)
            raise self._with_outcomes(error or self._verdict(first))  # noqa: B904 - it keeps the cause it came with
        finally:
            worker.close()

    async def _reply(self, name: str, ref: Any) -> None:
        try:
            try:
                reply = await await_ref(ref, what=f"{name}.update_weights_from_distributed")
            except RemoteDied as error:
                raise EngineDied(f"{name} died: {short(error)}", engine=name, phase="receive") from error
            except RemoteRaised as error:
                cause = getattr(error, "cause", None) or error
                raise EngineFailed(
                    f"{name} failed: {type(cause).__name__}: {short(cause)}",
                    engine=name,
                    phase="receive",
                    is_collective=looks_collective(cause),
                ) from cause
            failure = failure_in(reply)
            if failure is not None:
                raise EngineFailed(
                    f"{name} did not take the bucket: {failure}",
                    engine=name,
                    phase="receive",
                    is_collective=looks_collective(failure),
                )
        except EngineFailed as failed:
            self.failures.append(failed)
            raise

    async def _broadcast(self, worker: DaemonWorker) -> None:
        side = SideStream(self.tensors[0].device)
        tensors = await worker.run(_sendable, self.tensors, side, queued_by_now(side.device))
        if isinstance(self.group, UpdateGroup):
            future: Any = self.group.broadcast(tensors, settled=True)
            self.setting_up = False
            await future
            return
        works = await worker.run(_launch, self.group, tensors, side)
        self.setting_up = False
        try:
            await worker.run(_wait_all, works, side)
        except Exception as error:
            raise BroadcastFailed(f"the broadcast failed: {short(error)}") from error

    async def _all_or_first_failure(self, sending: asyncio.Task[None]) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.limits.bucket
        waiting: set[asyncio.Task[None]] = {sending, *self.replies.values()}
        while waiting:
            left = max(deadline - loop.time(), 0.0)
            limit = min(left, _EARLY) if waiting == {sending} else left
            done, waiting = await asyncio.wait(waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if not done:
                raise self._late()

    def _late(self) -> EngineFailed:
        silent = [name for name, task in self.replies.items() if not task.done()]
        if not silent:
            return EngineFailed(
                f"{', '.join(self.replies)} answered success, but the broadcast is not over: an engine answered before "
                "it had received the tensors",
                engine=next(iter(self.replies)) if len(self.replies) == 1 else "",
                phase="receive",
            )
        return EngineTimeout(
            f"no answer from {', '.join(silent)} within {self.limits.bucket:g} s (Timeouts.bucket)",
            engine=silent[0],
            phase="receive",
            field="bucket",
            seconds=self.limits.bucket,
        )

    async def _wind_up(self, sending: asyncio.Task[None] | None) -> None:
        """Let every call that was sent come to its end; whoever waits for us in the group is freed first."""
        if sending is not None and not sending.done():
            await asyncio.wait([sending], timeout=_GRACE)
        if sending is None or not sending.done() or sending.exception() is not None:
            _break_up(self.group)
        _, silent = await settle(self.replies.values(), timeout=self.limits.drain)
        for task in [*silent, *([sending] if sending is not None else [])]:
            task.cancel()  # ends our wait only: remote calls and collectives go on
        self.unsettled = tuple(name for name, task in self.replies.items() if task in silent)
        for name in self.unsettled:
            engine, ref = self.calls[name]
            quarantine(engine, ref.future())

    def _verdict(self, first: Exception) -> Exception:
        """The failure that explains the others: a broken broadcast is seen by all, its culprit knows why."""
        own = [failed for failed in self.failures if not failed.is_collective]
        collateral = isinstance(first, BroadcastFailed) or (isinstance(first, EngineFailed) and first.is_collective)
        return own[0] if collateral and own else first

    def _with_outcomes(self, error: Exception) -> Exception:
        outcomes = {name: _outcome(task) for name, task in self.replies.items()}
        if isinstance(error, EngineFailed):
            error = as_its_cause(error)
        error.outcomes, error.unsettled = outcomes, self.unsettled  # type: ignore[attr-defined]
        for name, outcome in outcomes.items():
            if not (isinstance(error, EngineFailed) and error.engine == name):
                error.add_note(f"{name}: {outcome}")
        return error


def _checked(named: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """A copy of the list; ValueError for what a broadcast would garble or can't send."""
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name!r} is not a tensor but {type(tensor).__name__}")
        if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
            raise ValueError(f"{name!r} has no plain storage to send: {tensor.layout} on {tensor.device}")
    return list(named)


def _held(lock: Any, *, label: str, timeout: float) -> AbstractAsyncContextManager[Any]:
    if lock is None:
        return nullcontext()
    holder: AbstractAsyncContextManager[Any]
    holder = (lock if hasattr(lock, "hold") else PolledLock(lock)).hold(label=label, timeout=timeout)
    return holder


def _start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(lambda done: None if done.cancelled() else (done.exception(), None)[1])
    return task


def _sendable(tensors: Sequence[torch.Tensor], side: SideStream, made: Sequence[Any]) -> list[torch.Tensor]:
    # gloo sends the storage of a non-contiguous tensor as it lies, without a word.
    with side.current(after=made):
        sendable = [tensor.detach().contiguous() for tensor in tensors]
    side.synchronize()
    return sendable


def _launch(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], side: SideStream) -> list[Any]:
    with side.current():
        return [dist.broadcast(tensor, 0, group=group, async_op=True) for tensor in tensors]


def _wait_all(works: list[Any], side: SideStream) -> None:
    with side.current():
        for work in works:
            work.wait()
    side.synchronize()


def _break_up(group: Any) -> None:
    if isinstance(group, UpdateGroup):
        group.abort()
    elif hasattr(group, "abort"):
        start_daemon(_abort_quietly, group, name="wsync-abort")  # NCCL's abort may block


def _abort_quietly(group: Any) -> None:
    try:
        group.abort()
    except Exception as error:
        logger.debug("breaking up a process group failed: %r", error)


def _outcome(task: asyncio.Task[None]) -> str:
    if not task.done() or task.cancelled():
        return "no answer yet: it may still be waiting in the broadcast, and is quarantined"
    error = task.exception()
    return "took the bucket" if error is None else short(error)


def _advance(pbar: _Bar | None) -> None:
    try:
        if pbar is not None:
            pbar.update(1)
    except Exception:
        logger.warning("the progress bar failed", exc_info=True)
