"""Bars: in bytes, closed once, harmless when broken (field cases B1 and B2)."""

from __future__ import annotations

import io
import logging
import threading

import pytest

from async_wsync.progress import CallableProgress, NoProgress, ProgressState, SafeProgress, TqdmProgress, make_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Recorder:
    """A bar that keeps what it was told, and raises in the method named ``broken``."""

    def __init__(self, broken: str = "") -> None:
        self.calls: list[str] = []
        self.broken = broken

    def _note(self, verb: str) -> None:
        self.calls.append(verb)
        if verb.split()[0] == self.broken:
            raise RuntimeError("the bar broke")

    def start(self, *, version: int, total_bytes: int, num_buckets: int) -> None:
        self._note(f"start {version}")

    def advance(self, *, nbytes: int, bucket: int) -> None:
        self._note(f"advance {nbytes}")

    def close(self, *, status: str) -> None:
        self._note(f"close {status}")


def test_the_bar_counts_bytes_against_the_real_total() -> None:
    file = Terminal()
    bar = TqdmProgress(file=file)
    bar.start(version=7, total_bytes=4_000_000, num_buckets=2)
    bar.advance(nbytes=1_000_000, bucket=0)
    bar.advance(nbytes=3_000_000, bucket=1)
    bar.close(status="done")
    last = file.getvalue().split("\r")[-1]
    assert "weights v7: 100%" in last
    assert "4.00M/4.00M" in last
    assert last.count("\n") == 1


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_a_bar_that_did_not_finish_says_why_and_stays_where_it_was(status: str) -> None:
    file = Terminal()
    bar = TqdmProgress(file=file, leave=False)
    bar.start(version=7, total_bytes=4_000_000, num_buckets=2)
    bar.advance(nbytes=1_000_000, bucket=0)
    bar.close(status=status)
    last = file.getvalue().split("\r")[-1]
    assert f"weights v7 {status}:  25%" in last


def test_a_bar_starts_no_thread() -> None:
    before = threading.active_count()
    bar = TqdmProgress(file=Terminal())
    bar.start(version=1, total_bytes=10, num_buckets=1)
    assert threading.active_count() == before
    bar.close(status="done")


def test_a_log_file_gets_a_few_lines_not_a_flood() -> None:
    file = io.StringIO()
    bar = TqdmProgress(file=file)
    bar.start(version=1, total_bytes=10_000, num_buckets=10_000)
    for bucket in range(10_000):
        bar.advance(nbytes=1, bucket=bucket)
    bar.close(status="done")
    assert file.getvalue().count("\r") == 1
    assert "100%" in file.getvalue()


def test_a_log_file_gets_nothing_of_a_short_bar_that_does_not_stay() -> None:
    file = io.StringIO()
    bar = TqdmProgress(file=file, leave=False)
    bar.start(version=1, total_bytes=10, num_buckets=1)
    bar.advance(nbytes=10, bucket=0)
    bar.close(status="done")
    assert file.getvalue() == ""


def test_a_callable_hears_of_the_start_each_bucket_and_the_end() -> None:
    heard: list[ProgressState] = []
    bar = make_progress(heard.append)
    bar.start(version=3, total_bytes=100, num_buckets=2)
    bar.advance(nbytes=40, bucket=0)
    bar.advance(nbytes=60, bucket=1)
    bar.close(status="done")
    assert [(state.done_bytes, state.done_buckets, state.status) for state in heard] == [
        (0, 0, "running"),
        (40, 1, "running"),
        (100, 2, "running"),
        (100, 2, "done"),
    ]
    assert {(state.version, state.total_bytes) for state in heard} == {(3, 100)}
    assert heard[1].fraction == 0.4


def test_a_bar_closes_exactly_once_for_each_start() -> None:
    inner = Recorder()
    bar = SafeProgress(inner)
    bar.close(status="done")
    bar.start(version=1, total_bytes=1, num_buckets=1)
    bar.close(status="failed")
    bar.close(status="done")
    bar.advance(nbytes=1, bucket=0)
    bar.start(version=2, total_bytes=1, num_buckets=1)
    bar.start(version=3, total_bytes=1, num_buckets=1)
    bar.close(status="done")
    assert inner.calls == ["start 1", "close failed", "start 2", "close failed", "start 3", "close done"]


@pytest.mark.parametrize("verb", ["start", "advance", "close"])
def test_a_broken_bar_is_logged_once_and_never_raises(verb: str, caplog: pytest.LogCaptureFixture) -> None:
    inner = Recorder(broken=verb)
    bar = SafeProgress(inner)
    with caplog.at_level(logging.WARNING):
        for version in (1, 2):
            bar.start(version=version, total_bytes=3, num_buckets=3)
            for bucket in range(3):
                bar.advance(nbytes=1, bucket=bucket)
            bar.close(status="done")
    assert any(call.startswith(verb) for call in inner.calls), "the fault did not fire"
    assert [call for call in inner.calls if call.startswith("close")] == ["close done"] * 2
    assert len(caplog.records) == 1
    assert "the bar broke" in caplog.text


def test_the_progress_argument_takes_a_switch_a_bar_or_a_callable() -> None:
    own = Recorder()
    assert isinstance(make_progress(True)._inner, TqdmProgress)
    assert isinstance(make_progress(False)._inner, NoProgress)
    assert make_progress(own)._inner is own
    assert isinstance(make_progress(print)._inner, CallableProgress)
    wrapped = SafeProgress(own)
    assert make_progress(wrapped) is wrapped
    with pytest.raises(ValueError, match="progress must be"):
        make_progress(3)  # type: ignore[arg-type]
