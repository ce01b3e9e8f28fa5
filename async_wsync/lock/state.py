"""Who holds the lock, who waits, and under which fence: a state machine without clock, Ray or randomness.

``now`` is a monotonic time in seconds that never goes back within one instance; ``wall_ms`` the wall clock in
milliseconds, used for fences only. Every method is total: it answers for any claim at any time, and an answer
that gets lost can be asked for again. Claims are minted by clients and never reused.

Invariants: at most one claim holds; fences rise from grant to grant; a claim that was released, withdrawn, revoked
or whose lease lapsed is never granted (again); grants follow the order of first polls among waiters that kept polling.
"""

from __future__ import annotations

import bisect
import enum
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

from async_wsync.types import Requester

__all__ = ["Granted", "LeaseOver", "LockState", "Released", "Renewed", "Waiting", "Withdrawn"]


BASE_DELAY = 0.005


CAP_DELAY = 0.25


#: The first waiter, once the holder is due to release, polls at least so far apart, or 20 times in a hold, up to:
FIRST_DELAY = 0.003


FIRST_SHARE = 1 / 20


FIRST_CAP = 0.05


#: A waiter with an address to wake it up at is told of its turn: its polls only keep its place, and make up for a
#: lost datagram.
WOKEN_FIRST_DELAY = 0.02


WOKEN_DELAY = 0.1


#: So many polls in a second, the server can answer on the side, whoever waits: the more wait, the less often each
#: polls. Those near their turn come more often than their share, the first
#: FULL_RATE_WAITERS as often as if they were alone.
POLLS_PER_SECOND = 400


FULL_RATE_WAITERS = 100


#: The weight of the newest hold in the length that is expected of the next.
NEWEST = 0.3


#: A claim that is over is remembered for longer than any message about it can be on its way.
ENDED_SECONDS = 600.0


MAX_ENDED = 20_000


