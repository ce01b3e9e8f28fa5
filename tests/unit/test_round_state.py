"""The rules of a round, without Ray or a clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_wsync.core.round_state import SUCCESSION, Phase, RoundState, View

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


def test_sources_that_disagree_are_told_so() -> None:
    state = _round()
    _join(state, "a", version=1)
    with pytest.raises(ValueError, match="version 2"):
        _join(state, "b", version=2)
    with pytest.raises(ValueError, match="sends to"):
        state.join("b", "process-of-b", version=1, engines=("e0",), now=0.0)


def test_a_source_too_many_is_refused_while_a_round_runs() -> None:
    state = _round()
    _sending(state)
    with pytest.raises(ValueError, match="already runs"):
        _join(state, "c")


def test_an_unknown_round_has_failed() -> None:
    assert _round().view("nobody", "a", now=0.0).phase is Phase.FAILED


_STEPS = st.lists(
    st.tuples(st.sampled_from(["join", "opened", "sent", "closed", "fail", "died", "view"]), st.sampled_from("abc")),
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
            try:
                current = _join(state, source, now=at, client=f"{source}{now}").round_id
            except ValueError:
                continue
        elif step == "died":
            state.died(f"{source}{now}", "died", now=at)
            dead.add(source)
        elif current:
            before = state.view(current, source, now=at).phase
            args = ("why",) if step == "fail" else ()
            view = getattr(state, step)(current, source, *args, now=at)
            if step == "sent" and before is Phase.SENDING:
                sent.setdefault(current, set()).add(source)
            if view.phase is Phase.DONE:
                assert sent[current] == {"a", "b", "c"}
