"""The source's end of an update group: broadcasts as asyncio futures, abort, bounded close."""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from async_wsync.errors import BroadcastFailed
from async_wsync.groups.gloo import wait_for_gloo
from async_wsync.groups.nccl import wait_until_completed
from async_wsync.groups.process_group import ProcessGroup
from async_wsync.groups.socket_watch import WATCH_INTERVAL, SocketWatch
from async_wsync.groups.store import first_line
from async_wsync.runtime.cuda_streams import queued_by_now
from async_wsync.runtime.foreign_code import as_raised
from async_wsync.runtime.threads import DaemonWorker, wait_done
from async_wsync.types import GroupSpec

__all__ = ["UpdateGroup"]

logger = logging.getLogger(__name__)

#: Seconds that closing waits for the threads of a group that was broken up.
BROKEN_GRACE = 0.5


class UpdateGroup:
    """The source's membership (rank 0). Use it from one event loop."""

    def __init__(self, group: ProcessGroup, worker: DaemonWorker) -> None:
        self._group = group
        self._launcher = worker
        self._stop = threading.Event()
        self._pending: set[_Pending] = set()
        self._waiter = DaemonWorker(f"wait {group.spec.name}")
        self._dropped: Future[None] | None = None
        self._sockets = SocketWatch(group.fds)
        # Whoever forgets to close us must not block: abort frees the threads, a daemon thread drops the group.
        self._finalizer = weakref.finalize(self, _scrap, group, self._stop)
        self._finalizer.atexit = False  # process_group has its own hook

    def __repr__(self) -> str:
        spec = self.spec
        state = "closed" if self._dropped is not None else "aborted" if self.aborted else "ready"
        where = f"{spec.backend}, {spec.world_size} ranks, {spec.master_address}:{spec.master_port}"
        return f"<UpdateGroup {spec.name!r} {state}, {where}, {len(self._pending)} broadcasts pending>"

    @property
    def spec(self) -> GroupSpec:
        return self._group.spec

    @property
    def device(self) -> torch.device:
        """Where tensors must be to be sent."""
        return self._group.device

    @property
    def aborted(self) -> bool:
        """True once the group is broken: by `abort`, or by a broadcast that failed. It is never repaired."""
        return self._group.aborted

    @property
    def num_pending(self) -> int:
        """Broadcasts whose collectives are not over, cancelled and failed ones included."""
        return len(self._pending)

    def broadcast(self, tensors: Sequence[torch.Tensor], *, settled: bool = False) -> asyncio.Future[None]:
        """Start sending ``tensors`` (contiguous, in order, on `device`) to all members; returns at once.

        The future is done when this process may reuse the tensors, which says nothing about the members. It fails
        with `BroadcastFailed`, at the first error; the group is broken up then. The tensors are kept alive until the
        collectives are over, whatever becomes of the future. Keep the group: collected while busy, it is broken up.

        On CUDA the collectives first wait, on the GPU, for all that this thread has queued on its current stream, so
        that what makes the tensors is over; ``settled`` says that it is, and nothing is waited for.
        """
        after = [] if settled else queued_by_now(self.device)
        pending = _Pending(self._group, tensors, self._pending)
        if self._dropped is not None or self.aborted:
            pending.fail(RuntimeError("the group was broken up or closed"))
            return pending.future
        self._pending.add(pending)
        self._group.enter()
        pending.watch(self._sockets)
        if self.spec.backend == "nccl":
            wait = partial(wait_until_completed, seconds=self.spec.timeout, stop=self._stop)
        else:
            wait = partial(_wait_for_all, group=self._group, sockets=self._sockets)
        pending.begin(self._launcher, self._waiter, wait, after)
        return pending.future

    def abort(self) -> None:
        """Break the group up: sync, immediate, idempotent. Pending futures fail; connected members are freed."""
        self._stop.set()
        self._group.abort()
        for pending in list(self._pending):
            pending.fail(RuntimeError("the group was broken up"))

    async def aclose(self, timeout: float = 10.0) -> None:
        """Leave the group and free its sockets and threads, within ``timeout`` seconds; idempotent.

        What is still pending is broken off. What does not end in time is left to a daemon thread, and of a group that
        was broken up not much is expected: gloo may hold on to a transfer that was half-way until its timeout.
        """
        if self._pending:
            self.abort()
        self._stop.set()
        if self._dropped is None:
            self._finalizer.detach()
            self._dropped = self._group.drop()
            self._launcher.close()
            self._waiter.close()
        level = logging.WARNING
        if self.aborted:
            timeout, level = min(timeout, BROKEN_GRACE), logging.DEBUG
        try:
            async with asyncio.timeout(timeout):
                await wait_done(self._dropped)
        except TimeoutError:
            logger.log(level, "group %s did not let go within %g s and was left to itself", self.spec.name, timeout)


