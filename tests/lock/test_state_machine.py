"""Hypothesis looks for a history of the lock's state machine that breaks its invariants."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from async_wsync.lock.state import Granted, LeaseOver, LockState, Released, Renewed, Waiting, Withdrawn
from async_wsync.types import Requester

TTL = 10.0
SILENCE = 3.0
CLIENTS = ("x", "y", "z")


class LockMachine(RuleBasedStateMachine):
    """A model that knows less than the lock: who was granted last, until when, and whose end was told."""

    claims = Bundle("claims")

    @initialize()
    def start(self) -> None:
        self.now = 50.0
        self.wall = 1000
        self.count = 0
        self.state = LockState(ttl=TTL, waiter_silence=SILENCE)
        self.fence = 0
        self.seen = 0
        self.holder: str | None = None
        self.lease_end = 0.0
        self.quarantine = 0.0
        self.over: set[str] = set()
        self.owner: dict[str, str] = {}
        self.queue: list[str] = []  # in order of arrival; may hold some that the lock has dropped for their silence
        self.last_poll: dict[str, float] = {}
        self.unsure: set[str] = set()

    def lapse(self) -> None:
        if self.holder is not None and self.now > self.lease_end:
            self.over.add(self.holder)
            self.holder = None

    def end(self, claim: str) -> None:
        self.over.add(claim)
        if claim in self.queue:
            self.queue.remove(claim)
        if self.holder == claim:
            self.holder = None

    @rule(target=claims, client=st.sampled_from(CLIENTS))
    def mint(self, client: str) -> str:
        self.count += 1
        claim = f"{client}{self.count}"
        self.owner[claim] = client
        return claim

    @rule(claim=claims)
    def poll(self, claim: str) -> None:
        self.lapse()
        reply = self.state.acquire(
            claim, now=self.now, wall_ms=self.wall, who=Requester(client=self.owner[claim]), fence_seen=self.seen
        )
        if claim in self.over or self.owner[claim] in self.state.dead_clients:
            assert isinstance(reply, Withdrawn)
            return
        if self.holder == claim:
            assert reply == Granted(fence=self.fence, ttl=TTL)
            self.lease_end = self.now + TTL
            return
        if claim not in self.queue:
            self.queue.append(claim)
        elif self.now - self.last_poll[claim] > SILENCE / 3:
            self.unsure.add(claim)  # it may have lost its place meanwhile, or not
        self.last_poll[claim] = self.now
        if isinstance(reply, Granted):
            assert self.holder is None
            assert self.now >= self.quarantine
            assert reply.fence > max(self.fence, self.seen)
            before = self.queue[: self.queue.index(claim)]
            assert claim in self.unsure or not [c for c in before if self.is_sure(c)], before
            self.fence, self.holder, self.lease_end = reply.fence, claim, self.now + TTL
            self.queue.remove(claim)
        else:
            assert isinstance(reply, Waiting)
            assert 0 < reply.retry_after <= 0.25
            if self.holder is not None:
                assert reply.holder is not None
                assert reply.holder["claim"] == self.holder

    def is_sure(self, claim: str) -> bool:
        return claim not in self.unsure and self.now - self.last_poll[claim] <= SILENCE / 3

    @rule(claim=claims)
    def beat(self, claim: str) -> None:
        self.lapse()
        reply = self.state.heartbeat(claim, now=self.now, stage=f"at {self.now}", fence=self.seen)
        if self.holder == claim:
            assert reply == Renewed(ttl=TTL)
            self.lease_end = self.now + TTL
        else:
            assert isinstance(reply, LeaseOver)

    @rule(claim=claims)
    def release(self, claim: str) -> None:
        self.lapse()
        reply = self.state.release(claim, now=self.now)
        assert (self.holder == claim) <= (reply is Released.RELEASED)
        self.end(claim)

    @rule(claim=claims)
    def revoke(self, claim: str) -> None:
        self.lapse()
        assert self.state.revoke(claim, now=self.now) == (self.holder == claim)
        if self.holder == claim:
            self.end(claim)

    @rule(claim=consumes(claims))
    def kill(self, claim: str) -> None:
        self.lapse()
        client = self.owner[claim]
        freed = self.state.died(client, now=self.now)
        assert freed == (self.holder is not None and self.owner[self.holder] == client)
        for mine in [c for c, owner in self.owner.items() if owner == client]:
            if mine in self.queue or mine == self.holder:
                self.end(mine)

    @rule(seconds=st.sampled_from((0.01, 0.5, 1.0, 4.0, TTL - 0.01, TTL + 0.01)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(step=st.integers(-5000, 5000))
    def set_wall_clock(self, step: int) -> None:
        self.wall = max(0, self.wall + step)

    @rule(ahead=st.integers(0, 10_000))
    def hear_of_a_fence(self, ahead: int) -> None:
        self.seen = self.fence + ahead

    @rule()
    def restart(self) -> None:
        """All is forgotten; a client that knows the last fence asks again."""
        self.state = LockState(ttl=TTL, waiter_silence=SILENCE, quarantine_until=self.now + TTL)
        self.quarantine = self.now + TTL
        self.seen = max(self.seen, self.fence)
        self.holder = None
        self.over.clear()
        self.queue.clear()
        self.last_poll.clear()

    @invariant()
    def at_most_one_holds_and_the_lock_agrees(self) -> None:
        if not hasattr(self, "state"):
            return
        self.lapse()
        shown = self.state.status(self.now)["holder"]
        assert (shown["claim"] if shown else None) == self.holder
        assert self.state.active_clients() <= set(CLIENTS)


LockMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestLockMachine = LockMachine.TestCase
