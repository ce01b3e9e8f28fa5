"""The rules, broken one at a time. Each is what somebody might write, and the simulator must catch it."""

from __future__ import annotations

from typing import Any

from async_wsync.lock.claim import ClaimView
from async_wsync.lock.state import Granted, LockState, Released, Waiting, Withdrawn
from tests.sim.world import Rules


class ExpiryFromReply(ClaimView):
    """Counts the lease from when the answer came, and not from when the question was sent."""

    def _extend(self, ttl: float, sent: float, now: float) -> None:
        super()._extend(ttl, now, now)


class ForgetsEnded(LockState):
    """Forgets a claim as soon as it is released."""

    def _remember(self, claim: str, why: str, now: float) -> None:
        pass


class ReleaseByAnyone(LockState):
    """Frees the lock whoever asks."""

    def release(self, claim: str, *, now: float) -> Released:
        if self.holder is not None:
            claim = self.holder.claim
        return super().release(claim, now=now)


class NoFifo(LockState):
    """Grants to whoever polls at the right moment."""

    def acquire(self, claim: str, **given: Any) -> Granted | Waiting | Withdrawn:
        if claim in self.waiters:
            self.waiters = {claim: self.waiters.pop(claim), **self.waiters}
        return super().acquire(claim, **given)


class FenceFromZero(LockState):
    """Counts 1, 2, 3, and again after a restart."""

    def _next_fence(self, wall_ms: int) -> int:
        return self.last_fence + 1

    def _see(self, fence: int) -> None:
        pass


VARIANTS: dict[str, Rules] = {
    "no fence": Rules(engine_checks_fence=False),
    "expiry counted from the reply": Rules(view=ExpiryFromReply),
    "no quarantine": Rules(quarantine=False),
    "no tombstone": Rules(state=ForgetsEnded),
    "no withdraw": Rules(withdraw=False),
    "release by anyone": Rules(state=ReleaseByAnyone),
    "no FIFO": Rules(state=NoFifo),
    "fence from zero": Rules(state=FenceFromZero),
}
