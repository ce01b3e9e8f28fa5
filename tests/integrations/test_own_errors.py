"""Errors that are also of the class that an engine raised."""

from __future__ import annotations

import asyncio
import pickle
import subprocess

import pytest

from async_wsync.errors import EngineFailed, EngineTimeout
from async_wsync.integrations.own_errors import as_its_cause


class Custom(Exception):
    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"code {code}")
        self.code, self.hint = code, hint


class Selfish(Exception):
    def __new__(cls, code: int) -> Selfish:
        return super().__new__(cls)


def an_error(cause: BaseException | None) -> EngineFailed:
    error = EngineFailed("e0: it failed", engine="e0", phase="broadcast", bucket=3)
    error.add_note("a note")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "cause",
    [
        RuntimeError("out of memory"),
        KeyError("lm_head"),
        OSError(28, "No space left on device"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        ImportError("no module", name="numpy"),
        SyntaxError("bad"),
        TimeoutError("late"),
        StopIteration(3),
        subprocess.CalledProcessError(2, "nvidia-smi"),
    ],
    ids=lambda cause: type(cause).__name__,
)
def test_an_error_is_of_both_classes_here_and_after_pickling(cause: Exception) -> None:
    error = as_its_cause(an_error(cause))
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert isinstance(one, EngineFailed)
        assert isinstance(one, type(cause))
        assert type(one) is type(error)
        assert str(one) == "e0: it failed"
        assert (one.engine, one.phase, one.bucket) == ("e0", "broadcast", 3)
        assert one.__notes__ == ["a note"]
        assert type(one.__cause__) is type(cause)
        assert str(one.__cause__) == str(cause)


def test_the_facts_of_a_class_of_theirs_are_there_and_one_that_cannot_travel_leaves_ours() -> None:
    error = as_its_cause(an_error(Custom(7, hint="reboot")))
    assert isinstance(error, Custom)
    assert (error.code, error.hint, error.engine) == (7, "reboot", "e0")
    copy = pickle.loads(pickle.dumps(error))  # a Custom cannot be rebuilt from its message
    assert type(copy) is EngineFailed
    assert (copy.engine, str(copy)) == ("e0", "e0: it failed")


def test_a_kind_of_ours_stays_that_kind() -> None:
    error = EngineTimeout("e0: late", engine="e0", field="bucket")
    error.__cause__ = ValueError("x")
    both = as_its_cause(error)
    assert isinstance(both, EngineTimeout)
    assert isinstance(both, ValueError)
    assert both.field == "bucket"


@pytest.mark.parametrize(
    "cause",
    [None, asyncio.CancelledError(), SystemExit(1), EngineFailed("inner"), Selfish(1), Exception("plain")],
    ids=repr,
)
def test_what_cannot_or_must_not_be_combined_stays_as_it_is(cause: BaseException | None) -> None:
    error = an_error(cause)
    assert as_its_cause(error) is error
