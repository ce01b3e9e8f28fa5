"""What a `WeightReceiver` and a worker of vLLM have in common: groups, fences, requests and the open update."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from async_wsync.engines.receiving.admission import Admission
from async_wsync.engines.receiving.group_membership import GroupMembership
from async_wsync.engines.receiving.group_memberships import GroupMemberships
from async_wsync.engines.receiving.request_log import RequestLog
from async_wsync.engines.receiving.weight_state import Part, Session, WeightState
from async_wsync.errors import EngineFailed
from async_wsync.types import BucketSpec, Call, UpdateSpec

__all__ = ["IncomingBucket", "ReceivingEnd"]


@dataclass(frozen=True, slots=True, eq=False)
class IncomingBucket:
    """A bucket that is to be received within ``timeout`` seconds."""

    membership: GroupMembership
    session: Session
    part: Part
    bucket: BucketSpec
    timeout: float

    def receive_into(self, buffers: Sequence[torch.Tensor]) -> None:
        """In the group's thread only. EngineFailed with ``is_collective`` if the broadcast breaks."""
        self.membership.broadcast(buffers, self.timeout)


class ReceivingEnd:
    """One engine's end of updates, or one rank's. ``changed`` guards all state and is notified of its changes.

    It is never held while anything blocks. The arguments are those of `GroupMemberships`.
    """

    def __init__(self, *, member: str, num_ranks: int = 1, device: Callable[[], torch.device]) -> None:
        self.incarnation = uuid.uuid4().hex
        self.changed = threading.Condition(threading.RLock())
        self.weights = WeightState()
        self.requests = RequestLog(self.changed)
        self.memberships = GroupMemberships(self.changed, member=member, num_ranks=num_ranks, device=device)
        self.admission = Admission(self.changed, self.memberships, incarnation=self.incarnation)

    # ------------------------------------------------------------------------ groups

    def leave(self, group: str) -> Future[None]:
        """Leave ``group``, and close an update that it has not sent all of."""
        self._close_update_if(lambda part: part.update.group == group and bool(part.missing))
        return self.memberships.leave(group)

    def abort(self, group: str) -> Future[None]:
        """Break ``group``, and close an update that it has a part of; done once nothing of it can write any more."""
        self._close_update_if(lambda part: part.update.group == group)
        return self.memberships.abort(group)

    def _close_update_if(self, lost: Callable[[Part], bool]) -> None:
        """Close the open update if one of its parts can't be completed any more."""
        with self.changed:
            session = self.weights.session
            if session is not None and any(lost(part) for part in session.parts.values()):
                self.weights.break_off()
                self.changed.notify_all()

    # ------------------------------------------------------------------------ the open update

    def begin(self, call: Call, update: UpdateSpec, targets: Mapping[str, torch.Tensor]) -> None:
        """Open ``update``, or add the caller's part to it. EngineFailed without a group to receive it from."""
        with self.changed:
            self.admission.check_fence(call)
            membership = self.memberships.get(update.group)
            if update.buckets and (membership is None or membership.aborted):
                raise EngineFailed(f"group {update.group} is {'not joined' if membership is None else 'broken'}")
            part = self.weights.begin(update, call.source, targets)
            if membership is not None:
                membership.fence = call.fence
                membership.expect(list(part.buckets))

    def receive(self, call: Call, update_id: str, index: int, job: Callable[[IncomingBucket], None]) -> Future[None]:
        """Run ``job`` in the group's thread once it is this bucket's turn. If it fails, so has the update."""
        with self.changed:
            session, part = self.weights.part(update_id, call.source)
            membership = self.memberships.get(part.update.group)
            if membership is None or index not in part.buckets:
                raise EngineFailed(f"no bucket {index}, or group {part.update.group} was left")
            self.admission.check_fence(call)
            membership.fence = call.fence
            incoming = IncomingBucket(membership, session, part, part.buckets[index], call.timeout)

            def run() -> None:
                try:
                    job(incoming)
                except Exception:
                    self.fail(incoming)
                    raise

            # Started under the condition, so that whoever brings a higher fence finds it and breaks it off.
            return membership.receive(index, run)

    def will_write(self, incoming: IncomingBucket, names: Iterable[str]) -> None:
        """From now on ``names`` may hold a mix. EngineFailed if the update was closed meanwhile."""
        with self.changed:
            self.weights.check_open(incoming.session)
            self.weights.suspect(names)

    def arrived(self, incoming: IncomingBucket) -> None:
        """All of the bucket is in the model. EngineFailed if the update was closed meanwhile."""
        with self.changed:
            self.weights.check_open(incoming.session)
            incoming.part.arrived.add(incoming.bucket.index)

    def fail(self, incoming: IncomingBucket) -> None:
        """Break the bucket's group, whose members no longer agree on what comes next, and close its update."""
        incoming.membership.abort()
        with self.changed:
            self.weights.break_off(incoming.session)
            self.changed.notify_all()

    def break_off(self) -> list[GroupMembership]:
        """Close the open update, if any, and break the groups that are receiving, which are returned."""
        with self.changed:
            self.weights.break_off()
            self.changed.notify_all()
            return self.memberships.abort_busy()

    def publish(self, call: Call, version: int) -> None:
        """What the ended update left here is ``version``."""
        with self.changed:
            self.weights.publish(version, call.fence)
            self.changed.notify_all()
