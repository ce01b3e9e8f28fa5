"""A worker's seats in update groups, and the outcomes of its long requests."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

import torch

from async_wsync.engines.seat import GroupSeat
from async_wsync.errors import EngineFailed
from async_wsync.types import Call, GroupSpec

__all__ = ["Outcomes", "Seats"]

_OUTCOMES_KEPT = 256
_MAX_SEATS = 16  # trainers that died leave theirs behind


class Outcomes:
    """Replies by request id; None while a request is under way. ``changed`` is notified of every one."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._outcomes: OrderedDict[str, dict[str, Any] | None] = OrderedDict()

    def __contains__(self, ticket: object) -> bool:
        with self._changed:
            return ticket in self._outcomes

    def __getitem__(self, ticket: str) -> dict[str, Any] | None:
        with self._changed:
            return self._outcomes[ticket]

    def open(self, ticket: str) -> None:
        with self._changed:
            self._outcomes.setdefault(ticket, None)

    def settle(self, ticket: str, outcome: dict[str, Any]) -> None:
        with self._changed:
            self._outcomes[ticket] = outcome
            self._outcomes.move_to_end(ticket)
            while len(self._outcomes) > _OUTCOMES_KEPT:
                self._outcomes.popitem(last=False)
            self._changed.notify_all()


class Seats:
    """By group name. ``rank``: this worker's within its engine of ``num_ranks``. ``device``: where its model is."""

    def __init__(
        self, changed: threading.Condition, *, rank: int, num_ranks: int, name: str, device: torch.device
    ) -> None:
        self._device = device
        self._changed = changed
        self._rank = rank
        self._num_ranks = num_ranks
        self._member = f"{name} rank {rank}"
        self._seats: dict[str, GroupSeat] = {}

    def get(self, group: str) -> GroupSeat | None:
        with self._changed:
            return self._seats.get(group)

    def of(self, groups: Collection[str]) -> list[GroupSeat]:
        with self._changed:
            return [seat for name, seat in self._seats.items() if name in groups]

    def busy(self, *, below: int | None = None) -> list[GroupSeat]:
        """Those that are receiving; with ``below``, under a lower fence only."""
        with self._changed:
            seats = list(self._seats.values())
        return [seat for seat in seats if seat.busy and (below is None or seat.fence < below)]

    def join(self, call: Call, spec: GroupSpec, *, rank_offset: int) -> Future[None]:
        rank = rank_offset + self._rank
        if not 1 <= rank < spec.world_size:
            raise EngineFailed(f"rank {rank} of worker {self._rank} is not in a group of {spec.world_size}")
        with self._changed:
            seats = list(self._seats.values())
        if any(seat.spec.name == spec.name for seat in seats):
            raise EngineFailed(f"group {spec.name} was joined already")
        over = [s for s in seats if s.useless or (s.source == call.source and spec.backend == "nccl")]
        idle = [s for s in seats if s not in over and not s.busy]
        for old in [*over, *idle[: max(0, len(seats) - _MAX_SEATS)]]:
            self.dismiss(old)
        seat = GroupSeat(
            spec,
            rank,
            source=call.source,
            fence=call.fence,
            member=self._member,
            num_ranks=self._num_ranks,
            device=self._device,
        )
        with self._changed:
            self._seats[spec.name] = seat
        return seat.join()

    def dismiss(self, seat: GroupSeat) -> Future[None]:
        with self._changed:
            self._seats.pop(seat.spec.name, None)
        if seat.busy:
            seat.abort()
        return seat.close()

    def close(self) -> None:
        with self._changed:
            seats = list(self._seats.values())
        for seat in seats:
            seat.abort()
            self.dismiss(seat)
