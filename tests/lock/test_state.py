"""The lock's state machine and its client's half, by hand-turned clock."""

from __future__ import annotations

import json
from typing import Any

import pytest

from async_wsync.lock.claim import Again, ClaimView, Held, Retry
from async_wsync.lock.state import Granted, LeaseOver, LockState, Released, Renewed, Waiting, Withdrawn
from async_wsync.runtime.backoff import full_jitter, poll_delay
from async_wsync.types import Requester

TTL = 30.0


class Driver:
    """A `LockState` and the clock it sees."""

    def __init__(self, **options: Any) -> None:
        self.state = LockState(ttl=TTL, **options)
        self.now = 100.0

    def poll(self, claim: str, *, client: str = "", wall_ms: int = 5000, **given: Any) -> Any:
        who = Requester(label=f"label of {claim}", client=client or f"client of {claim}")
        return self.state.acquire(claim, now=self.now, wall_ms=wall_ms, who=who, **given)

    def beat(self, claim: str, stage: str | None = None) -> Any:
        return self.state.heartbeat(claim, now=self.now, stage=stage)

    def release(self, claim: str) -> Released:
        return self.state.release(claim, now=self.now)


@pytest.fixture
def lock() -> Driver:
    return Driver()


def test_a_free_lock_is_granted_at_the_first_poll(lock: Driver) -> None:
    assert lock.poll("a") == Granted(fence=5000, ttl=TTL)


def test_grants_follow_the_order_of_first_polls(lock: Driver) -> None:
    lock.poll("a")
    assert [lock.poll(c).position for c in "bcd"] == [0, 1, 2]
    assert [lock.poll(c).position for c in "dcb"] == [2, 1, 0]
    lock.release("a")
    assert isinstance(lock.poll("d"), Waiting)
    assert isinstance(lock.poll("b"), Granted)
    lock.release("b")
    assert isinstance(lock.poll("c"), Granted)


def test_fences_rise_even_if_the_wall_clock_falls(lock: Driver) -> None:
    fences = []
    for n, wall in enumerate((5000, 4000, 4000, 9000, 100)):
        fences.append(lock.poll(str(n), wall_ms=wall).fence)
        lock.release(str(n))
    assert fences == [5000, 5001, 5002, 9000, 9001]


def test_a_fence_is_above_any_that_a_client_has_seen(lock: Driver) -> None:
    assert lock.poll("a", fence_seen=7000).fence == 7001


def test_a_restarted_server_learns_fences_from_heartbeats_too(lock: Driver) -> None:
    lock.state.heartbeat("of the last life", now=lock.now, fence=8000)
    assert lock.poll("a").fence == 8001


def test_polling_a_held_claim_grants_it_again_and_renews(lock: Driver) -> None:
    first = lock.poll("a")
    lock.now += 20
    assert lock.poll("a") == first
    lock.now += 20
    assert isinstance(lock.beat("a"), Renewed)


def test_a_lapsed_lease_is_never_revived(lock: Driver) -> None:
    lock.poll("a")
    lock.now += TTL + 0.001
    assert lock.beat("a") == LeaseOver(reason="lease lapsed")
    assert lock.poll("a") == Withdrawn(reason="lease lapsed")
    assert lock.release("a") is Released.EXPIRED


def test_a_lease_lasts_while_heartbeats_come(lock: Driver) -> None:
    lock.poll("a")
    for _ in range(10):
        lock.now += TTL - 1
        assert isinstance(lock.beat("a"), Renewed)
        assert isinstance(lock.poll("b"), Waiting)


def test_a_release_can_be_repeated(lock: Driver) -> None:
    lock.poll("a")
    assert [lock.release("a") for _ in range(3)] == [Released.RELEASED] * 3


def test_a_stranger_frees_nothing(lock: Driver) -> None:
    lock.poll("a")
    assert lock.release("stranger") is Released.NOT_HELD
    assert isinstance(lock.poll("b"), Waiting)


def test_a_poll_that_arrives_after_its_release_is_refused(lock: Driver) -> None:
    assert lock.release("a") is Released.NOT_HELD
    assert lock.poll("a") == Withdrawn(reason="withdrawn")
    lock.poll("b")
    lock.release("b")
    assert lock.poll("b") == Withdrawn(reason="released")


def test_a_withdrawn_waiter_makes_room(lock: Driver) -> None:
    lock.poll("a")
    lock.poll("b")
    lock.poll("c")
    lock.release("b")
    lock.release("a")
    assert isinstance(lock.poll("c"), Granted)


def test_a_silent_waiter_loses_its_place_and_may_come_back(lock: Driver) -> None:
    lock.poll("a")
    lock.poll("silent")
    lock.poll("b")
    for _ in range(4):
        lock.now += 1
        lock.poll("b")
    lock.release("a")
    assert isinstance(lock.poll("b"), Granted)
    assert lock.poll("silent").position == 0


