"""What must never be seen, watched from outside: none of this asks the lock what it thinks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from async_wsync.lock.state import Granted, Withdrawn

if TYPE_CHECKING:
    from tests.sim.world import Client, World

#: Seconds after which a lock held for a claim that nobody wants any more counts as left held.
LEAK_AFTER = 0.3
#: A waiter whose polls were further apart than this share of the allowed silence may have lost its place.
MAYBE_SILENT = 0.55


@dataclass
class _Arrival:
    order: int
    last_poll: float
    client: str
    sure: bool = True


class Checks:
    """Two independent detectors of mutual exclusion (what clients believe; what the engine applied), and checks of
    order, fences, dead claims and leaks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.violations: list[str] = []
        self.faults_seen: set[str] = set()
        self.num_claims = self.num_grants = self.num_applied = self.num_refused = self.num_lost = 0
        self._beliefs: dict[str, float] = {}  # claim -> until when its client believes that it holds
        self._last_applied: tuple[int, str] = (0, "")
        self._last_fence = 0
        self._granted: dict[str, int] = {}
        self._gone: set[str] = set()  # claims whose end this server incarnation was told
        self._arrivals: dict[str, _Arrival] = {}
        self._count = 0

    def fail(self, kind: str, text: str) -> None:
        self.violations.append(f"{kind}: {text} (seed {self.world.seed}, t={self.world.now:.4f})")
        self.world.log(f"VIOLATION {kind}: {text}")

    # ---------------------------------------------------------------------------- first detector

    def believes(self, claim: str, until: float) -> None:
        now = self.world.now
        for other, end in self._beliefs.items():
            if other != claim and end > now:
                self.fail("two holders", f"{claim} believes it holds while {other} does until {end:.4f}")
        if len(self._beliefs) > 8:
            self._beliefs = {c: end for c, end in self._beliefs.items() if end > now}
        self._beliefs[claim] = until

    def stops_believing(self, claim: str) -> None:
        self._beliefs.pop(claim, None)

    # ---------------------------------------------------------------------------- second detector

    def applied(self, fence: int, claim: str) -> None:
        self.num_applied += 1
        last_fence, last_claim = self._last_applied
        if fence < last_fence or (fence == last_fence and claim != last_claim):
            self.fail("stale bucket", f"{claim} ({fence}) applied after {last_claim} ({last_fence})")
        self._last_applied = (fence, claim)

    # ---------------------------------------------------------------------------- the server's answers

    def polled(self, claim: str, reply: Any, client: Client) -> None:
        now = self.world.now
        if isinstance(reply, Withdrawn):
            self._arrivals.pop(claim, None)
            return
        arrival = self._arrivals.get(claim)
        if arrival is None:
            if not isinstance(reply, Granted) or claim not in self._granted:
                self._count += 1
                arrival = self._arrivals[claim] = _Arrival(self._count, now, claim.partition("#")[0])
        else:
            arrival.sure &= self._gap(arrival) < MAYBE_SILENT
            arrival.last_poll = now
        if isinstance(reply, Granted) and self._granted.get(claim) != reply.fence:
            self._on_grant(claim, reply.fence, arrival)

    def _on_grant(self, claim: str, fence: int, arrival: _Arrival | None) -> None:
        self.num_grants += 1
        if fence <= self._last_fence:
            self.fail("fence", f"{claim} got {fence} after {self._last_fence}")
        if claim in self._gone:
            self.fail("dead claim", f"{claim} was granted after its release")
        self._last_fence = max(fence, self._last_fence)
        self._granted[claim] = fence
        self._arrivals.pop(claim, None)
        if arrival is None or not arrival.sure:
            return
        for other, earlier in self._arrivals.items():
            if earlier.order < arrival.order and earlier.sure and self._gap(earlier) < MAYBE_SILENT:
                self.fail("order", f"{claim} was granted before {other}, who came first")

    def _gap(self, arrival: _Arrival) -> float:
        from tests.sim.world import SILENCE

        # On the server's clock the gap may be up to 4 % longer.
        return (self.world.now - arrival.last_poll) * 1.04 / SILENCE

    def released(self, claim: str) -> None:
        self._gone.add(claim)
        self._arrivals.pop(claim, None)

    def client_died(self, name: str) -> None:
        for claim in [c for c, a in self._arrivals.items() if a.client == name]:
            del self._arrivals[claim]

    def server_died(self) -> None:
        self._gone.clear()
        self._arrivals.clear()

    # ---------------------------------------------------------------------------- now and then

    def sample(self) -> None:
        """Is the lock held for a claim whose living client gave it up, with nothing about it still on its way?"""
        server, now = self.world.server, self.world.now
        if not server.up or now < server.paused_until or server.state.holder is None:
            return
        claim = server.state.holder.claim
        for client in self.world.clients:
            attempt = client.attempts.get(claim)
            if attempt is None or attempt.given_up_at is None or attempt.left_to_lease:
                continue
            if not client.alive or not claim.startswith(f"{client.name}#"):
                continue
            quiet_since = max(attempt.given_up_at, attempt.last_arrival, client.cut_until, client.paused_until)
            busy = attempt.released is False
            if not busy and now > max(quiet_since, server.booted, server.paused_until) + LEAK_AFTER:
                self.fail("left held", f"{claim} was given up at {attempt.given_up_at:.4f} and still holds")

    def at_end(self) -> None:
        if self.violations:
            return
        for client in self.world.clients:
            if not client.finished:
                self.fail("stuck", f"{client.name} never got its turn")
