"""When the demo calls itself a success, and what its table says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from async_wsync.demo.result import DemoResult, EngineResult, UpdateResult
from async_wsync.demo.run import DemoOptions
from async_wsync.report import UpdateReport


def engine(name: str, *, version: int = 2, equal: bool = True) -> EngineResult:
    return EngineResult(
        name=name,
        version=version,
        checksum="0123456789abcdef",
        equal=equal,
        num_samples=9,
        versions_sampled=(1, 2, 3, 5),
    )


def result(*engines: EngineResult) -> DemoResult:
    report = UpdateReport(version=2, nbytes=10, num_tensors=1, num_buckets=1, seconds=0.5)
    return DemoResult(
        updates=(UpdateResult(version=2, loss=1.5, reports=(report,), loop_gap=0.004),),
        engines=engines,
        max_loop_gap=0.004,
        seconds=90.0,
    )


def test_equal_checksums_on_the_last_version_are_a_success() -> None:
    assert result(engine("a"), engine("b")).ok


def test_one_differing_checksum_is_a_failure_and_shows() -> None:
    bad = result(engine("a"), engine("b", equal=False))
    assert not bad.ok
    assert not bad.to_dict()["checksums_match"]
    assert "NO" in bad.table()


def test_an_engine_left_on_an_older_version_is_a_failure() -> None:
    assert not result(engine("a"), engine("b", version=1)).ok


def test_the_table_has_a_row_an_engine_and_names_the_longest_gap() -> None:
    lines = result(engine("a"), replace(engine("rollout-1"), versions_sampled=())).table().splitlines()
    assert lines[0].split("  ")[0] == "engine"
    assert lines[1].endswith("1-3, 5")
    assert lines[2].endswith("none")
    assert "longest event loop gap during an update 4.0 ms" in lines[3]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engines": 0}, "engines must be at least 1, got 0"),
        ({"sources": 3}, "sources must be 1 or 2, got 3"),
        ({"kill_engine_at": 30}, "kill-engine-at must be from 1 to 20, got 30"),
        ({"kill_engine_at": 3, "engines": 1}, "needs at least 2 engines"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DemoOptions(**options)
