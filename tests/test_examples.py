"""Each example runs as is, in a process and a Ray cluster of its own."""

from __future__ import annotations

import re

import pytest

from tests.support.cluster import ROOT
from tests.support.scripts import Scripts

SHOWS = {
    "minimal": [
        r"version 2: .* in 4 tensors",
        r"(?s)version 2, equal to the trainer's: True.*version 2, equal .*: True",
    ],
    "two_sources": [r"version 2: .* in 8 tensors", r"(?s)version 2, equal to both stages': True.*equal .*: True"],
    "own_engine": [r"my-engine: current, version 2", r"tokens by weight version: \{1: \d+, 2: \d+\}"],
    "survive_engine_crash": [
        r"rollout-1 was killed; the others had version 2 after \d+\.\d+ s",
        r"before its first update: .*rollout-1b stale",
        r"(?s)rollout-1b: current, version 2.*rollout-1b: current, version 3",
        r"samples from versions \[.*\b3\], 0 of them torn",
    ],
}


def test_every_example_is_tested() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == SHOWS.keys()


@pytest.mark.parametrize("name", SHOWS)
def test_the_example_runs_as_is(name: str, scripts: Scripts) -> None:
    shown = scripts.result(name)
    for pattern in SHOWS[name]:
        assert re.search(pattern, shown), shown
