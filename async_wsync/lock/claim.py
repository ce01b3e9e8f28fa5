"""What the client of a lock may believe and must do: the other half of `lock.state`, as pure.

The client counts only 0.9 of its lease, from *before it sent* the poll or heartbeat that was answered. So it stops
believing before the server does, however late the answer was, and for clocks that run up to ten percent apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from async_wsync.lock.state import Granted, LeaseOver, Renewed, Waiting, Withdrawn
from async_wsync.runtime.backoff import full_jitter, poll_delay

__all__ = ["Again", "ClaimView", "Held", "Retry"]

SAFETY = 0.9


@dataclass(frozen=True, slots=True)
class Held:
    """The lock is ours."""

    fence: int


@dataclass(frozen=True, slots=True)
class Retry:
    """Poll the same claim again after ``delay`` seconds."""

    delay: float


@dataclass(frozen=True, slots=True)
class Again:
    """This claim is over: mint another one and start from the end of the queue."""

    reason: str


@dataclass(slots=True)
class ClaimView:
    """One claim as its client sees it. Times are the client's own monotonic seconds."""

    claim: str
    fence: int = 0
    ttl: float = 0.0
    lease_end: float = -math.inf
    failures: int = 0

    def on_poll(
        self, reply: Granted | Waiting | Withdrawn, *, sent: float, now: float, draw: float
    ) -> Held | Retry | Again:
        """The answer to a poll sent at ``sent``; ``draw`` is a random number in [0, 1)."""
        self.failures = 0
        if isinstance(reply, Withdrawn):
            return Again(reply.reason)
        if isinstance(reply, Waiting):
            return Retry(poll_delay(reply.retry_after, draw))
        self._extend(reply.ttl, sent, now)
        if self.lapsed(now):
            return Retry(0.0)  # the answer took longer than the lease: ask whether we still hold
        self.fence = reply.fence
        return Held(reply.fence)

    def on_beat(self, reply: Renewed | LeaseOver, *, sent: float, now: float) -> str | None:
        """The answer to a heartbeat sent at ``sent``; the reason if the lease is lost."""
        self.failures = 0
        if isinstance(reply, LeaseOver):
            self.lease_end = -math.inf
            return reply.reason
        if self.lapsed(now):
            return "lease lapsed"  # renewed or not: we may have acted as if it were over
        self._extend(reply.ttl, sent, now)
        return None

    def on_trouble(self, draw: float, *, cap: float = 1.0) -> float:
        """No answer, or a transport error: seconds until the next try."""
        self.failures += 1
        return full_jitter(self.failures, draw, cap=cap)

    def lapsed(self, now: float) -> bool:
        return now >= self.lease_end

    def beat_delay(self, now: float) -> float:
        """Seconds until the next heartbeat is due, of three in a lease."""
        return max(0.0, self.lease_end - SAFETY * self.ttl + self.ttl / 3 - now)

    def _extend(self, ttl: float, sent: float, now: float) -> None:
        self.ttl = ttl
        self.lease_end = max(self.lease_end, sent + SAFETY * ttl)
