"""A worker's memberships in update groups, and the outcomes of its long requests."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

import torch

from async_wsync.engines.receiving.group_membership import GroupMembership
from async_wsync.errors import EngineFailed
from async_wsync.types import Call, GroupSpec

__all__ = ["GroupMemberships", "Outcomes"]

_OUTCOMES_KEPT = 256
_MAX_SEATS = 16  # trainers that died leave theirs behind


class Outcomes:
    """Replies by request id; None while a request is under way. ``changed`` is notified of every one."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._outcomes: OrderedDict[str, dict[str, Any] | None] = OrderedDict()

    def __contains__(self, request_id: object) -> bool:
        with self._changed:
            return request_id in self._outcomes

    def __getitem__(self, request_id: str) -> dict[str, Any] | None:
        with self._changed:
            return self._outcomes[request_id]

    def open(self, request_id: str) -> None:
        with self._changed:
            self._outcomes.setdefault(request_id, None)

    def settle(self, request_id: str, outcome: dict[str, Any]) -> None:
        with self._changed:
            self._outcomes[request_id] = outcome
            self._outcomes.move_to_end(request_id)
            while len(self._outcomes) > _OUTCOMES_KEPT:
                self._outcomes.popitem(last=False)
            self._changed.notify_all()


class GroupMemberships:
    """By group name. ``rank``: this worker's within its engine of ``num_ranks``. ``device``: where its model is."""

    def __init__(
        self, changed: threading.Condition, *, rank: int, num_ranks: int, name: str, device: torch.device
    ) -> None:
        self._device = device
        self._changed = changed
        self._rank = rank
        self._num_ranks = num_ranks
        self._member = f"{name} rank {rank}"
        self._memberships: dict[str, GroupMembership] = {}

    def get(self, group: str) -> GroupMembership | None:
        with self._changed:
            return self._memberships.get(group)

    def of(self, groups: Collection[str]) -> list[GroupMembership]:
        with self._changed:
            return [membership for name, membership in self._memberships.items() if name in groups]

    def busy(self, *, below: int | None = None) -> list[GroupMembership]:
        """Those that are receiving; with ``below``, under a lower fence only."""
        with self._changed:
            memberships = list(self._memberships.values())
        return [
            membership for membership in memberships if membership.busy and (below is None or membership.fence < below)
        ]

    def join(self, call: Call, spec: GroupSpec, *, rank_offset: int) -> Future[None]:
        rank = rank_offset + self._rank
        if not 1 <= rank < spec.world_size:
            raise EngineFailed(f"rank {rank} of worker {self._rank} is not in a group of {spec.world_size}")
        with self._changed:
            memberships = list(self._memberships.values())
        if any(membership.spec.name == spec.name for membership in memberships):
            raise EngineFailed(f"group {spec.name} was joined already")
        over = [s for s in memberships if s.useless or (s.source == call.source and spec.backend == "nccl")]
        idle = [s for s in memberships if s not in over and not s.busy]
        for old in [*over, *idle[: max(0, len(memberships) - _MAX_SEATS)]]:
            self.dismiss(old)
        membership = GroupMembership(
            spec,
            rank,
            source=call.source,
            fence=call.fence,
            member=self._member,
            num_ranks=self._num_ranks,
            device=self._device,
        )
        with self._changed:
            self._memberships[spec.name] = membership
        return membership.join()

    def dismiss(self, membership: GroupMembership) -> Future[None]:
        with self._changed:
            self._memberships.pop(membership.spec.name, None)
        if membership.busy:
            membership.abort()
        return membership.close()

    def close(self) -> None:
        with self._changed:
            memberships = list(self._memberships.values())
        for membership in memberships:
            membership.abort()
            self.dismiss(membership)
