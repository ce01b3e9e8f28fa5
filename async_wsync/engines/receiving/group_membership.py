"""An engine's membership in one update group, and the thread that does all of its collectives.

The thread runs join, receives and close in order. Whoever must know that nothing of this group can touch
a parameter any more aborts the membership and waits for `when_idle`: that future is done only once the thread has
really left the collective it was in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from async_wsync.errors import EngineFailed
from async_wsync.groups.member_end import GroupMember
from async_wsync.groups.nccl import wire_device
from async_wsync.groups.rendezvous import join_group
from async_wsync.runtime.threads import DaemonWorker
from async_wsync.types import GroupSpec

__all__ = ["GroupMembership", "done_future"]


def done_future() -> Future[None]:
    """A future that is over."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


class GroupMembership:
    """One rank of one group. ``fence``: the highest of the calls that used it. ``num_ranks``: all of its engine's.
    ``device``: the model's, by default the current one. The attribute ``device`` is where buffers must lie: on the CPU
    for gloo, on a CUDA device for NCCL.

    ValueError for NCCL where there is no CUDA.
    """

    def __init__(
        self,
        spec: GroupSpec,
        rank: int,
        *,
        source: str,
        fence: int,
        member: str,
        num_ranks: int = 1,
        device: torch.device | None = None,
    ) -> None:
        self.device = wire_device(spec.backend, device)
        self.spec = spec
        self.rank = rank
        self.source = source
        self.fence = fence
        self._name = member
        self._num_ranks = num_ranks
        self._worker = DaemonWorker(f"wsync-receive-{spec.name}")
        self._lock = threading.RLock()  # a future's callbacks may run in the thread that adds them
        self._joining: Future[None] = Future()
        self._joining_over = False
        self._closing: Future[None] | None = None
        self._member: GroupMember | None = None
        self._aborted = False
        self._order: list[int] = []
        self._waiting: dict[int, tuple[Callable[[], None], Future[None]]] = {}
        self._running = 0

    def __repr__(self) -> str:
        state = "aborted" if self._aborted else "joining" if self._member is None else "joined"
        return f"<GroupMembership {self.spec.name!r} rank {self.rank}, {state}, {self._running} receiving>"

    @property
    def aborted(self) -> bool:
        return self._aborted

    @property
    def busy(self) -> bool:
        """Whether a receive is under way or waits for its turn."""
        with self._lock:
            return self._running > 0 or bool(self._waiting)

    @property
    def unusable(self) -> bool:
        """Whether a member is gone, the source or another engine, and nothing is under way: no update will use it."""
        member = self._member
        return member is not None and member.incomplete and not self.busy

    def join(self) -> Future[None]:
        """Join in the thread. The future fails at once if the membership is given up meanwhile: torch's own part may
        go on for as long as a whole connect, in a store that nobody answers from."""
        self._worker.submit(self._join).add_done_callback(self._joined)
        return self._joining

    def _joined(self, inner: Future[None]) -> None:
        self._conclude_joining(inner.exception())

    def _give_up_joining(self) -> None:
        if self._member is None:
            what = "aborted" if self._aborted else "left"
            message = f"group {self.spec.name} was {what} while it was joined"
            self._conclude_joining(EngineFailed(message, is_collective=True))

    def _conclude_joining(self, error: BaseException | None) -> None:
        """The first to come says how joining ended."""
        with self._lock:
            if self._joining_over:
                return
            self._joining_over = True
        if error is None:
            self._joining.set_result(None)
        else:
            self._joining.set_exception(error)

    def _join(self) -> None:
        self._check_not_aborted()
        member = join_group(self.spec, self.rank, member=self._name, num_ranks=self._num_ranks, device=self.device)
        with self._lock:
            self._member = member
            aborted = self._aborted
        if aborted:
            member.abort()
            member.close()
        self._check_not_aborted()

    def _check_not_aborted(self) -> None:
        if self._aborted:
            raise EngineFailed(f"group {self.spec.name} was aborted while it was joined", is_collective=True)

    def expect(self, order: Sequence[int]) -> None:
        """Buckets will be received in this order, whatever order their calls arrive in."""
        with self._lock:
            self._order = list(order)

    def receive(self, index: int, job: Callable[[], None]) -> Future[None]:
        """Run ``job`` in the thread once all buckets before ``index`` had their turn."""
        future: Future[None] = Future()
        with self._lock:
            if self._aborted or self._member is None:
                raise EngineFailed(f"group {self.spec.name} is {'broken' if self._aborted else 'not joined'}")
            if index not in self._order or index in self._waiting:
                raise EngineFailed(f"bucket {index} is not expected (again); next is {self._order[:1]}")
            self._waiting[index] = (job, future)
            while self._order and self._order[0] in self._waiting:
                self._start(*self._waiting.pop(self._order.pop(0)))
        return future

    def _start(self, job: Callable[[], None], future: Future[None]) -> None:
        # async actors reorder calls, so that a receive may have to wait for an earlier one to arrive.
        self._running += 1

        def over(inner: Future[None]) -> None:
            with self._lock:
                self._running -= 1
            error = inner.exception()
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self._worker.submit(job).add_done_callback(over)

    def broadcast(self, buffers: Sequence[torch.Tensor], timeout: float) -> None:
        """Receive into ``buffers``; in the thread only. EngineFailed with ``is_collective`` if it breaks."""
        member = self._member
        try:
            if member is None or self._aborted:
                raise EngineFailed(f"group {self.spec.name} is broken", is_collective=True)
            member.broadcast(buffers, min(timeout, self.spec.timeout))
        except Exception as error:
            # First of all: nothing may arrive after the failure was told.
            self.abort()
            raise EngineFailed(f"the broadcast broke: {error}", is_collective=True) from error

    def abort(self) -> None:
        """Break off what the thread does, at once; from any thread. The group is dead afterwards."""
        with self._lock:
            self._aborted = True
            waiting, self._waiting, self._order = list(self._waiting.values()), {}, []
            member = self._member
        if member is not None:
            member.abort()
        for _, future in waiting:
            future.set_exception(EngineFailed("broken off before its turn", is_collective=True))
        self._give_up_joining()

    def when_idle(self) -> Future[None]:
        """Done once the thread has left whatever it was doing. A join can't write weights and isn't waited for."""
        with self._lock:
            if self._closing is not None:
                return self._closing
            return done_future() if self._member is None else self._worker.submit(_nothing)

    def close(self) -> Future[None]:
        """Leave the group after what is under way; the thread ends. Idempotent. A join isn't waited for."""
        with self._lock:
            if self._closing is None:
                joined = self._member is not None
                closing = self._worker.submit(self._close)
                self._worker.close()
                self._closing = closing if joined else done_future()
        self._give_up_joining()
        return self._closing

    def _close(self) -> None:
        with self._lock:
            member, self._member, self._aborted = self._member, None, True
        if member is not None:
            member.close()


def _nothing() -> None:
    pass