def test_a_server_that_was_stopped_does_not_blame_its_waiters(lock: Driver) -> None:
    lock.poll("a")
    lock.poll("first")
    lock.poll("second")
    lock.now += 20  # nobody could be heard
    assert lock.poll("second").position == 1


def test_a_restarted_server_grants_nothing_for_one_lease() -> None:
    lock = Driver(quarantine_until=100.0 + TTL)
    reply = lock.poll("a")
    assert reply.holder is None
    assert reply.quarantine_left == TTL
    lock.now += TTL - 0.001
    assert isinstance(lock.poll("a"), Waiting)
    lock.now += 0.001
    assert isinstance(lock.poll("a"), Granted)


def test_a_dead_process_holds_and_waits_for_nothing(lock: Driver) -> None:
    lock.poll("a", client="dead")
    lock.poll("b", client="dead")
    lock.poll("c")
    assert lock.state.died("dead", now=lock.now)
    assert isinstance(lock.poll("c"), Granted)
    assert not lock.state.died("dead", now=lock.now)


def test_the_last_poll_of_a_dead_process_is_refused(lock: Driver) -> None:
    lock.state.died("dead", now=lock.now, why="it died")
    assert lock.poll("new", client="dead") == Withdrawn(reason="it died")


def test_revoking_ends_one_lease_and_no_other(lock: Driver) -> None:
    fence = lock.poll("a").fence
    assert not lock.state.revoke("b", now=lock.now)
    assert lock.state.revoke("a", now=lock.now)
    assert isinstance(lock.beat("a"), LeaseOver)
    assert lock.poll("b").fence > fence


def test_a_client_may_ask_for_a_shorter_lease_only(lock: Driver) -> None:
    assert lock.poll("a", ttl=5.0).ttl == 5.0
    lock.release("a")
    assert lock.poll("b", ttl=500.0).ttl == TTL


def test_the_status_is_plain_data_that_names_everybody(lock: Driver) -> None:
    lock.poll("a")
    lock.now += 2
    lock.beat("a", "bucket 3/12")
    lock.poll("b")
    lock.now += 1
    status = json.loads(json.dumps(lock.state.status(lock.now)))
    assert status["holder"]["label"] == "label of a"
    assert status["holder"]["stage"] == "bucket 3/12"
    assert status["holder"]["stage_for"] == 1.0
    assert status["holder"]["held_for"] == 3.0
    assert status["holder"]["lease_left"] == TTL - 1
    assert [w["label"] for w in status["waiters"]] == ["label of b"]
    assert [t["what"] for t in status["transitions"]] == ["granted"]


def test_claims_that_ended_are_forgotten_in_the_end(lock: Driver) -> None:
    for n in range(50):
        lock.release(str(n))
    assert len(lock.state.ended) == 50
    lock.now += 601
    lock.release("last")
    assert list(lock.state.ended) == ["last"]


def test_the_first_waiter_polls_fast_behind_a_short_hold_and_calmly_behind_a_long_one(lock: Driver) -> None:
    lock.poll("a")
    assert lock.poll("b").retry_after == 0.003
    lock.now += 0.5
    assert lock.poll("b").retry_after == pytest.approx(0.025)
    lock.now += 100
    lock.poll("c")
    assert lock.poll("c").retry_after <= 0.25


def test_waiters_poll_most_when_their_turn_is_near(lock: Driver) -> None:
    for n in range(30):  # holds of 0.2 s
        lock.poll(f"hold {n}")
        lock.now += 0.2
        lock.release(f"hold {n}")
    lock.poll("a")
    near, far = lock.poll("b").retry_after, lock.poll("c").retry_after
    assert near == pytest.approx(0.05)
    assert far == pytest.approx(0.2, rel=0.01)
    lock.now += 0.19
    assert lock.poll("b").retry_after < 0.01
    lock.release("a")
    lock.now += 0.001
    assert isinstance(lock.poll("b"), Granted)


@pytest.mark.parametrize("wake_up_at", [None, ("192.0.2.7", 4711)])
@pytest.mark.parametrize("waiters", [10, 100, 400, 2_000, 20_000])
def test_however_many_wait_their_polls_leave_the_server_time(
    lock: Driver, waiters: int, wake_up_at: tuple[str, int] | None
) -> None:
    lock.poll("holder")
    for n in range(waiters):
        lock.poll(f"waiter {n}", wake_up_at=wake_up_at)
    delays = [lock.poll(f"waiter {n}", wake_up_at=wake_up_at).retry_after for n in range(waiters)]
    assert sum(1 / poll_delay(delay, 0.5) for delay in delays) < 2_000  # it answers 3 000 in a second
    assert delays[1] <= 0.1 * max(1, waiters / 500)


