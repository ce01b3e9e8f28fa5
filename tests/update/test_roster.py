"""What a broadcaster believes of an engine, and what lowers it."""

from __future__ import annotations

import pytest

from async_wsync.types import Base, EngineInfo, EngineState
from async_wsync.update.roster import Roster

OURS = Base(version=7, update_id="ours")


def says(**facts: object) -> EngineInfo:
    return EngineInfo(**{"incarnation": "one", "version": 7, "update_id": "ours", **facts})  # type: ignore[arg-type]


def a_roster() -> Roster:
    """An engine that was brought to version 7 by an update of ours."""
    roster = Roster()
    record = roster.add("e0")
    record.answered_hello(says(version=None, update_id=None))
    record.begin()
    roster.published(7, ["e0"], update_id="ours")
    return roster


@pytest.mark.parametrize(
    ("info", "state", "version"),
    [
        (says(), EngineState.CURRENT, 7),
        (says(version=None, update_id=None), EngineState.CURRENT, 7),  # it can't tell
        (says(version=9, update_id="theirs"), EngineState.STALE, 9),
        (says(update_id="theirs"), EngineState.STALE, 7),
        (says(state=EngineState.TORN), EngineState.TORN, None),
        (says(incarnation="two", version=None, update_id=None), EngineState.STALE, None),
        (says(incarnation="two"), EngineState.STALE, 7),
    ],
)
def test_what_an_engine_says_only_lowers_what_we_believe_of_it(
    info: EngineInfo, state: EngineState, version: int | None
) -> None:
    roster = a_roster()
    roster["e0"].answered_hello(info)
    assert (roster["e0"].state, roster["e0"].version) == (state, version)
    assert roster.bases(7, ["e0"]) == ({"e0": OURS} if state is EngineState.CURRENT else {})


def test_only_what_we_brought_it_to_is_a_base_unless_engines_are_believed() -> None:
    roster = a_roster()
    newcomer = roster.add("e1")
    newcomer.answered_hello(says(incarnation="two", update_id="theirs"))
    assert roster.bases(7, ["e0", "e1"]) == {"e0": OURS}
    assert set(roster.bases(7, ["e0", "e1"], by_us=False)) == {"e0", "e1"}
    assert roster.bases(6, ["e0", "e1"]) == roster.bases(6, ["e0", "e1"], by_us=False) == {}
    assert roster.bases(None, ["e0", "e1"]) == {}


def test_an_engine_that_was_touched_or_lost_holds_no_base() -> None:
    roster = a_roster()
    roster["e0"].begin()
    roster["e0"].fail()
    assert roster.bases(7, ["e0"]) == {"e0": OURS}, "untouched"
    roster["e0"].begin()
    roster["e0"].touched = True
    roster["e0"].fail()
    assert roster.bases(7, ["e0"]) == {}
    roster["e0"].lose()
    roster["e0"].answered_hello(says())
    assert roster["e0"].state is EngineState.STALE
    assert roster.bases(7, ["e0"]) == {}
