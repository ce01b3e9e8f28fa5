"""The lock's messages as plain lists. Dataclasses would be pickled, at 0.2 ms each; lists of plain values are not."""

from __future__ import annotations

from typing import Any

from async_wsync.lock.state import Granted, LeaseOver, Renewed, Waiting, Withdrawn
from async_wsync.types import Requester

__all__ = ["Reply", "pack", "pack_poll", "unpack", "unpack_poll"]

Reply = Granted | Waiting | Withdrawn | Renewed | LeaseOver


def pack_poll(
    claim: str, who: Requester, ttl: float | None, fence_seen: int, wake_up_at: tuple[str, int] | None
) -> list[Any]:
    return [claim, ttl, fence_seen, wake_up_at, who.label, who.host, who.pid, who.actor_id, who.client]


def unpack_poll(poll: list[Any]) -> tuple[str, Requester, float | None, int, tuple[str, int] | None]:
    claim, ttl, fence_seen, wake_up_at, label, host, pid, actor_id, client = poll
    return (
        claim,
        Requester(label=label, host=host, pid=pid, actor_id=actor_id, client=client),
        ttl,
        fence_seen,
        wake_up_at,
    )


def pack(reply: Reply) -> list[Any]:
    match reply:
        case Granted(fence=fence, ttl=ttl):
            return ["granted", fence, ttl]
        case Waiting(position=position, retry_after=retry_after, holder=holder, quarantine_left=left):
            return ["waiting", position, retry_after, holder, left]
        case Renewed(ttl=ttl):
            return ["renewed", ttl]
        case Withdrawn(reason=reason):
            return ["withdrawn", reason]
        case LeaseOver(reason=reason):
            return ["over", reason]


def unpack(packed: list[Any]) -> Reply:
    match packed:
        case ["granted", fence, ttl]:
            return Granted(fence=fence, ttl=ttl)
        case ["waiting", position, retry_after, holder, left]:
            return Waiting(position=position, retry_after=retry_after, holder=holder, quarantine_left=left)
        case ["renewed", ttl]:
            return Renewed(ttl=ttl)
        case ["withdrawn", reason]:
            return Withdrawn(reason=reason)
        case ["over", reason]:
            return LeaseOver(reason=reason)
    raise ValueError(f"not a reply of a lock server of this version: {packed!r}")
