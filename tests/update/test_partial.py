"""Updates of a part of the model: whom they may reach, and what is left as it was."""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from async_wsync import (
    BaseMissing,
    BroadcastLock,
    EngineRejected,
    EngineState,
    ModuleSource,
    StateDictSource,
    TorchEngine,
    UpdateFailed,
    WeightBroadcaster,
)
from async_wsync.rounds.round import UpdateRound
from async_wsync.testing import Fault
from tests.support.fleet import LIMITS, NUM_BUCKETS, Rig, a_model, a_source, failure_of, heals

BASE, NEXT = 21, 22


def layer(number: int, seed: int = NEXT) -> StateDictSource:
    """One layer of the model of ``seed``."""
    state = a_model(seed).state_dict()
    return StateDictSource({name: state[name] for name in (f"{number}.weight", f"{number}.bias")})


def mixed(*numbers: int, base: int = BASE, seed: int = NEXT) -> nn.Module:
    """The model of ``base`` with these layers of ``seed``."""
    model, new = a_model(base), a_model(seed)
    for number in numbers:
        model[number].load_state_dict(new[number].state_dict())
    return model


async def verbs(rig: Rig, name: str, since: float) -> list[str]:
    return [seen.verb for seen in await rig.seen(name) if seen.at >= since]


async def brought_to_base(rig: Rig, broadcaster: WeightBroadcaster) -> None:
    await broadcaster.update_weights(a_source(BASE), version=rig.next_version())


async def was_left_alone(rig: Rig, name: str, since: float) -> bool:
    """It was asked, and neither paused nor sent to."""
    return set(await verbs(rig, name, since)) <= {"hello", "check", "leave"} and await rig.serves(name)


async def test_a_partial_update_leaves_out_a_newcomer_which_then_catches_up(rig: Rig) -> None:
    async with rig.broadcaster(["e1"]) as other:
        await heals(rig, other)
    async with rig.broadcaster(["e0"]) as broadcaster:
        await brought_to_base(rig, broadcaster)
        await broadcaster.add_engines(rig.engines(["e1"]))
        moment = time.time()
        report = await broadcaster.update_weights(layer(3), version=rig.next_version(), strict=False)
        assert report.behind == ("e1",)
        assert any("e1" in note and "catch_up" in note for note in report.notes)
        assert report.engines["e1"].state is EngineState.STALE
        assert any("leaves out" in note for note in report.engines["e1"].notes)
        assert "e1" in report.summary()
        assert report.to_dict()["behind"] == ["e1"]
        assert broadcaster.current_engines() == ("e0",)
        assert await rig.holds("e0", mixed(3))
        assert await was_left_alone(rig, "e1", moment)

        with pytest.raises(EngineRejected, match="e1"):
            await broadcaster.catch_up(layer(3))
        assert await was_left_alone(rig, "e1", moment)
        caught_up = await broadcaster.catch_up(ModuleSource(mixed(3)))
        assert caught_up is not None
        assert list(caught_up.engines) == ["e1"]
        assert await rig.holds("e1", mixed(3))
        report = await broadcaster.update_weights(layer(1), version=rig.next_version(), strict=False)
        assert (report.behind, broadcaster.current_engines()) == ((), ("e0", "e1"))
        assert await rig.holds("e0", mixed(1, 3))
        assert await rig.holds("e1", mixed(1, 3))


async def test_a_source_that_covers_everything_reaches_all_whatever_it_says_of_itself(rig: Rig) -> None:
    async with rig.broadcaster(["e0", "e1"]) as broadcaster:
        report = await broadcaster.update_weights(a_source(BASE), version=rig.next_version(), strict=False)
        assert (report.behind, broadcaster.current_engines()) == ((), ("e0", "e1"))


async def test_where_no_engine_holds_the_base_nothing_is_touched(rig: Rig) -> None:
    async with rig.broadcaster(["e0", "e1"]) as other:
        await heals(rig, other)
    async with rig.broadcaster(["e0", "e1"]) as broadcaster:
        moment = time.time()
        with pytest.raises(BaseMissing) as refused:
            await broadcaster.update_weights(layer(3), version=rig.next_version(), strict=False)
        assert len(refused.value.missing) == 2 * (NUM_BUCKETS - 1)
        assert len(refused.value.__notes__) >= 1, "both engines are named"
        assert broadcaster.version is None
        assert set(broadcaster.engine_states.values()) == {EngineState.STALE}
        assert [await was_left_alone(rig, name, moment) for name in ("e0", "e1")] == [True, True]


