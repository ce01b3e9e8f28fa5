"""What `update_weights` and `catch_up` raise where nothing was touched: UpdateFailed like all else, and it says so."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from async_wsync import (
    EngineState,
    Manifest,
    PhaseTimeout,
    RoundFailed,
    SourceError,
    TorchEngine,
    UpdateFailed,
    UpdateRound,
    WeightBroadcaster,
)
from async_wsync.runtime.threads import pause
from async_wsync.testing import Fault
from tests.support.fleet import LIMITS, Bar, Rig, a_source, failure_of, heals, set_limits


class Source:
    """A source whose manifest is whatever ``describe`` does."""

    casts = False

    def __init__(self, describe: Callable[[], Any]) -> None:
        self._describe = describe

    def manifest(self) -> Manifest:
        found: Manifest = self._describe()
        return found

    def tensors(self) -> Any:
        raise AssertionError("nobody asks for the tensors")


def raises(error: Exception) -> Callable[[], Any]:
    def describe() -> Any:
        raise error

    return describe


async def calls_since(rig: Rig, name: str, before: int) -> list[str]:
    return [s.verb for s in (await rig.seen(name))[before:]]


@pytest.mark.parametrize(
    ("describe", "cause"),
    [
        (raises(RuntimeError("the optimizer is not there yet")), SourceError),
        (raises(SourceError("half of the model is missing")), SourceError),
        (lambda: None, SourceError),
        (lambda: pause(30), PhaseTimeout),
    ],
    ids=["raises", "says", "lies", "hangs"],
)
async def test_a_source_that_fails_before_the_lock_is_the_cause_of_an_update_that_did_not_start(
    rig: Rig, describe: Callable[[], Any], cause: type[Exception]
) -> None:
    bar = Bar()
    limits = replace(LIMITS, total=1.0, close=0.2)
    async with rig.broadcaster(["e0"], progress=bar) as broadcaster:
        await broadcaster.update_weights(a_source(1), version=rig.next_version())
        version, before = broadcaster.version, len(await rig.seen("e0"))
        set_limits(broadcaster, limits)
        await broadcaster.add_engines([TorchEngine(rig.handles["e1"], name="e1")])
        updates: tuple[Callable[[], Any], ...] = (
            lambda: broadcaster.update_weights(Source(describe), version=rig.next_version()),
            lambda: broadcaster.catch_up(Source(describe)),
        )
        for update in updates:
            failure, _ = await failure_of(update())
            assert failure.started is False
            assert isinstance(failure.__cause__, cause)
            assert failure.at_fault == ()
            assert "not started" in str(failure)
            assert failure.outcomes["e1"].state is EngineState.STALE
        assert await calls_since(rig, "e0", before) == []
        assert broadcaster.version == version
        assert broadcaster.current_engines() == ("e0",)
        set_limits(broadcaster, LIMITS)
        await heals(rig, broadcaster)


async def test_a_callers_mistake_stays_a_value_error(rig: Rig) -> None:
    async with rig.broadcaster(["e0"]) as broadcaster:
        with pytest.raises(ValueError, match="two tensors of one name"):
            await broadcaster.update_weights(Source(raises(ValueError("two tensors of one name"))), version=1)


async def test_a_round_that_fails_before_it_opens_has_started_nothing(rig: Rig) -> None:
    round_ = UpdateRound.create(name=f"round-{uuid.uuid4().hex[:6]}", num_sources=2)
    async with rig.broadcaster(["e0"], timeouts=replace(LIMITS, lock=0.3)) as broadcaster:
        before = len(await rig.seen("e0"))
        update = broadcaster.update_weights(a_source(1), version=rig.next_version(), round=round_)
        failure, _ = await failure_of(update)
        assert isinstance(failure.__cause__, RoundFailed)
        assert failure.started is False
        assert "pause" not in await calls_since(rig, "e0", before)
        await heals(rig, broadcaster)


@pytest.mark.parametrize(
    ("at", "started"), [("hello", False), ("check", False), ("join", False), ("pause", True), ("end", True)]
)
async def test_an_update_has_started_once_an_engine_may_be_paused(rig: Rig, at: Any, started: bool) -> None:
    async with rig.broadcaster(["e0", "e1"]) as broadcaster:
        await broadcaster.update_weights(a_source(1), version=rig.next_version())
        if at == "join":
            await broadcaster.replace_engine("e1", TorchEngine(rig.handles["e1"], name="e1"))
        await rig.script("e0", Fault(do="raise_before", at=at))
        failure, _ = await failure_of(broadcaster.update_weights(a_source(2), version=rig.next_version()))
        assert await rig.fired("e0") == [f"raise_before at {at}"]
        assert failure.started is started
        await heals(rig, broadcaster)


async def test_nobody_to_update_is_a_failure_also_where_engines_may_be_dropped(rig: Rig) -> None:
    nobody = [TorchEngine(rig.handles["e0"], name="e0", method="ping")]
    broadcaster = WeightBroadcaster(nobody, lock=None, backend="gloo", on_engine_failure="drop", progress=False)
    with pytest.raises(UpdateFailed, match="hello") as caught:
        await broadcaster.update_weights(a_source(1), version=1)
    assert caught.value.started is False
    assert broadcaster.version is None
    await broadcaster.aclose()
