"""The rules of a round, without Ray or a clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from async_wsync.rounds.state import SUCCESSION, Phase, RoundState, View

ENGINES = ("e0", "e1")


def _round(num_sources: int = 2, silence: float = 10.0) -> RoundState:
    return RoundState(num_sources=num_sources, silence=silence)


def _join(state: RoundState, source: str, *, version: int = 1, now: float = 0.0, client: str | None = None) -> View:
    return state.join(source, client or f"process-of-{source}", version=version, engines=ENGINES, now=now)


def _sending(state: RoundState) -> str:
    """Bring a two-source round to where both may send; returns its id."""
    _join(state, "a")
    round_id = _join(state, "b").round_id
    state.opened(round_id, "a", now=0.0)
    return round_id


def test_a_round_opens_once_all_sources_are_there_and_the_first_one_leads() -> None:
    state = _round()
    assert _join(state, "a").phase is Phase.GATHERING
    view = _join(state, "b")
    assert (view.phase, view.leader) == (Phase.OPENING, "a")


def test_joining_twice_takes_one_place() -> None:
    state = _round()
    _join(state, "a")
    assert _join(state, "a").phase is Phase.GATHERING


def test_only_the_leader_opens_and_closes() -> None:
    state = _round()
    _join(state, "a")
    round_id = _join(state, "b").round_id
    assert state.opened(round_id, "b", now=0.0).phase is Phase.OPENING
    assert state.opened(round_id, "a", now=0.0).phase is Phase.SENDING
    state.sent(round_id, "a", now=0.0)
    state.sent(round_id, "b", now=0.0)
    assert state.closed(round_id, "b", now=0.0).phase is Phase.CLOSING
    assert state.closed(round_id, "a", now=0.0).phase is Phase.DONE


def test_the_bracket_closes_only_after_every_part_was_sent() -> None:
    state = _round()
    round_id = _sending(state)
    view = state.sent(round_id, "a", now=0.0)
    assert (view.phase, view.waiting_for) == (Phase.SENDING, ("b",))
    assert state.sent(round_id, "a", now=0.0).phase is Phase.SENDING
    assert state.sent(round_id, "b", now=0.0).phase is Phase.CLOSING


def test_a_round_that_failed_still_tells_whether_it_was_open() -> None:
    state = _round()
    _join(state, "a")
    assert not _join(state, "b").opened
    assert not state.fail("round-1", "b", "no more memory", now=0.0).opened
    later = _round()
    assert later.fail(_sending(later), "a", "no more memory", now=0.0).opened
    assert later.view("another", "b", now=0.0).opened  # nobody knows: it may have been


def test_one_failure_ends_the_round_for_all_and_the_first_reason_stays() -> None:
    state = _round()
    round_id = _sending(state)
    state.fail(round_id, "b", "no more memory", now=0.0)
    view = state.fail(round_id, "a", "broken pipe", now=0.0)
    assert (view.phase, view.failed_source, view.failure) == (Phase.FAILED, "b", "no more memory")
    assert state.sent(round_id, "a", now=0.0).phase is Phase.FAILED


def test_a_finished_round_cannot_fail_any_more() -> None:
    state = _round(num_sources=1)
    round_id = _join(state, "a").round_id
    state.opened(round_id, "a", now=0.0)
    state.sent(round_id, "a", now=0.0)
    state.closed(round_id, "a", now=0.0)
    assert state.fail(round_id, "a", "too late", now=0.0).phase is Phase.DONE


def test_a_death_fails_the_round_and_the_next_one_starts_afresh() -> None:
    state = _round()
    round_id = _sending(state)
    state.died("process-of-b", "its process died", now=1.0)
    assert state.view(round_id, "a", now=1.0).failed_source == "b"
    assert _join(state, "a", now=1.1).phase is Phase.GATHERING
    assert _join(state, "b", now=1.2, client="successor").phase is Phase.OPENING


def test_a_gathering_round_waits_only_briefly_for_the_successor_of_a_dead_source() -> None:
    state = _round()
    _sending(state)
    state.died("process-of-b", "its process died", now=1.0)
    round_id = _join(state, "a", now=5.0).round_id
    assert state.view(round_id, "a", now=5.0 + SUCCESSION - 0.1).phase is Phase.GATHERING
    view = state.view(round_id, "a", now=5.0 + SUCCESSION + 0.1)
    assert (view.phase, view.failed_source) == (Phase.FAILED, "b")


def test_a_silent_source_fails_the_round() -> None:
    state = _round(silence=3.0)
    round_id = _sending(state)
    assert state.view(round_id, "a", now=2.9).phase is Phase.SENDING
    view = state.view(round_id, "a", now=3.1)
    assert (view.phase, view.failed_source) == (Phase.FAILED, "b")


def test_a_source_that_disagrees_ends_the_round_for_all() -> None:
    state = _round()
    round_id = _join(state, "a", version=1).round_id
    refused = _join(state, "b", version=2)
    assert refused == state.view(round_id, "a", now=0.0)
    assert (refused.phase, refused.failed_source, refused.opened) == (Phase.FAILED, "b", False)
    assert "version 2" in refused.failure
    _join(state, "a", version=3)
    refused = state.join("b", "process-of-b", version=3, engines=("e0",), now=0.0)
    assert "sends to ['e0'], but 'a' to ['e0', 'e1']" in refused.failure
    _join(state, "a", version=4)
    refused = state.join("b", "process-of-b", version=4, engines=ENGINES, num_sources=3, now=0.0)
    assert "for 3 sources, but it exists for 2" in refused.failure


def test_who_belongs_to_a_round_of_sources_that_do_not_fit_is_told_so_once_and_then_starts_afresh() -> None:
    state = _round(num_sources=3)
    round_id = _join(state, "a").round_id
    state.join("b", "process-of-b", version=1, engines=("e0",), now=0.0)
    late = _join(state, "c")
    assert (late.round_id, late.phase, late.failed_source) == (round_id, Phase.FAILED, "b")
    assert [_join(state, source).phase for source in "cab"] == [Phase.GATHERING, Phase.GATHERING, Phase.OPENING]


def test_a_round_that_failed_for_another_reason_does_not_keep_a_source_from_starting_the_next() -> None:
    state = _round(num_sources=3)
    state.fail(_join(state, "a").round_id, "a", "cancelled", now=0.0)
    assert _join(state, "b").phase is Phase.GATHERING


def test_a_source_too_many_ends_a_round_that_has_not_sent_and_leaves_one_alone_that_has() -> None:
    state = _round()
    _join(state, "a")
    round_id = _join(state, "b").round_id
    refused = _join(state, "c")
    assert (refused.phase, refused.opened) == (Phase.FAILED, False)
    assert "already runs" in refused.failure
    assert state.view(round_id, "a", now=0.0).failure == refused.failure
    round_id = _sending(state)
    refused = _join(state, "c")
    assert (refused.phase, refused.failed_source, refused.opened) == (Phase.FAILED, "c", True)
    assert state.view(round_id, "a", now=0.0).phase is Phase.SENDING


def test_two_sources_of_one_name_end_the_round_once_both_have_spoken() -> None:
    state = _round()
    first = state.join("a", "one", member="m1", version=1, engines=ENGINES, now=0.0)
    state.join("a", "two", member="m2", version=1, engines=ENGINES, now=0.0)
    state.spoke(first.round_id, "a", "m2")
    assert state.view(first.round_id, "a", now=0.0).phase is Phase.GATHERING
    state.spoke(first.round_id, "a", "m1")
    assert "two sources call themselves 'a'" in state.view(first.round_id, "a", now=0.0).failure


def test_a_successor_may_join_before_its_predecessors_death_is_noticed() -> None:
    state = _round()
    state.join("a", "old", member="m1", version=1, engines=ENGINES, now=0.0)
    state.join("a", "new", member="m2", version=1, engines=ENGINES, now=0.1)
    state.died("old", "its process died", now=0.2)
    view = _join(state, "b", now=0.3)
    assert view.phase is Phase.OPENING
    state.fail(view.round_id, "b", "cancelled", now=0.4)
    later = _join(state, "b", now=0.5)
    assert state.view(later.round_id, "b", now=0.5 + 2 * SUCCESSION).phase is Phase.GATHERING


def test_who_does_not_know_whether_it_has_joined_can_leave() -> None:
    state = _round()
    assert state.leave("a", "m1", "cancelled") is None
    round_id = state.join("a", "one", member="m1", version=1, engines=ENGINES, now=0.0).round_id
    assert state.leave("a", "m2", "cancelled") is None
    view = state.leave("a", "m1", "cancelled")
    assert view is not None
    assert (view.round_id, view.phase, view.failure) == (round_id, Phase.FAILED, "cancelled")


# ------------------------------------------------------------------------ a source that will not come


def test_a_source_that_will_not_come_fails_the_round_that_waits_for_it() -> None:
    state = _round(num_sources=3)
    round_id = _join(state, "a").round_id
    state.absent("b", version=1, why="no manifest")
    view = state.view(round_id, "a", now=0.0)
    assert (view.phase, view.failed_source, view.failure, view.opened) == (Phase.FAILED, "b", "no manifest", False)
    late = _join(state, "c")
    assert (late.phase, late.failed_source, late.failure, late.opened) == (Phase.FAILED, "b", "no manifest", False)
    # All know of it now, and each may try again.
    assert [_join(state, source).phase for source in "cab"] == [Phase.GATHERING, Phase.GATHERING, Phase.OPENING]


def test_who_comes_after_a_source_that_will_not_is_told_once() -> None:
    state = _round(num_sources=3)
    state.absent("b", version=1, why="no manifest")
    for source in "ac":
        view = _join(state, source)
        assert (view.phase, view.failed_source, view.failure) == (Phase.FAILED, "b", "no manifest")
    assert _join(state, "a").phase is Phase.GATHERING


def test_a_source_that_comes_after_all_is_not_missed() -> None:
    state = _round()
    state.absent("b", version=1, why="no manifest")
    assert _join(state, "b").phase is Phase.GATHERING
    assert _join(state, "a").phase is Phase.OPENING


def test_that_a_source_will_not_come_may_be_said_twice() -> None:
    state = _round(num_sources=3)
    for why in ("no manifest", "no manifest", "something else"):
        state.absent("b", version=1, why=why)
    assert _join(state, "a").failure == "no manifest"
    state.absent("b", version=1, why="again")
    assert _join(state, "a").phase is Phase.GATHERING
    other = _round()
    round_id = _join(other, "a").round_id
    other.absent("b", version=1, why="no manifest")
    other.absent("b", version=1, why="no manifest")
    assert other.view(round_id, "a", now=0.0).failure == "no manifest"
    assert _join(other, "a").phase is Phase.GATHERING


def test_a_source_that_will_not_come_for_another_version_leaves_the_round_alone() -> None:
    state = _round()
    round_id = _join(state, "a", version=7).round_id
    state.absent("b", version=8, why="closed")
    assert state.view(round_id, "a", now=0.0).phase is Phase.GATHERING
    assert _join(state, "b", version=7).phase is Phase.OPENING
    state.absent("b", version=8, why="closed")  # a second call of its, that waits for the first
    state.opened(round_id, "a", now=0.0)
    assert state.view(round_id, "b", now=0.0).phase is Phase.SENDING
    state.fail(round_id, "a", "cancelled", now=0.0)
    assert _join(state, "a", version=8).failure == "closed"
    assert _join(state, "a", version=9).phase is Phase.GATHERING


def test_a_round_with_all_its_sources_is_not_failed_by_who_does_not_come() -> None:
    state = _round()
    round_id = _sending(state)
    state.absent("b", version=1, why="an earlier member of that name")
    state.absent("c", version=1, why="one too many")
    assert state.view(round_id, "a", now=0.0).phase is Phase.SENDING
    for source in "ab":
        state.sent(round_id, source, now=0.0)
    assert state.closed(round_id, "a", now=0.0).phase is Phase.DONE


def test_a_source_that_does_not_come_to_a_round_that_failed_already_fails_no_second_one() -> None:
    state = _round()
    state.fail(_join(state, "a").round_id, "a", "cancelled", now=0.0)
    state.absent("b", version=1, why="no manifest")
    assert _join(state, "a").phase is Phase.GATHERING
    assert _join(state, "b").phase is Phase.OPENING


def test_a_source_that_fails_before_a_second_try_is_told_of() -> None:
    state = _round()
    state.fail(_sending(state), "a", "cancelled", now=0.0)
    state.absent("b", version=1, why="no manifest")
    assert _join(state, "a").failure == "no manifest"
    assert _join(state, "a").phase is Phase.GATHERING


def test_only_some_versions_that_a_source_will_not_come_for_are_remembered() -> None:
    state = _round()
    for version in range(1, 20):
        state.absent("b", version=version, why="no manifest")
    assert _join(state, "a", version=19).phase is Phase.FAILED
    assert _join(state, "a", version=1).phase is Phase.GATHERING


def test_an_unknown_round_has_failed() -> None:
    assert _round().view("nobody", "a", now=0.0).phase is Phase.FAILED


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["join", "opened", "sent", "closed", "fail", "died", "view", "absent"]), st.sampled_from("abc")
    ),
    max_size=60,
)


@given(_STEPS)
def test_whatever_comes_a_version_is_done_only_with_every_part(steps: list[tuple[str, str]]) -> None:
    state = _round(num_sources=3)
    current = ""
    sent: dict[str, set[str]] = {}
    dead: set[str] = set()
    for now, (step, source) in enumerate(steps):
        at = now * 0.01
        if step == "join":
            current = _join(state, source, now=at, client=f"{source}{now}").round_id
        elif step == "died":
            state.died(f"{source}{now}", "died", now=at)
            dead.add(source)
        elif step == "absent":
            state.absent(source, version=1, why="why")
        elif current:
            before = state.view(current, source, now=at).phase
            args = ("why",) if step == "fail" else ()
            view = getattr(state, step)(current, source, *args, now=at)
            if step == "sent" and before is Phase.SENDING:
                sent.setdefault(current, set()).add(source)
            if view.phase is Phase.DONE:
                assert sent[current] == {"a", "b", "c"}