def test_a_waiter_is_silent_only_once_it_is_later_than_it_was_told_to_be(lock: Driver) -> None:
    lock.poll("a")
    for n in range(2_000):
        lock.poll(f"waiter {n}")
    told = lock.poll("waiter 1999").retry_after
    assert told == 5.0
    lock.now += 1.4  # in steps: a server that hears nobody for long blames nobody
    for _ in range(4):
        lock.beat("a")
        lock.now += 1.4
    assert lock.poll("waiter 1999").position < 1999
    assert "waiter 0" not in lock.state.waiters
    for _ in range(6):
        lock.beat("a")
        lock.now += 1.4
    lock.beat("a")
    assert not lock.state.waiters


# ------------------------------------------------------------------------------------ the client's half


def test_a_client_counts_its_lease_from_before_it_asked() -> None:
    view = ClaimView("a")
    assert view.on_poll(Granted(fence=7, ttl=10.0), sent=100.0, now=103.0, draw=0.5) == Held(7)
    assert not view.lapsed(108.99)
    assert view.lapsed(109.0)


def test_a_grant_that_took_longer_than_its_lease_is_asked_for_again() -> None:
    view = ClaimView("a")
    assert view.on_poll(Granted(fence=7, ttl=10.0), sent=100.0, now=109.5, draw=0.5) == Retry(0.0)


def test_a_client_whose_claim_is_over_mints_another() -> None:
    assert ClaimView("a").on_poll(Withdrawn(reason="gone"), sent=0.0, now=0.0, draw=0.0) == Again("gone")


def test_a_renewal_that_comes_after_the_end_is_no_renewal() -> None:
    view = ClaimView("a")
    view.on_poll(Granted(fence=7, ttl=10.0), sent=100.0, now=100.0, draw=0.5)
    assert view.on_beat(Renewed(ttl=10.0), sent=103.0, now=104.0) is None
    assert view.lease_end == 112.0
    assert view.on_beat(Renewed(ttl=10.0), sent=111.0, now=112.5) == "lease lapsed"


def test_a_lost_lease_says_why() -> None:
    view = ClaimView("a")
    view.on_poll(Granted(fence=7, ttl=10.0), sent=100.0, now=100.0, draw=0.5)
    assert view.on_beat(LeaseOver(reason="revoked"), sent=101.0, now=101.0) == "revoked"
    assert view.lapsed(101.0)


def test_heartbeats_are_due_every_third_of_the_lease() -> None:
    view = ClaimView("a")
    view.on_poll(Granted(fence=7, ttl=9.0), sent=100.0, now=100.5, draw=0.5)
    assert view.beat_delay(100.5) == pytest.approx(2.5)
    assert view.beat_delay(120.0) == 0.0


def test_delays_stay_within_their_bounds() -> None:
    assert poll_delay(0.1, 0.0) == 0.05
    assert poll_delay(0.1, 1.0) == 0.1
    assert full_jitter(0, 1.0) == 0.0
    assert full_jitter(1, 1.0) == 0.02
    assert full_jitter(3, 0.5) == 0.04
    assert full_jitter(1000, 1.0) == 1.0


# ------------------------------------------------------------------------------ who is told of its turn


ADDRESS = ("192.0.2.7", 4711)


def test_the_first_waiter_is_woken_up_once_the_lock_is_free(lock: Driver) -> None:
    lock.poll("a")
    lock.poll("b", wake_up_at=ADDRESS)
    lock.poll("c", wake_up_at=("192.0.2.8", 1))
    assert lock.state.to_wake_up(lock.now) is None
    lock.release("a")
    assert lock.state.to_wake_up(lock.now) == ("b", ADDRESS)
    lock.poll("b", wake_up_at=ADDRESS)
    assert lock.state.to_wake_up(lock.now) is None


def test_nobody_is_woken_up_in_quarantine_or_without_an_address() -> None:
    lock = Driver(quarantine_until=110.0)
    assert lock.state.to_wake_up(lock.now) is None
    lock.poll("a", wake_up_at=ADDRESS)
    assert lock.state.to_wake_up(lock.now) is None
    lock.now = 110.0
    assert lock.state.to_wake_up(lock.now) == ("a", ADDRESS)
    lock.poll("a")
    lock.poll("b")
    lock.poll("c", wake_up_at=ADDRESS)
    lock.release("a")
    assert lock.state.to_wake_up(lock.now) is None


def test_a_waiter_that_is_woken_up_polls_only_to_keep_its_place(lock: Driver) -> None:
    lock.poll("a")
    assert lock.poll("b", wake_up_at=ADDRESS).retry_after == 0.02
    assert lock.poll("c", wake_up_at=ADDRESS).retry_after == 0.1
    lock.now += 10
    assert lock.poll("b", wake_up_at=ADDRESS).retry_after <= 0.05
