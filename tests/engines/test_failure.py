"""An engine's exception on its way to the source, as plain values."""

from __future__ import annotations

import json

import pytest

from async_wsync.engines.failure import EngineSideError, Failure
from async_wsync.errors import (
    BaseMissing,
    BroadcastFailed,
    EngineBusy,
    EngineFailed,
    RendezvousError,
    StaleCall,
    StaleFence,
)


class Refused(EngineBusy):
    """An engine's own kind of an error of ours."""


class NoGroup(Exception):
    """An engine's own error with an attribute of ours."""

    bucket = 1


def rebuilt(error: Exception) -> EngineFailed:
    failure = Failure.from_json(json.loads(json.dumps(Failure.of(error).to_json())))
    return failure.rebuild(engine="e0", phase="receive", bucket=3)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EngineBusy("not now"), EngineBusy),
        (Refused("not now"), EngineBusy),
        (StaleFence("late", fence=1, seen=2), StaleCall),
        (RendezvousError("no source", group="g", waiting_for=("e1",)), EngineFailed),
        (NoGroup("g"), EngineFailed),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_plain_values_give_the_nearest_kind_of_error(error: Exception, kind: type[EngineFailed]) -> None:
    found = rebuilt(error)
    assert type(found) is kind
    assert (found.engine, found.phase, found.bucket) == ("e0", "receive", 3)
    assert str(found).startswith("e0: receive 3: ")
    assert str(error) in str(found)
    assert isinstance(found.__cause__, EngineSideError), "nothing is unpickled"
    assert any("Traceback at the engine" in note for note in found.__cause__.__notes__)


def test_plain_values_keep_the_facts_of_an_error() -> None:
    found = rebuilt(BaseMissing("a part", missing=("a", "b"), holds=3, torn=True))
    assert isinstance(found, BaseMissing)
    assert (found.missing, found.holds, found.torn) == (("a", "b"), 3, True)
    stale = rebuilt(StaleFence("late", fence=1, seen=2))
    assert isinstance(stale, StaleFence)
    assert (stale.fence, stale.seen) == (1, 2)


@pytest.mark.parametrize(
    ("error", "collective"),
    [
        (EngineFailed("broken off before its turn", is_collective=True), True),
        (RendezvousError("another did not come", is_collective=True), True),
        (BroadcastFailed("the broadcast broke"), True),
        (EngineFailed("no bucket 3"), False),
        (RendezvousError("refused by the source"), False),
        (KeyError("lm_head"), False),
    ],
    ids=repr,
)
def test_an_error_of_ours_says_itself_whether_another_member_is_at_fault(error: Exception, collective: bool) -> None:
    assert rebuilt(error).is_collective is collective
    assert Failure.of(error).rebuild(engine="e0", phase="end").is_collective is collective
