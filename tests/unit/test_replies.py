"""Every shape in which an engine says that it failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from async_wsync.engines.replies import failure_in, short


@dataclass
class Output:
    success: Any
    message: str = ""


@dataclass
class Response:
    status_code: int
    text: str = ""


@pytest.mark.parametrize(
    "reply",
    [
        True,
        (True, "Succeeded"),
        [True, "Succeeded", 0],
        {"success": True, "message": "Succeeded"},
        {"success": [True, True]},
        Output(True, "fine"),
        Response(200),
        [Output(True), Output(True)],
        [{"success": True}, (True, "ok")],
        [True, True],
        "Success",
        {"status": "ok"},
        {},
    ],
    ids=repr,
)
def test_a_success_is_a_success(reply: object) -> None:
    assert failure_in(reply) is None


@pytest.mark.parametrize(
    ("reply", "word"),
    [
        (False, "False"),
        ((False, "no such group"), "no such group"),
        ([False, "no such group"], "no such group"),
        ({"success": False, "message": "shape mismatch"}, "shape mismatch"),
        ({"success": False}, "success: False"),
        ({"success": None}, "success: None"),
        ({"success": [True, False], "message": "rank 1"}, "rank 1"),
        ({"success": []}, "success: []"),
        ({"error": "out of memory"}, "out of memory"),
        ({"status": "error", "message": "bad dtype"}, "bad dtype"),
        ({"status_code": 400, "message": "begin first"}, "begin first"),
        (Output(False, "partially updated"), "partially updated"),
        (Response(400, "does not exist"), "400: does not exist"),
        (Response(503), "503"),
        ([Output(True), Output(False, "rank 1 is lost")], "rank 1 is lost"),
        ([True, False], "False"),
        ([{"success": True}, {"success": False, "message": "tp 1"}], "tp 1"),
        (RuntimeError("returned, not raised"), "returned, not raised"),
        (None, "None"),
        ([None, None], "None"),
    ],
    ids=repr,
)
def test_a_failure_is_seen_in_any_shape_and_keeps_its_words(reply: object, word: str) -> None:
    failure = failure_in(reply)
    assert failure is not None
    assert word in failure


def test_none_is_fine_where_a_method_returns_nothing_by_design() -> None:
    assert failure_in(None, none_is_failure=False) is None
    assert failure_in([None, None], none_is_failure=False) is None
    assert failure_in([None, False], none_is_failure=False) is not None


def test_long_words_are_cut() -> None:
    assert len(short("x" * 10_000)) == 300
    assert short("a\n  b") == "a b"
