"""The update groups that an engine, or one rank of it, is a member of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future

import torch

from async_wsync.engines.receiving.group_membership import GroupMembership, done_future
from async_wsync.errors import EngineFailed
from async_wsync.types import Call, GroupSpec

__all__ = ["GroupMemberships"]


class GroupMemberships:
    """By group name; ``changed`` guards them. A group is left for good: no other one has its name.

    ``member``: what errors call us. ``num_ranks``: all of our engine's. ``device``: where the model is; asked for
    only if NCCL is to receive there. ``most``: as many are kept, as dead sources can't always be told from live ones;
    of more, those joined first are left if they are idle.
    """

    def __init__(
        self,
        changed: threading.Condition,
        *,
        member: str,
        num_ranks: int = 1,
        device: Callable[[], torch.device],
        most: int = 64,
    ) -> None:
        self._changed = changed
        self._member = member
        self._num_ranks = num_ranks
        self._device = device
        self._most = most
        self._by_name: dict[str, GroupMembership] = {}
        self._leaving: set[Future[None]] = set()

    @property
    def names(self) -> set[str]:
        with self._changed:
            return set(self._by_name)

    @property
    def leaving(self) -> set[Future[None]]:
        """Done as the threads of groups that were left end."""
        with self._changed:
            return set(self._leaving)

    def get(self, group: str) -> GroupMembership | None:
        with self._changed:
            return self._by_name.get(group)

    def owns(self, group: str, source: str) -> bool:
        """Whether ``source`` had us join ``group``."""
        membership = self.get(group)
        return membership is not None and membership.source == source

    def any_unusable(self, groups: Collection[str]) -> bool:
        with self._changed:
            return any(m.unusable for name, m in self._by_name.items() if name in groups)

    def join(self, call: Call, spec: GroupSpec, rank: int) -> Future[None]:
        """Join as ``rank``, and leave groups that no update will use any more. If joining fails, so has the group.

        EngineFailed for a group that was joined before, or a rank outside of it.
        """
        if not 1 <= rank < spec.world_size:
            raise EngineFailed(f"rank {rank} of {self._member} is not in a group of {spec.world_size}")
        with self._changed:
            if spec.name in self._by_name:
                raise EngineFailed(f"group {spec.name} was joined already")
            self._make_room(call.source)
            membership = GroupMembership(
                spec,
                rank,
                source=call.source,
                fence=call.fence,
                member=self._member,
                num_ranks=self._num_ranks,
                device=self._device() if spec.backend == "nccl" else None,
            )
            self._by_name[spec.name] = membership
        joining = membership.join()
        joining.add_done_callback(lambda done: self._leave(membership) if done.exception() else None)
        return joining

    def _make_room(self, joining: str) -> None:
        """Leave the groups that are over now that the source ``joining`` builds a new one; of too many, idle ones.

        The engines of a dead source's group stay connected with each other, so one lost member must do. NCCL cannot
        tell, and its communicators hold much memory: there one of each source must do.
        """
        members = list(self._by_name.values())
        over = [m for m in members if m.unusable or (m.source == joining and m.spec.backend == "nccl")]
        idle = [m for m in members if m not in over and not m.busy]
        too_many = max(0, len(members) - len(over) - self._most + 1)
        for membership in [*over, *idle[:too_many]]:
            self._leave(membership)

    def leave(self, group: str) -> Future[None]:
        """Break off what is under way in ``group`` and leave it; an unknown group is left already."""
        membership = self.get(group)
        return done_future() if membership is None else self._leave(membership)

    def _leave(self, membership: GroupMembership) -> Future[None]:
        with self._changed:
            if self._by_name.get(membership.spec.name) is membership:
                del self._by_name[membership.spec.name]
            if membership.busy:
                membership.abort()
            closing = membership.close()
            self._leaving.add(closing)
        closing.add_done_callback(self._left)
        return closing

    def _left(self, closing: Future[None]) -> None:
        with self._changed:
            self._leaving.discard(closing)

    def abort(self, group: str) -> Future[None]:
        """Break ``group``; done once nothing of it can write any more."""
        membership = self.get(group)
        if membership is None:
            return done_future()
        membership.abort()
        return membership.when_idle()

    def abort_busy(self, *, below: int | None = None) -> list[GroupMembership]:
        """Break the groups that are receiving (with ``below``, under a lower fence only), and return them."""
        with self._changed:
            busy = [m for m in self._by_name.values() if m.busy and (below is None or m.fence < below)]
            for membership in busy:
                membership.abort()
        return busy

    def close(self) -> None:
        """Break and leave all groups."""
        with self._changed:
            members = list(self._by_name.values())
        for membership in members:
            membership.abort()
            self._leave(membership)