class _Pending:
    """One call of `broadcast`: several collectives, one future. Knows nothing of the UpdateGroup, so that a
    forgotten group can be collected."""

    def __init__(self, group: ProcessGroup, tensors: Sequence[torch.Tensor], unfinished: set[_Pending]) -> None:
        self._group = group
        self._unfinished = unfinished
        self._tensors: list[torch.Tensor] | None = list(tensors)
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()
        self.future.add_done_callback(_retrieve)

    def watch(self, sockets: SocketWatch) -> None:
        """Fail as soon as a member's connection is gone: of a send that is half-way gloo does not tell."""
        if self.future.done():
            return
        if not sockets.all_open:
            self._broke(RuntimeError("the connection to a member was lost"))
        else:
            self._loop.call_later(WATCH_INTERVAL, self.watch, sockets)

    def begin(
        self, launcher: DaemonWorker, waiter: DaemonWorker, wait: Callable[[list[Any]], None], after: Sequence[Any]
    ) -> None:
        """Start the collectives in the launcher's thread, where that may block, and ``wait`` for them in the waiter's.
        Whatever either raises ends the future."""
        works: list[Any] = []

        def launched(launch: Future[None]) -> None:
            error = launch.exception()
            if error is None:
                try:
                    waiting = waiter.submit(wait, works)
                    waiting.add_done_callback(lambda done: self._ended(works, done.exception()))
                except RuntimeError as closed:
                    error = closed
            if error is not None:
                self._ended(works, error)

        launcher.submit(self._launch, works, after).add_done_callback(launched)

    def _launch(self, works: list[Any], after: Sequence[Any]) -> None:
        self._group.start(self._tensors or [], works, after=after)

    def _ended(self, works: list[Any], error: BaseException | None) -> None:
        try:
            if error is not None:
                traceback.clear_frames(as_raised(error).__traceback__)
                self._broke(error)
            # Works are freed here, not with a traceback later: see GroupMember.broadcast.
            self._group.leave_behind(works)
        finally:
            works.clear()
            self._tensors = None
            self._hop(self._succeed)
            self._group.leave()

    def _broke(self, error: BaseException) -> None:
        try:
            # After an error the group is dead for all; say so now to whoever is still blocked in it.
            self._group.abort()
        finally:
            self._hop(self.fail, error)

    def _hop(self, fn: Any, *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(fn, *args)
        except RuntimeError:  # the loop is closed: nobody waits any more
            pass

    def _succeed(self) -> None:
        self._unfinished.discard(self)
        if not self.future.done():
            self.future.set_result(None)

    def fail(self, error: BaseException) -> None:
        """On the loop's thread. The first error stands."""
        if self.future.done():
            return
        failed = BroadcastFailed(
            f"the broadcast in group {self._group.spec.name} failed at the source: {first_line(error)}",
            group=self._group.spec.name,
        )
        failed.__cause__ = error
        self.future.set_exception(failed)


def _wait_for_all(works: list[Any], *, group: ProcessGroup, sockets: SocketWatch) -> None:
    for work in works:
        wait_for_gloo(work, stop=lambda: group.aborted, sockets=sockets)


def _retrieve(future: asyncio.Future[None]) -> None:
    # The engines' errors come first, and often nobody asks for ours.
    if not future.cancelled():
        future.exception()


def _scrap(group: ProcessGroup, stop: threading.Event) -> None:
    stop.set()
    group.abort()
    group.drop()