async def test_an_engine_that_was_stopped_through_a_full_update_is_left_out_of_a_partial_one(rig: Rig) -> None:
    limits = replace(LIMITS, begin=1.0, close=1.0)
    async with rig.broadcaster(["e0", "e1"], timeouts=limits, on_engine_failure="drop") as broadcaster:
        await broadcaster.update_weights(a_source(1), version=rig.next_version())
        rig.kill("e1", signal.SIGSTOP)
        missed = await broadcaster.update_weights(a_source(BASE), version=rig.next_version())
        assert missed.dropped == ("e1",)
        rig.kill("e1", signal.SIGCONT)
        moment = time.time()
        report = await broadcaster.update_weights(layer(3), version=rig.next_version(), strict=False)
        assert (report.behind, report.dropped) == (("e1",), ())
        assert await was_left_alone(rig, "e1", moment)
        assert await rig.holds("e1", a_model(1))
        assert await rig.holds("e0", mixed(3))
        assert await broadcaster.catch_up(ModuleSource(mixed(3))) is not None
        assert await rig.holds("e1", mixed(3))


async def test_a_replacement_is_left_out_of_a_partial_update(rig: Rig) -> None:
    """It answers under the old one's name."""
    async with rig.broadcaster(["e2"]) as other:
        await heals(rig, other)
    async with rig.broadcaster(["e0", "e1"]) as broadcaster:
        await brought_to_base(rig, broadcaster)
        await broadcaster.replace_engine("e1", TorchEngine(rig.handles["e2"], name="e1"))
        moment = time.time()
        report = await broadcaster.update_weights(layer(3), version=rig.next_version(), strict=False)
        assert report.behind == ("e1",)
        assert await was_left_alone(rig, "e2", moment)


@pytest.mark.parametrize("same_number", [True, False])
async def test_what_another_source_published_since_is_not_the_base(rig: Rig, same_number: bool) -> None:
    async with rig.broadcaster(["e0", "e1"]) as broadcaster, rig.broadcaster(["e1"]) as other:
        await brought_to_base(rig, broadcaster)
        theirs = rig.version if same_number else rig.next_version()
        await other.update_weights(a_source(5), version=theirs)
        report = await broadcaster.update_weights(layer(3), version=rig.next_version(), strict=False)
        assert report.behind == ("e1",)
        assert report.engines["e1"].version == theirs
        assert await rig.holds("e1", a_model(5))
        await heals(rig, broadcaster)


async def test_a_restarted_trainer_says_what_its_part_builds_on(rig: Rig) -> None:
    async with rig.broadcaster(["e0", "e1"]) as broadcaster:
        await brought_to_base(rig, broadcaster)
        version = rig.version
    async with rig.broadcaster(["e2"]) as other:
        await heals(rig, other)
    async with rig.broadcaster() as again:
        with pytest.raises(ValueError, match="strict=False"):
            await again.update_weights(a_source(BASE), version=rig.next_version(), base=version)
        report = await again.update_weights(layer(3), version=rig.next_version(), strict=False, base=version)
        assert report.behind == ("e2",)
        assert await rig.holds("e0", mixed(3))
        report = await again.update_weights(layer(1), version=rig.next_version(), strict=False)
        assert again.current_engines() == ("e0", "e1")
        assert await rig.holds("e1", mixed(1, 3))


async def test_a_dropped_engine_ends_no_partial_update_of_the_others(rig: Rig) -> None:
    """They are torn by the first attempt, and sent all of it again."""
    async with rig.broadcaster(on_engine_failure="drop") as broadcaster:
        await brought_to_base(rig, broadcaster)
        await rig.script("e1", Fault(do="raise_after"))
        report = await broadcaster.update_weights(layer(3), version=rig.next_version(), strict=False)
        assert await rig.fired("e1") == ["raise_after at receive"]
        assert (report.dropped, report.behind, report.rebuilds) == (("e1",), (), 1)
        assert broadcaster.current_engines() == ("e0", "e2")
        for name in ("e0", "e2"):
            assert await rig.holds(name, mixed(3))
        report = await broadcaster.update_weights(layer(1), version=rig.next_version(), strict=False)
        assert report.behind == ("e1",)
        assert report.engines["e1"].state is EngineState.TORN
        assert not await rig.serves("e1")
        await heals(rig, broadcaster)


