"""The engine's end of an update group: blocking, for the thread in which an engine receives."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from async_wsync.errors import BroadcastFailed
from async_wsync.groups.gloo import wait_for_gloo
from async_wsync.groups.nccl import wait_until_completed
from async_wsync.groups.process_group import ProcessGroup
from async_wsync.groups.socket_watch import SocketWatch
from async_wsync.groups.store import first_line
from async_wsync.runtime.cuda_streams import queued_by_now
from async_wsync.runtime.threads import pause
from async_wsync.types import GroupSpec

__all__ = ["GroupMember"]

logger = logging.getLogger(__name__)

#: Seconds that a failed receive waits for NCCL to leave the caller's tensors alone.
NCCL_ABORT_LIMIT = 30.0


class GroupMember:
    """One engine rank's membership. `broadcast` belongs to one thread; everything else may be called from any."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._stop = threading.Event()
        self._busy = threading.Lock()
        self._sockets = SocketWatch(group.fds)

    def __repr__(self) -> str:
        state = "closed" if self._group.dropped else "aborted" if self.aborted else "ready"
        if self._busy.locked():
            state += ", receiving"
        spec = self.spec
        return f"<GroupMember {spec.name!r} rank {self.rank} of {spec.world_size}, {spec.backend}, {state}>"

    @property
    def spec(self) -> GroupSpec:
        return self._group.spec

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def device(self) -> torch.device:
        """Where tensors must be to be received into."""
        return self._group.device

    @property
    def aborted(self) -> bool:
        """True once the group is broken: by `abort`, or by a broadcast that failed. It is never repaired."""
        return self._group.aborted

    @property
    def incomplete(self) -> bool:
        """True where a connection to any member is gone. Such a group is never repaired. NCCL cannot tell: False."""
        return self._sockets.sees and not self._sockets.all_open

    def broadcast(self, tensors: Sequence[torch.Tensor], timeout: float | None = None) -> None:
        """Receive into ``tensors``, in order, from rank 0; blocks until all have arrived.

        Each is on `device`, contiguous, of a dtype that the backend knows (`torch.uint8` always is), and of exactly the
        sent number of bytes: gloo checks nothing. ``timeout`` in seconds for all of them, at most the group's own.
        Raises `BroadcastFailed`; the group is broken up then, here and for the members connected with us. On CUDA the
        receive first waits, on the GPU, for what this thread has queued on its current stream.
        """
        seconds = self.spec.timeout if timeout is None else min(timeout, self.spec.timeout)
        started = time.monotonic()
        with self._busy, self._group.entered():
            works: list[Any] = []
            received = False
            try:
                self._group.start(tensors, works, after=queued_by_now(self.device), timeout=seconds)
                self._wait(works, started + seconds)
                received = True
            except Exception as error:
                traceback.clear_frames(error.__traceback__)
                who, after = f"rank {self.rank} of group {self.spec.name}", time.monotonic() - started
                raise BroadcastFailed(
                    f"{who} received nothing more after {after:.2f} s: {first_line(error)}", group=self.spec.name
                ) from error
            finally:
                if not received:
                    self.abort()
                    self._let_go(works)
                    self._group.leave_behind(works)
                # Works are freed here, not with a traceback later: that goes through C++, which must not happen while
                # the interpreter ends (see `ProcessGroup.entered`).
                works.clear()

    def abort(self) -> None:
        """Break the group up at once. A blocked `broadcast` fails, here and at the members connected with us."""
        self._stop.set()
        self._group.abort()

    def close(self) -> None:
        """Leave the group: a blocked `broadcast` fails, its sockets and threads go. Idempotent, never blocks."""
        if self._busy.locked():
            self.abort()
        self._stop.set()
        self._group.drop()

    def _wait(self, works: list[Any], deadline: float) -> None:
        if self.spec.backend == "nccl":
            wait_until_completed(works, seconds=deadline - time.monotonic(), stop=self._stop)
            return
        for work in works:
            wait_for_gloo(work, stop=self._stop.is_set, sockets=self._sockets, deadline=deadline)

    def _let_go(self, works: list[Any]) -> None:
        """Return once no collective can write into the caller's tensors any more: they are over, or all sockets are
        closed. After an abort that takes milliseconds; where sockets can't be seen, up to the works' own timeout. With
        NCCL it is the GPU that must be done: the communicator's end is what stops it."""
        if self.spec.backend == "nccl":
            until = time.monotonic() + NCCL_ABORT_LIMIT
            while not self._group.idle and time.monotonic() < until:
                pause(0.002)
            return
        for work in works:
            while not work.is_completed() and not self._sockets.all_closed:
                pause(0.002)
