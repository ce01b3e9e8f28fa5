"""Results that are found again by the objects they were made of."""

from __future__ import annotations

import gc
from concurrent.futures import Future

import pytest

from async_wsync.transfer.layout import lay_out
from async_wsync.transfer.plan import plan_buckets
from async_wsync.transfer.recall import recall
from async_wsync.types import Manifest, ParamMeta, WireFormat


def test_the_last_results_are_kept_and_older_ones_made_anew() -> None:
    made: list[str] = []

    @recall(2, lambda word: word)
    def shout(word: str) -> str:
        made.append(word)
        return word.upper()

    assert [shout(word) for word in "abab"] == ["A", "B", "A", "B"]
    assert shout("c") == "C"
    assert shout("a") == "A"
    assert made == ["a", "b", "c", "a"]


def test_an_id_is_never_that_of_another_object() -> None:
    @recall(3, lambda items: id(items))
    def total(items: list[int]) -> int:
        return sum(items)

    for n in range(200):
        assert total([n, 1]) == n + 1  # the list is gone at once, and its address free, unless it is kept
        gc.collect(0)


def test_an_error_is_not_kept() -> None:
    answers = [ValueError("no"), "yes"]

    @recall(2, lambda: 0)
    def ask() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(ValueError, match="no"):
        ask()
    assert ask() == "yes"


def test_a_future_that_failed_is_not_kept() -> None:
    calls: list[Future[int]] = []

    @recall(4, lambda number: number)
    def begin(number: int) -> Future[int]:
        calls.append(Future())
        return calls[-1]

    first = begin(1)
    assert begin(1) is first  # it is under way
    first.set_exception(MemoryError())
    second = begin(1)
    with pytest.raises(MemoryError):
        first.result()
    second.set_result(7)
    assert begin(1) is second
    assert len(calls) == 2


def test_plans_and_layouts_of_one_manifest_are_the_same_objects_and_of_an_equal_one_equal() -> None:
    def manifest() -> Manifest:
        return Manifest(params=tuple(ParamMeta(name=str(i), dtype="uint8", shape=(i,)) for i in range(5)))

    one, other = manifest(), manifest()
    plan = plan_buckets(one, bucket_bytes=4)
    assert plan_buckets(one, bucket_bytes=4) is plan
    assert plan_buckets(other, bucket_bytes=4) == plan
    assert plan_buckets(one, bucket_bytes=50) != plan
    assert plan_buckets(one, bucket_bytes=4, atomic_groups=[".*"]) != plan
    layout = lay_out(plan[0], WireFormat.PACKED)
    assert lay_out(plan[0], WireFormat.PACKED) is layout
    assert lay_out(plan[0], WireFormat.PER_TENSOR) != layout
