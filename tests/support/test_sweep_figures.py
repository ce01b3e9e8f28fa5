"""What a sweep calls wrong, and what it tries once more."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.support.sweep_figures import PROMISED, Figures, Points, Verdict


@dataclass
class Replay:
    """What a replay takes, in seconds; whether its fault struck; what else is wrong with it."""

    seconds: float = 0.1
    hit: bool = True
    wrong: str = ""


def swept(replays: dict[int, list[Replay]]) -> tuple[Figures, list[int]]:
    """The figures of a sweep whose points go as given, and the points in the order they were tried in."""
    figures, points, tried = Figures("a fault"), Points(replays), []
    for point in points:
        replay = replays[point][tried.count(point)]
        tried.append(point)
        verdict = Verdict(f"point {point}")
        verdict.took(replay.seconds, limit=PROMISED.first_failure)
        verdict.check(not replay.wrong, replay.wrong)
        figures.settle(verdict, points, hit=replay.hit)
    return figures, tried


def test_a_point_in_time_is_tried_once() -> None:
    figures, tried = swept({1: [Replay(0.2)], 2: [Replay(0.9)]})
    assert tried == [1, 2]
    assert (figures.runs, figures.fired, figures.wrong, figures.retried) == (2, 2, [], [])
    assert figures.slowest == 0.9


def test_what_was_late_once_is_tried_again_and_told() -> None:
    figures, tried = swept({1: [Replay(1.2), Replay(0.3)], 2: [Replay()]})
    assert tried == [1, 1, 2]
    assert figures.wrong == []
    assert figures.retried == ["point 1: 1.20 s, above 1.00"]
    assert figures.slowest == 0.3


def test_what_is_late_twice_is_wrong() -> None:
    figures, tried = swept({1: [Replay(1.2), Replay(1.3)]})
    assert tried == [1, 1]
    assert figures.wrong == ["point 1: 1.20 s, above 1.00", "point 1: 1.30 s, above 1.00"]
    assert figures.retried == []
    assert figures.slowest == 1.3


def test_a_second_try_that_was_not_hit_excuses_nothing() -> None:
    figures, _ = swept({1: [Replay(1.2), Replay(0.1, hit=False)]})
    assert figures.wrong == ["point 1: 1.20 s, above 1.00"]


def test_what_is_wrong_beside_being_late_stays_wrong_however_the_second_try_ends() -> None:
    figures, tried = swept({1: [Replay(1.2, wrong="lock held"), Replay()], 2: [Replay(wrong="torn")]})
    assert tried == [1, 1, 2]
    assert figures.wrong == ["point 1: lock held", "point 2: torn"]
    figures, _ = swept({1: [Replay(1.2), Replay(wrong="lock held")]})
    assert figures.wrong == ["point 1: lock held"]


@pytest.mark.parametrize(("gap", "late"), [(0.024, False), (0.026, True)])
def test_the_loop_may_be_held_for_as_long_as_promised_above_an_idle_processs_gaps(gap: float, late: bool) -> None:
    verdict = Verdict("point 1")
    verdict.held_the_loop((gap, 0.005), limit=PROMISED.loop_gap)
    assert bool(verdict.late) is late


def test_the_promised_limits_are_those_of_the_guarantees() -> None:
    assert (PROMISED.first_failure, PROMISED.loop_gap) == (1.0, 0.020)
