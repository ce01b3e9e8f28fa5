"""`SGLangActor` with Ray actors that have miles's and slime's methods, in whole updates over real groups."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import save_file

from async_wsync.broadcaster import WeightBroadcaster
from async_wsync.engines.sglang.actor import SGLangActor
from async_wsync.engines.torch.engine import TorchEngine
from async_wsync.errors import BaseMissing, EngineDied, EngineFailed, EngineRejected, EngineTimeout, UpdateFailed
from async_wsync.sources import ModuleSource, StateDictSource
from async_wsync.transfer.checksum import model_digests
from async_wsync.types import Call, EngineState, PauseMode, WireFormat
from tests.support.actors import SyncEngine, a_model, killed
from tests.support.cluster import RayCluster
from tests.support.groups import joined
from tests.support.miles_actors import ray_value
from tests.support.sglang_actors import MilesServer, SlimeServer
from tests.support.sglang_updates import update_of

CALL = Call(source="test", fence=1, timeout=30.0)


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(16, 8, generator=generator),
        "b.weight": torch.randn(16, 8, generator=generator).bfloat16(),
        "c.weight": torch.randn(5, generator=generator),
    }


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}


@pytest.fixture(scope="module")
def actors(ray_cluster: RayCluster) -> Iterator[tuple[Any, Any]]:
    """One of each for the whole module: starting one takes seconds."""
    handles = MilesServer.remote(zeros()), SlimeServer.remote(zeros())
    yield handles
    for handle in handles:
        ray.kill(handle)


@pytest.fixture
async def miles(actors: tuple[Any, Any]) -> Any:
    await ray_value(actors[0].forget.remote(zeros()))
    return actors[0]


@pytest.fixture
async def slime(actors: tuple[Any, Any]) -> Any:
    await ray_value(actors[1].forget.remote(zeros()))
    return actors[1]


def broadcaster(*engines: Any, **options: Any) -> WeightBroadcaster:
    defaults: dict[str, Any] = {
        "lock": None,
        "backend": "gloo",
        "bucket_bytes": 600,
        "pause_mode": PauseMode.ABORT,
        "progress": False,
        "master_address": "127.0.0.1",
    }
    return WeightBroadcaster(engines, **{**defaults, **options})


def holds(seen: dict[str, Any], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(seen["weights"][name], tensor) for name, tensor in expected.items())


async def test_both_dialects_take_one_update(miles: Any, slime: Any) -> None:
    engines = [SGLangActor(miles, name="miles"), SGLangActor(slime, name="slime")]
    async with broadcaster(*engines) as sender:
        report = await sender.update_weights(StateDictSource(weights(1)), version=3)
        await sender.update_weights(StateDictSource(weights(2)), version=4)

    new, old = await ray_value(miles.look.remote()), await ray_value(slime.look.remote())
    assert report.num_buckets > 1
    assert {o.state for o in report.engines.values()} == {EngineState.CURRENT}
    assert any("not checked" in note for note in report.engines["miles"].notes)
    for seen in (new, old):
        assert holds(seen, weights(2))
        assert seen["version"] == "4"
        assert seen["paused"] is None
    assert new["paths"].count("/begin_weight_update") == 2
    assert new["session"] is None
    assert all(body["flush_cache"] is False and body["weight_version"] is None for _, body in new["seen"])
    versions = [body["weight_version"] for _, body in old["seen"]]
    assert [v for v in versions if v is not None] == ["3", "4"], "only the last bucket of each update carries it"


async def test_sglang_and_torch_engines_take_one_update_each_in_its_own_wire_format(miles: Any) -> None:
    model = a_model(seed=1)
    ray_engine = SyncEngine.remote(seed=2)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    await ray_value(miles.forget.remote({name: torch.zeros_like(tensor) for name, tensor in state.items()}))
    try:
        async with broadcaster(SGLangActor(miles, name="miles"), TorchEngine(ray_engine, name="torch")) as sender:
            report = await sender.update_weights(ModuleSource(model), version=3, verify="source")
        assert {o.state for o in report.engines.values()} == {EngineState.CURRENT}
        assert holds(await ray_value(miles.look.remote()), state)
        assert await ray_value(ray_engine.digests.remote()) == model_digests(state.items())
    finally:
        ray.kill(ray_engine)


async def test_a_pause_that_an_old_actor_cannot_do_is_refused(slime: Any) -> None:
    engine = SGLangActor(slime)
    with pytest.raises(EngineRejected, match="mode"):
        await engine.pause(CALL, PauseMode.KEEP)
    with pytest.raises(EngineRejected, match="drain"):
        await engine.pause(CALL, PauseMode.DRAIN)
    only_draft, update = SGLangActor(slime, selector="draft"), update_of(weights(1), group="g")
    with pytest.raises(EngineFailed, match="selector"):
        await only_draft.receive(CALL, update, update.buckets[0])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((200, {"success": False, "message": "partially updated"}), "partially updated"),
        ((400, {"success": False, "message": "no such group"}), "no such group"),
        ((200, None), "None"),
    ],
)
async def test_an_actor_that_did_not_take_a_bucket_is_named(miles: Any, answer: Any, words: str) -> None:
    async with broadcaster(SGLangActor(miles, name="miles 0")) as sender:
        await ray_value(miles.quirk.remote("/update_weights_from_distributed", answer))
        with pytest.raises(UpdateFailed, match=words) as caught:
            await sender.update_weights(StateDictSource(weights(1)), version=3)
        assert isinstance(caught.value.__cause__, EngineFailed)
        assert caught.value.__cause__.engine == "miles 0"
        assert (await ray_value(miles.look.remote()))["version"] == "default"

        await ray_value(miles.quirk.remote("/update_weights_from_distributed", None))
        await sender.update_weights(StateDictSource(weights(2)), version=4)
    assert holds(await ray_value(miles.look.remote()), weights(2))


async def test_with_its_checkpoint_names_are_checked_before_anything(miles: Any, tmp_path: Path) -> None:
    save_file(zeros(), tmp_path / "model.safetensors")
    wrong = {**weights(1), "d.weight": torch.zeros(3)}
    async with broadcaster(SGLangActor(miles, checkpoint=tmp_path)) as sender:
        with pytest.raises(EngineRejected) as caught:
            await sender.update_weights(StateDictSource(wrong), version=3)
        assert caught.value.unknown == ("d.weight",)
        assert "/pause_generation" not in (await ray_value(miles.look.remote()))["paths"]
        await sender.update_weights(StateDictSource(weights(1)), version=3)


async def test_a_part_goes_to_actors_that_hold_what_it_builds_on(miles: Any, slime: Any) -> None:
    """slime's can't say their version, and are believed as long as their process is the same."""
    part = StateDictSource({"a.weight": weights(2)["a.weight"]})
    async with broadcaster(SGLangActor(miles, name="miles"), SGLangActor(slime, name="slime")) as sender:
        with pytest.raises(BaseMissing, match="may leave tensors out"):
            await sender.update_weights(part, version=3, strict=False)
        await sender.update_weights(StateDictSource(weights(1)), version=3)
        assert (await sender.update_weights(part, version=4, strict=False)).behind == ()
        want = {**weights(1), "a.weight": weights(2)["a.weight"]}
        assert holds(await ray_value(miles.look.remote()), want)
        assert holds(await ray_value(slime.look.remote()), want)
        await ray_value(miles.update_weight_version.remote(weight_version="77"))
        report = await sender.update_weights(part, version=5, strict=False)
        assert report.behind == ("miles",)
        assert report.engines["miles"].state is EngineState.STALE


async def test_an_actors_group_of_the_same_name_left_behind_is_replaced(miles: Any) -> None:
    engine = SGLangActor(miles, name="miles 0")
    created = (400, {"success": False, "message": "The specified group name has already been created, use another"})
    await ray_value(miles.quirk.remote("/init_weights_update_group", [created]))
    group = await joined([engine], CALL, hello=False)
    paths = (await ray_value(miles.look.remote()))["paths"]
    assert paths.count("/init_weights_update_group") == 2
    assert paths.count("/destroy_weights_update_group") == 1
    await engine.leave(CALL, group.spec.name)
    await group.aclose(5.0)


async def test_a_silent_actor_has_not_said_hello(slime: Any) -> None:
    """One without a version call, too: an unknown process is one that answers and can't tell."""
    await ray_value(slime.quirk.remote("/continue_generation", partial(time.sleep, 1.5)))
    busy = slime.continue_generation.remote()
    with pytest.raises(EngineTimeout, match="slime 0"):
        await SGLangActor(slime, name="slime 0").hello(Call(source="test", fence=1, timeout=0.3))
    await ray_value(slime.quirk.remote("/continue_generation", None))  # comes after the busy call
    await ray_value(busy)