async def test_a_torn_engine_refuses_a_part_before_anything_is_touched(rig: Rig) -> None:
    async with rig.broadcaster(["e1"]) as other:
        await heals(rig, other)
    async with rig.broadcaster(["e0"], num_buffers=1) as broadcaster:
        await brought_to_base(rig, broadcaster)
        await rig.script("e0", Fault(do="raise_after", bucket=1))
        await failure_of(broadcaster.update_weights(a_source(2), version=rig.next_version()))
        assert await rig.fired("e0") == ["raise_after at receive"]
        await broadcaster.add_engines(rig.engines(["e1"]))
        moment = time.time()
        with pytest.raises(EngineRejected, match="may hold a mix") as refused:
            await broadcaster.update_weights(layer(3), version=rig.next_version(), strict=False)
        assert refused.value.engine == "e0"
        assert broadcaster.engine_states == {"e0": EngineState.TORN, "e1": EngineState.STALE}
        assert await was_left_alone(rig, "e1", moment)
        assert set(await verbs(rig, "e0", moment)) == {"hello", "check"}
        await heals(rig, broadcaster)


@pytest.mark.parametrize("verb", ["pause", "begin", "end"])
async def test_a_refusal_after_something_was_touched_is_a_failure_of_the_update(rig: Rig, verb: str) -> None:
    async with rig.broadcaster(["e0", "e1"]) as broadcaster:
        await brought_to_base(rig, broadcaster)
        error = EngineRejected("no more", missing=("a",))
        await rig.script("e1", Fault(do="raise_after", at=verb, error=error))
        with pytest.raises(UpdateFailed) as failed:
            await broadcaster.update_weights(a_source(2), version=rig.next_version())
        assert await rig.fired("e1") == [f"raise_after at {verb}"]
        assert isinstance(failed.value.__cause__, EngineRejected)
        await heals(rig, broadcaster)


async def test_fewer_than_min_engines_on_the_base_is_a_refusal(rig: Rig) -> None:
    async with rig.broadcaster(["e0", "e1"], min_engines=2) as broadcaster:
        await brought_to_base(rig, broadcaster)
        await broadcaster.replace_engine("e1", TorchEngine(rig.handles["e2"], name="e1"))
        moment = time.time()
        with pytest.raises(BaseMissing, match="e1"):
            await broadcaster.update_weights(layer(3), version=rig.next_version(), strict=False)
        assert broadcaster.current_engines() == ("e0",)
        assert await was_left_alone(rig, "e0", moment)


# ------------------------------------------------------------------------------- rounds


async def in_a_round(
    sources: list[WeightBroadcaster], shared: UpdateRound, version: int, *parts: StateDictSource
) -> list[Any]:
    updates = [
        one.update_weights(part, version=version, strict=False, round=shared)
        for one, part in zip(sources, parts, strict=True)
    ]
    return await asyncio.gather(*updates, return_exceptions=True)


async def test_in_a_round_what_all_send_together_counts(rig: Rig, lock: BroadcastLock) -> None:
    shared = UpdateRound.create(name=f"round-{uuid.uuid4().hex[:8]}", num_sources=2)
    state = a_model(BASE).state_dict()
    halves = [StateDictSource({n: t for n, t in state.items() if int(n[0]) % 2 == i}) for i in range(2)]
    async with rig.broadcaster(["e2"]) as other:
        await heals(rig, other)
    async with (
        rig.broadcaster(["e0", "e1"], lock=lock, name="first") as first,
        rig.broadcaster(["e0", "e1"], lock=lock, name="second") as second,
    ):
        both = [first, second]
        alone = await in_a_round(both, shared, rig.next_version(), halves[0], layer(2))
        assert all(isinstance(outcome, Exception) for outcome in alone), alone
        together = await in_a_round(both, shared, rig.next_version(), *halves)
        assert [report.behind for report in together] == [(), ()]
        assert await rig.holds("e1", a_model(BASE))
        parts = await in_a_round(both, shared, rig.next_version(), layer(1), layer(3))
        assert [report.behind for report in parts] == [(), ()]
        assert await rig.holds("e0", mixed(1, 3))

        for one in both:
            await one.replace_engine("e1", TorchEngine(rig.handles["e2"], name="e1"))
        moment = time.time()
        refused = await in_a_round(both, shared, rig.next_version(), layer(0), layer(4))
        assert all(isinstance(outcome, UpdateFailed | EngineRejected) for outcome in refused), refused
        assert any("e1" in str(outcome) and "leaves out" in str(outcome) for outcome in refused), refused
        for name in ("e0", "e2"):
            assert await was_left_alone(rig, name, moment)
        assert await rig.holds("e0", mixed(1, 3))