MAX_DEAD = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The lock is yours for ``ttl`` seconds from when you *sent* the poll."""

    fence: int
    ttl: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Not yet. ``position`` 0 is next; poll again after ``retry_after`` seconds. ``holder``: as in the status."""

    position: int
    retry_after: float
    holder: dict[str, Any] | None
    quarantine_left: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    """This claim is over, and will never be granted. Mint another one."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """The lease runs for ``ttl`` seconds from when you sent the heartbeat."""

    ttl: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOver:
    """You do not hold the lock (any more)."""

    reason: str


class Released(enum.StrEnum):
    """What a release found. Never an error: releasing is safe at any time, any number of times."""

    RELEASED = "released"
    NOT_HELD = "not held"
    EXPIRED = "expired"


@dataclass(slots=True, kw_only=True)
class _Holder:
    claim: str
    who: Requester
    fence: int
    ttl: float
    since: float
    since_wall_ms: int
    lease_end: float
    stage: str = ""
    stage_at: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Waiter:
    """``number``: the order of first polls. ``expected``: when it was told to poll again, at the latest."""

    claim: str
    who: Requester
    number: int
    since: float
    last_poll: float
    expected: float
    wake_up_at: tuple[str, int] | None = None


@dataclass(slots=True)
class LockState:
    """See the module. ``ttl``: longest lease in seconds. ``quarantine_until``: grant nothing before this ``now``;
    a restarted server passes its start plus ``ttl``, since it cannot know whom its predecessor granted.
    ``waiter_silence``: a waiter that is so many seconds late with its poll loses its place."""

    ttl: float = 30.0
    quarantine_until: float = 0.0
    waiter_silence: float = 3.0
    holder: _Holder | None = None
    waiters: dict[str, _Waiter] = field(default_factory=dict)
    ended: OrderedDict[str, tuple[str, float]] = field(default_factory=OrderedDict)
    dead_clients: OrderedDict[str, str] = field(default_factory=OrderedDict)
    last_fence: int = 0
    num_grants: int = 0
    transitions: deque[tuple[float, str, str, str, int]] = field(default_factory=lambda: deque(maxlen=32))
    last_now: float = 0.0
    typical_hold: float = 0.0
    _numbers: list[int] = field(default_factory=list)  # of the waiters, rising: where one stands in it is its position
    _next_number: int = 0
    _next_expiry: float = math.inf  # no waiter is too late before

    # ------------------------------------------------------------------------------ the four verbs

    def acquire(
        self,
        claim: str,
        *,
        now: float,
        wall_ms: int,
        who: Requester,
        ttl: float | None = None,
        fence_seen: int = 0,
        unbounded: bool = False,
        wake_up_at: tuple[str, int] | None = None,
    ) -> Granted | Waiting | Withdrawn:
        """Poll. The first poll queues, later ones keep the place; polling a held claim renews its lease.

        ``unbounded``: let ``ttl`` be longer than the lock's own, for holders that cannot send heartbeats.
        ``wake_up_at``: where the waiter is told that it is its turn, see `to_wake_up`.
        """
        self._tick(now)
        self._see(fence_seen)
        if claim in self.ended:
            return Withdrawn(reason=self.ended[claim][0])
        if who.client in self.dead_clients:  # a last poll that outlived its sender
            return Withdrawn(reason=self.dead_clients[who.client])
        if self.holder is not None and self.holder.claim == claim:
            self.holder.lease_end = now + self.holder.ttl
            return Granted(fence=self.holder.fence, ttl=self.holder.ttl)
        waiter = self.waiters.get(claim)
        if waiter is None:
            waiter = self._enqueue(claim, who, now)
        waiter.last_poll, waiter.wake_up_at = now, wake_up_at
        if self.holder is None and now >= self.quarantine_until and next(iter(self.waiters)) == claim:
            lease = self.ttl if ttl is None else ttl
            return self._grant(waiter, now, wall_ms, lease if unbounded else min(lease, self.ttl))
        return self._waiting(waiter, now)

    def heartbeat(self, claim: str, *, now: float, stage: str | None = None, fence: int = 0) -> Renewed | LeaseOver:
        """Renew the lease of the holder, who tells what it is doing. A lapsed lease is never revived."""
        self._tick(now)
        self._see(fence)
        holder = self.holder
        if holder is None or holder.claim != claim:
            return LeaseOver(reason=self.ended[claim][0] if claim in self.ended else "unknown to this lock server")
        holder.lease_end = now + holder.ttl
        if stage is not None and stage != holder.stage:
            holder.stage, holder.stage_at = stage, now
        return Renewed(ttl=holder.ttl)

    def release(self, claim: str, *, now: float) -> Released:
        """Give a claim back: free the lock if it holds, leave the queue if it waits, and never be granted later."""
        self._tick(now)
        if self.holder is not None and self.holder.claim == claim:
            self.typical_hold += NEWEST * (now - self.holder.since - self.typical_hold)
            self._end("released", now)
            return Released.RELEASED
        if claim in self.ended:
            reason = self.ended[claim][0]
            if reason == "released":
                return Released.RELEASED
            return Released.NOT_HELD if reason == "withdrawn" else Released.EXPIRED
        self._dequeue(claim)
        # Also for a claim never heard of: its poll may still be on its way.
        self._remember(claim, "withdrawn", now)
        return Released.NOT_HELD

    def revoke(self, claim: str, *, now: float, why: str = "revoked") -> bool:
        """Take the lock from ``claim`` whether or not its holder is alive; True if it held. Fences do the rest."""
        self._tick(now)
        if self.holder is None or self.holder.claim != claim:
            return False
        self._end(why, now)
        return True

    def died(self, client: str, *, now: float, why: str = "its process died") -> bool:
        """Drop everything that a dead process held or waited for; True if that freed the lock."""
        self._tick(now)
        self.dead_clients[client] = why
        while len(self.dead_clients) > MAX_DEAD:
            self.dead_clients.popitem(last=False)
        for waiter in [w for w in self.waiters.values() if w.who.client == client]:
            self._dequeue(waiter.claim)
            self._remember(waiter.claim, why, now)
        if self.holder is None or self.holder.who.client != client:
            return False
        self._end(why, now)
        return True

    # ------------------------------------------------------------------------------ what it shows

    def status(self, now: float) -> dict[str, Any]:
        """Plain data, json-able. Times in seconds, relative to now."""
        self._tick(now)
        return {
            "held": self.holder is not None,
            "holder": self._describe_holder(now),
            "waiters": [
                {**_describe(w.who), "claim": w.claim, "waiting_for": now - w.since, "last_poll_ago": now - w.last_poll}
                for w in self.waiters.values()
            ],
            "last_fence": self.last_fence,
            "num_grants": self.num_grants,
            "ttl": self.ttl,
            "quarantine_left": max(0.0, self.quarantine_until - now),
            "transitions": [
                {"ago": now - at, "what": what, "claim": claim, "label": label, "fence": fence}
                for at, what, claim, label, fence in self.transitions
            ],
        }

    def to_wake_up(self, now: float) -> tuple[str, tuple[str, int]] | None:
        """The claim that would be granted if it polled now, and the address to wake it up at, if it has one."""
        if self.holder is not None or now < self.quarantine_until or not self.waiters:
            return None
        first = next(iter(self.waiters.values()))
        return None if first.wake_up_at is None else (first.claim, first.wake_up_at)

    def active_clients(self) -> set[str]:
        """The processes that hold or wait: those worth watching."""
        clients = {w.who.client for w in self.waiters.values()}
        if self.holder is not None:
            clients.add(self.holder.who.client)
        return clients - {""}

    # ------------------------------------------------------------------------------ moves

    def _tick(self, now: float) -> None:
        """Whatever time alone brings: a lapsed lease, silent waiters, claims that ended long ago."""
        if self.holder is not None and now > self.holder.lease_end:
            self._end("lease lapsed", now)
        if now - self.last_now > self.waiter_silence / 2:
            # Nobody was heard for long: we were stopped or cut off, so that silence says nothing about the waiters.
            for waiter in self.waiters.values():
                waiter.expected = max(waiter.expected, now - self.waiter_silence * 2 / 3)
        self.last_now = now
        if now > self._next_expiry:
            self._drop_silent(now)
        while self.ended and (len(self.ended) > MAX_ENDED or next(iter(self.ended.values()))[1] < now - ENDED_SECONDS):
            self.ended.popitem(last=False)

    def _drop_silent(self, now: float) -> None:
        limit = now - self.waiter_silence
        for waiter in [w for w in self.waiters.values() if w.expected < limit]:
            self._dequeue(waiter.claim)  # not in `ended`: it may come back, to the end of the queue
            self._note(now, "waiter went silent", waiter.claim, waiter.who.label)
        self._next_expiry = min((w.expected for w in self.waiters.values()), default=math.inf) + self.waiter_silence

    def _enqueue(self, claim: str, who: Requester, now: float) -> _Waiter:
        number, self._next_number = self._next_number, self._next_number + 1
        self._numbers.append(number)
        waiter = self.waiters[claim] = _Waiter(
            claim=claim, who=who, number=number, since=now, last_poll=now, expected=now
        )
        return waiter

    def _dequeue(self, claim: str) -> None:
        waiter = self.waiters.pop(claim, None)
        if waiter is not None:
            del self._numbers[bisect.bisect_left(self._numbers, waiter.number)]

    def _grant(self, waiter: _Waiter, now: float, wall_ms: int, ttl: float) -> Granted:
        self._dequeue(waiter.claim)
        self.last_fence = self._next_fence(wall_ms)
        self.num_grants += 1
        self.holder = _Holder(
            claim=waiter.claim,
            who=waiter.who,
            fence=self.last_fence,
            ttl=ttl,
            since=now,
            since_wall_ms=wall_ms,
            lease_end=now + ttl,
            stage_at=now,
        )
        self._note(now, "granted", waiter.claim, waiter.who.label, self.last_fence)
        return Granted(fence=self.last_fence, ttl=ttl)

    def _next_fence(self, wall_ms: int) -> int:
        # The wall clock keeps fences rising over restarts; what clients have seen, over clocks set back.
        return max(self.last_fence + 1, wall_ms)

    def _end(self, why: str, now: float) -> None:
        assert self.holder is not None
        holder, self.holder = self.holder, None
        self._remember(holder.claim, why, now)
        self._note(now, why, holder.claim, holder.who.label, holder.fence)

    def _remember(self, claim: str, why: str, now: float) -> None:
        self.ended[claim] = (why, now)

    def _see(self, fence: int) -> None:
        self.last_fence = max(self.last_fence, fence)

    def _note(self, now: float, what: str, claim: str, label: str, fence: int = 0) -> None:
        self.transitions.append((now, what, claim, label, fence))

    def _waiting(self, waiter: _Waiter, now: float) -> Waiting:
        position = bisect.bisect_left(self._numbers, waiter.number)
        delay = self._delay(position, now)
        if waiter.wake_up_at is not None:
            delay = max(delay, WOKEN_DELAY if position else WOKEN_FIRST_DELAY)
        delay = min(delay, max(CAP_DELAY, len(self.waiters) / POLLS_PER_SECOND))
        waiter.expected = now + delay
        self._next_expiry = min(self._next_expiry, waiter.expected + self.waiter_silence)
        return Waiting(
            position=position,
            retry_after=delay,
            holder=self._describe_holder(now),
            quarantine_left=max(0.0, self.quarantine_until - now),
        )

    def _delay(self, position: int, now: float) -> float:
        """Seconds to the next poll. Polls in vain cost everybody, so that only who is due soon polls often."""
        apart = BASE_DELAY * max(1.0, len(self.waiters) / FULL_RATE_WAITERS)
        if now < self.quarantine_until:
            return max(BASE_DELAY, (self.quarantine_until - now) / 4) * (1 + position)
        held_for = now - self.holder.since if self.holder is not None else 0.0
        left = max(0.0, self.typical_hold - held_for)
        if position == 0:
            return max(FIRST_DELAY, min(FIRST_CAP, left / 2 if left > FIRST_DELAY else FIRST_SHARE * held_for))
        return max(apart * (1 + position), (left + position * self.typical_hold) / 2)

    def _describe_holder(self, now: float) -> dict[str, Any] | None:
        if (holder := self.holder) is None:
            return None
        return {
            **_describe(holder.who),
            "claim": holder.claim,
            "fence": holder.fence,
            "stage": holder.stage,
            "stage_for": now - holder.stage_at,
            "held_for": now - holder.since,
            "since_wall_ms": holder.since_wall_ms,
            "lease_left": None if holder.lease_end == math.inf else holder.lease_end - now,
        }


def _describe(who: Requester) -> dict[str, Any]:
    return {"label": who.label, "host": who.host, "pid": who.pid, "actor_id": who.actor_id}