async def test_what_an_actor_lacks_is_a_rejection_and_no_busy_engine(slime: Any) -> None:
    class WithoutFlush:
        update_weights_from_distributed = slime.update_weights_from_distributed

    engine = SGLangActor(WithoutFlush(), name="no flush")
    with pytest.raises(EngineRejected, match="no method flush_cache"):
        await engine.flush(CALL)
    assert await engine.own_checksums(CALL) is None
    assert await engine.sample(CALL, ["a.weight"]) == {}


async def test_an_actors_checkpoint_is_read_once_for_a_manifest_and_may_be_given_relative(
    miles: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(zeros(), tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    engine, update = SGLangActor(miles, checkpoint="."), update_of(weights(1))
    monkeypatch.chdir("/")
    assert await engine.check(CALL, update) == ()
    (tmp_path / "model.safetensors").unlink()
    assert await engine.check(CALL, update) == ()
    again = SGLangActor(miles, checkpoint=tmp_path)
    assert any("no safetensors checkpoint at" in note for note in await again.check(CALL, update))
    await engine.aclose()
    await again.aclose()


async def test_a_restarted_actor_is_another_incarnation_and_a_dead_one_is_dead(ray_cluster: RayCluster) -> None:
    miles = MilesServer.remote(zeros())
    engine = SGLangActor(miles, name="miles 0")
    first = await engine.hello(CALL)
    assert (await engine.hello(CALL)).incarnation == first.incarnation
    ray.kill(miles, no_restart=False)
    deadline = time.monotonic() + 60
    incarnation = first.incarnation
    while incarnation == first.incarnation:  # the kill takes a moment, and so does the restart
        assert time.monotonic() < deadline
        with suppress(EngineFailed):
            incarnation = (await engine.hello(CALL)).incarnation
    await killed(miles)
    with pytest.raises(EngineDied, match="miles 0"):
        await engine.hello(CALL)
    await engine.aclose()


async def test_a_flattened_bucket_needs_a_method_that_takes_it(miles: Any) -> None:
    engine = SGLangActor(miles, wire_format=WireFormat.FLATTENED)
    async with broadcaster(engine) as sender:
        with pytest.raises(UpdateFailed, match="load_format"):
            await sender.update_weights(StateDictSource(weights(1)), version=3)
    assert holds(await ray_value(miles.look.remote()), zeros())


@pytest.mark.parametrize(
    ("options", "words"), [({"num_ranks": 0}, "num_ranks"), ({"wire_format": WireFormat.PACKED}, "packed")]
)
async def test_a_mistake_is_a_value_error_at_once(miles: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SGLangActor(miles, **options)
    with pytest.raises(ValueError, match="no method update_weights_from_distributed"):
        SGLangActor(os)
