"""`SGLangServer` against a small HTTP server with SGLang's manners and traps, over real gloo groups."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file

from async_wsync.broadcaster import WeightBroadcaster
from async_wsync.engines.sglang.server import SGLangServer
from async_wsync.errors import (
    BaseMissing,
    EngineBusy,
    EngineDied,
    EngineFailed,
    EngineRejected,
    EngineTimeout,
    UpdateFailed,
)
from async_wsync.groups.source_end import UpdateGroup
from async_wsync.sources import StateDictSource
from async_wsync.transfer.layout import lay_out
from async_wsync.transfer.pack import stage
from async_wsync.types import Base, Call, EngineState, PauseMode, WireFormat
from tests.support.groups import joined
from tests.support.sglang_updates import tensors, update_of
from tests.support.small_sglang import SmallSGLang
from tests.support.updates import manifest_of

CALL = Call(source="test", fence=1, timeout=20.0)


@pytest.fixture
def small() -> Iterator[SmallSGLang]:
    with SmallSGLang(weights={name: torch.zeros_like(tensor) for name, tensor in tensors().items()}) as server:
        yield server


Adapt = Callable[..., SGLangServer]


@pytest.fixture
async def adapt(small: SmallSGLang) -> AsyncIterator[Adapt]:
    made: list[SGLangServer] = []

    def make(**options: Any) -> SGLangServer:
        made.append(SGLangServer(small.url, **options))
        return made[-1]

    yield make
    for engine in made:
        await engine.aclose()


async def push(engine: SGLangServer, group: UpdateGroup, weights: dict[str, torch.Tensor], version: int = 5) -> None:
    """One whole update, as the broadcaster makes it."""
    update = update_of(weights, group=group.spec.name, version=version)
    await engine.check(CALL, update)
    await engine.pause(CALL, PauseMode.RECOMPUTE)
    await engine.flush(CALL)
    await engine.begin(CALL, update)
    for bucket in update.buckets:
        receiving = asyncio.create_task(engine.receive(CALL, update, bucket))
        names = {meta.name: weights[meta.name] for meta in bucket.params}
        await group.broadcast(stage(lay_out(bucket, engine.wire_format), names))
        await receiving
    await engine.end(CALL, update)
    await engine.publish(CALL, update.version)
    await engine.resume(CALL)


@pytest.mark.parametrize("wire", [WireFormat.FLATTENED, WireFormat.PER_TENSOR])
async def test_a_whole_update_arrives_and_says_all_that_sglang_would_guess_wrong(
    small: SmallSGLang, adapt: Adapt, wire: WireFormat
) -> None:
    engine, weights = adapt(wire_format=wire), tensors(2)
    group = await joined([engine], CALL, hello=False)

    await push(engine, group, weights)

    assert all(torch.equal(small.weights[name], tensor) for name, tensor in weights.items())
    assert small.version == "5"
    assert small.paused is None
    assert small.session is None
    buckets = small.bodies("/update_weights_from_distributed")
    assert len(buckets) > 1
    for body in buckets:
        assert len(body["names"]) == len(body["dtypes"]) == len(body["shapes"]) > 0
        assert body["flush_cache"] is False
        assert body["abort_all_requests"] is False
        assert body["selector"] == "all"
        assert "weight_version" not in body, "the version would count before the update is whole"
        assert body.get("load_format") == (wire.value if wire is WireFormat.FLATTENED else None)
    assert small.bodies("/update_weight_version") == [{"new_version": "5", "abort_all_requests": False}]
    assert small.paths().count("/flush_cache") == 1

    await engine.leave(CALL, group.spec.name)
    await engine.leave(CALL, group.spec.name)  # once more does no harm
    await group.aclose(5.0)


async def test_a_server_without_begin_and_end_gets_none(small: SmallSGLang, adapt: Adapt) -> None:
    small.quirks |= {
        "/begin_weight_update": (404, {"detail": "Not Found"}),
        "/end_weight_update": (404, {"detail": "Not Found"}),
        "no_sessions": True,
    }
    engine, weights = adapt(), tensors(3)
    group = await joined([engine], CALL, hello=False)
    await push(engine, group, weights)
    await engine.reset(CALL)
    assert all(torch.equal(small.weights[name], tensor) for name, tensor in weights.items())
    assert "/end_weight_update" not in small.paths()
    await group.aclose(5.0)


async def test_a_session_that_a_dead_trainer_left_open_is_closed_by_reset(small: SmallSGLang, adapt: Adapt) -> None:
    engine, update = adapt(), update_of(tensors())
    small.session = "all"
    with pytest.raises(EngineFailed, match="already open"):
        await engine.begin(CALL, update)
    await engine.reset(CALL)
    await engine.reset(CALL)  # none is open now: that is fine, too
    await engine.begin(CALL, update)
    assert small.session == "all"


async def test_a_group_of_the_same_name_left_behind_is_replaced(small: SmallSGLang, adapt: Adapt) -> None:
    engine = adapt()
    small.quirks["/init_weights_update_group"] = [
        (400, {"success": False, "message": "The specified group name has already been created, use another"})
    ]
    group = await joined([engine], CALL, hello=False)
    assert small.paths().count("/destroy_weights_update_group") == 1
    await push(engine, group, tensors(4))
    await group.aclose(5.0)


@pytest.mark.parametrize(
    "answer",
    [
        (200, {"success": False, "message": "partially updated"}),
        (400, {"success": False, "message": "partially updated"}),
        (500, "partially updated"),
    ],
    ids=["200 that says no", "400", "500 in plain text"],
)
async def test_a_bucket_that_was_not_taken_is_a_failure_in_the_engines_words(
    small: SmallSGLang, adapt: Adapt, answer: tuple[int, Any]
) -> None:
    engine = adapt()
    small.quirks["/update_weights_from_distributed"] = answer
    update = update_of(tensors(), group="g")
    with pytest.raises(EngineFailed, match="partially updated") as caught:
        await engine.receive(CALL, update, update.buckets[1])
    assert caught.value.engine == engine.name
    assert caught.value.phase == "receive"
    assert caught.value.bucket == 1
    assert not caught.value.is_collective


@pytest.mark.parametrize("answer", [(200, None), (200, ""), (200, False)], ids=["null", "nothing", "false"])
async def test_an_answer_to_a_bucket_that_says_nothing_good_is_no_success(
    small: SmallSGLang, adapt: Adapt, answer: tuple[int, Any]
) -> None:
    small.quirks["/update_weights_from_distributed"] = answer
    update = update_of(tensors(), group="g")
    with pytest.raises(EngineFailed, match="it answered"):
        await adapt().receive(CALL, update, update.buckets[0])
    assert small.paths() == ["/update_weights_from_distributed"]


async def test_a_receive_that_only_saw_the_broadcast_break_says_so(small: SmallSGLang, adapt: Adapt) -> None:
    engine, update = adapt(), update_of(tensors(), group="g")
    group = await joined([engine], CALL, hello=False)
    update = update_of(tensors(), group=group.spec.name)
    await engine.begin(CALL, update)
    receiving = asyncio.create_task(engine.receive(CALL, update, update.buckets[0]))
    await asyncio.sleep(0.3)
    assert not receiving.done(), "nothing was broadcast"

    group.abort()  # the trainer leaves

    with pytest.raises(EngineFailed) as caught:
        await receiving
    assert caught.value.is_collective
    await engine.reset(CALL)
    await engine.leave(CALL, group.spec.name)
    await group.aclose(5.0)

    group = await joined([engine], CALL, hello=False)
    await push(engine, group, tensors(6))
    assert torch.equal(small.weights["model.scale"], tensors(6)["model.scale"])
    await group.aclose(5.0)


async def test_a_version_that_did_not_stick_is_a_failure(small: SmallSGLang, adapt: Adapt) -> None:
    small.quirks["/update_weight_version"] = (200, {"success": True, "message": "ok"})
    with pytest.raises(EngineFailed, match="says 'default'"):
        await adapt().publish(CALL, 9)


async def test_hello_tells_the_version_and_a_restart(small: SmallSGLang, adapt: Adapt) -> None:
    engine = adapt()
    first = await engine.hello(CALL)
    assert first.version is None
    assert first.state is EngineState.STALE
    small.version = "12"
    second = await engine.hello(CALL)
    assert second.version == 12
    assert second.incarnation == first.incarnation
    small.seed = 8
    assert (await engine.hello(CALL)).incarnation != first.incarnation


@pytest.mark.parametrize(
    ("facts", "options", "words"),
    [
        ({"tp_size": 2}, {}, "tp_size=2"),
        ({"dp_size": 2}, {}, "dp_size=1"),
        ({"pp_size": 2}, {}, "pp_size=1"),
        ({}, {"num_ranks": 4}, "num_ranks=4"),
        ({}, {"selector": "draft"}, "no draft model"),
    ],
)
async def test_a_server_that_cannot_take_the_update_is_refused_at_hello(
    small: SmallSGLang, adapt: Adapt, facts: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    small.quirks["facts"] = facts
    with pytest.raises(EngineRejected, match=words):
        await adapt(**options).hello(CALL)


# ------------------------------------------------------------------------------ names


def renamed(weights: dict[str, torch.Tensor], old: str, new: str) -> dict[str, torch.Tensor]:
    return {new if name == old else name: tensor for name, tensor in weights.items()}


async def test_unknown_names_and_shapes_are_refused_by_probing(small: SmallSGLang, adapt: Adapt) -> None:
    engine, weights = adapt(), renamed(tensors(), "model.scale", "model.scales")
    weights["model.embed_tokens.weight"] = torch.zeros(32, 9)
    with pytest.raises(EngineRejected) as caught:
        await engine.check(CALL, update_of(weights))
    assert caught.value.unknown == ("model.scales",)
    assert len(caught.value.mismatched) == 1
    assert "model.embed_tokens.weight" in caught.value.mismatched[0]
    assert "/update_weights_from_distributed" not in small.paths()


async def test_what_could_not_be_checked_is_noted_and_what_was_is_asked_once(small: SmallSGLang, adapt: Adapt) -> None:
    engine, update = adapt(), update_of(tensors())
    notes = await engine.check(CALL, update)
    assert any("could not be checked" in note for note in notes)
    asked = small.paths().count("/get_weights_by_name")
    assert await engine.check(CALL, update) == notes
    assert small.paths().count("/get_weights_by_name") == asked == len(update.manifest.params)

    small.quirks["/get_weights_by_name"] = (400, {"error": {"message": "Get parameter by name failed"}})
    notes = await adapt().check(CALL, update)
    assert any("names and shapes could not be checked" in note for note in notes)


def save_checkpoint(folder: Path, weights: dict[str, torch.Tensor], *, ties: bool = False) -> None:
    """Two shards and an index, as transformers writes them."""
    names = list(weights)
    shards = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for file, some in shards.items():
        save_file({name: weights[name] for name in some}, folder / file)
    save_file({"stranger": torch.zeros(1)}, folder / "adapter.safetensors")
    index = {"weight_map": {name: file for file, some in shards.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": ties}))


async def test_its_checkpoint_tells_unknown_missing_and_misshapen_names(
    small: SmallSGLang, adapt: Adapt, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, tensors())
    small.model_path = str(tmp_path)
    engine = adapt()
    assert await engine.check(CALL, update_of(tensors())) == ()

    weights = renamed(tensors(), "model.scale", "model.scales")
    weights["model.codes"] = torch.zeros(4, dtype=torch.float16)
    del weights["model.norm.weight"]
    with pytest.raises(EngineRejected) as caught:
        await engine.check(CALL, update_of(weights))
    assert caught.value.unknown == ("model.scales",)
    assert set(caught.value.missing) == {"model.scale", "model.norm.weight"}
    assert len(caught.value.mismatched) == 1
    assert "model.codes" in caught.value.mismatched[0]

    del weights["model.scales"], weights["model.codes"]
    small.version = "4"
    await engine.check(CALL, update_of(weights, strict=False, base=Base(version=4, update_id="u")))
    assert "/get_weights_by_name" not in small.paths()


@pytest.mark.parametrize("readable", [True, False])
async def test_a_part_is_taken_by_a_server_that_still_says_the_version_it_builds_on(
    small: SmallSGLang, adapt: Adapt, tmp_path: Path, readable: bool
) -> None:
    if readable:
        save_checkpoint(tmp_path, tensors())
        small.model_path = str(tmp_path)
    engine, part = adapt(check_names=readable), {"model.scale": tensors()["model.scale"]}
    for version, base in (("default", None), ("4", None), ("5", Base(version=4, update_id="u"))):
        small.version = version
        with pytest.raises(
            BaseMissing, match="holds no version" if version == "default" else f"version {version}, "
        ) as e:
            await engine.check(CALL, update_of(part, strict=False, base=base))
        assert e.value.holds == (None if version == "default" else int(version))
        assert ("model.norm.weight" in e.value.missing) is readable
    small.version = "4"
    await engine.check(CALL, update_of(part, strict=False, base=Base(version=4, update_id="u")))
    if readable:
        assert await engine.check(CALL, update_of(tensors(), strict=False)) == (), "it covers everything"
    await engine.check(CALL, update_of(tensors()))  # strict: the caller's word, where it can't be checked


@pytest.mark.parametrize("ties", [True, False])
async def test_tied_weights_count_as_sent_only_where_the_model_ties_them(
    small: SmallSGLang, adapt: Adapt, tmp_path: Path, ties: bool
) -> None:
    everything = tensors()
    stored = {name: t for name, t in everything.items() if not (ties and name == "lm_head.weight")}
    save_checkpoint(tmp_path, stored, ties=ties)
    small.model_path = str(tmp_path)
    once = {name: t for name, t in everything.items() if name != "lm_head.weight"}
    update = update_of(manifest_of(once, aliases=[("lm_head.weight", "model.embed_tokens.weight")]))
    if ties:
        assert await adapt().check(CALL, update) == ()
        assert await adapt().check(CALL, update_of(everything)) == (), "SGLang skips a tied output layer"
    else:
        with pytest.raises(EngineRejected, match="tied='each'") as caught:
            await adapt().check(CALL, update)
        assert caught.value.missing == ("lm_head.weight",)


# --------------------------------------------------------------------- pauses and flushes


@pytest.mark.parametrize(
    ("mode", "word", "flushes"),
    [(PauseMode.ABORT, "abort", 1), (PauseMode.RECOMPUTE, "retract", 1), (PauseMode.KEEP, "in_place", 0)],
)
async def test_each_pause_mode_has_its_word(
    small: SmallSGLang, adapt: Adapt, mode: PauseMode, word: str, flushes: int
) -> None:
    engine = adapt()
    assert mode in engine.pause_modes
    await engine.pause(CALL, mode)
    assert small.paused == word
    await engine.flush(CALL)
    assert small.paths().count("/flush_cache") == flushes, "a kept cache is not flushed"
    await engine.resume(CALL)
    assert small.paused is None


async def test_draining_is_refused_with_advice(small: SmallSGLang, adapt: Adapt) -> None:
    engine = adapt()
    assert PauseMode.DRAIN not in engine.pause_modes
    with pytest.raises(EngineRejected, match="send it no new requests"):
        await engine.pause(CALL, PauseMode.DRAIN)
    assert small.paths() == []


async def test_a_broadcaster_refuses_a_mode_that_an_engine_lacks_before_anything(
    small: SmallSGLang, adapt: Adapt
) -> None:
    async with sending(adapt()) as sender:
        before = small.paths()
        with pytest.raises(ValueError, match=r"no pause mode 'drain'.*abort, recompute, keep"):
            await sender.update_weights(StateDictSource(tensors(2)), version=5, pause_mode="drain")
        assert small.paths() == before


async def test_a_refused_flush_may_be_tried_again(small: SmallSGLang, adapt: Adapt) -> None:
    small.quirks["/flush_cache"] = [(400, "Flush cache failed.\n")]
    engine = adapt()
    await engine.pause(CALL, PauseMode.RECOMPUTE)
    with pytest.raises(EngineBusy, match="Flush cache failed"):
        await engine.flush(CALL)
    await engine.flush(CALL)


@pytest.mark.parametrize("status", [401, 404])
async def test_a_server_that_will_never_flush_is_not_called_busy(small: SmallSGLang, adapt: Adapt, status: int) -> None:
    small.quirks["/flush_cache"] = (status, {"detail": "no"})
    with pytest.raises(EngineFailed, match="flush_cache") as caught:
        await adapt().flush(CALL)
    assert not isinstance(caught.value, EngineBusy)


# ---------------------------------------------------------------------------- the calls


async def test_a_key_is_sent_and_a_wrong_one_is_explained(small: SmallSGLang, adapt: Adapt) -> None:
    small.api_key = "secret"
    await adapt(api_key="secret").hello(CALL)
    with pytest.raises(EngineFailed, match="set api_key") as caught:
        await adapt(api_key="wrong").hello(CALL)
    assert "secret" not in repr(adapt(api_key="secret")) + str(caught.value)


async def test_a_silent_server_is_a_timeout_that_names_its_field(small: SmallSGLang, adapt: Adapt) -> None:
    small.quirks["/continue_generation"] = lambda: time.sleep(1.0)
    with pytest.raises(EngineTimeout, match=r"Timeouts\.resume") as caught:
        await adapt().resume(Call(source="t", fence=1, timeout=0.2))
    assert caught.value.field == "resume"


async def test_a_dead_server_is_named(small: SmallSGLang, adapt: Adapt) -> None:
    small.quirks["/begin_weight_update"] = (0, None)
    with pytest.raises(EngineDied, match=small.url):
        await adapt().begin(CALL, update_of(tensors()))
    nobody = SGLangServer("http://127.0.0.1:9", name="replica 3")
    with pytest.raises(EngineDied, match="replica 3") as caught:
        await nobody.hello(CALL)
    assert caught.value.engine == "replica 3"
    await nobody.aclose()


async def test_another_kind_of_server_is_told_apart(small: SmallSGLang, adapt: Adapt) -> None:
    small.quirks["/model_info"] = (404, {"detail": "Not Found"})
    with pytest.raises(EngineFailed, match="right kind of server"):
        await adapt().hello(CALL)
    small.quirks["/model_info"] = (200, "<html>")
    with pytest.raises(EngineFailed, match="SGLang server"):
        await adapt().hello(CALL)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "127.0.0.1:30000"}, "http://"),
        ({"url": "http://x", "num_ranks": 0}, "num_ranks"),
        ({"url": "http://x", "wire_format": WireFormat.PACKED}, "packed"),
    ],
)
def test_a_mistake_is_a_value_error_at_once(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SGLangServer(**options)


async def test_its_own_checksums_and_samples(small: SmallSGLang, adapt: Adapt) -> None:
    engine = adapt()
    sums = await engine.own_checksums(CALL)
    assert sums is not None
    assert set(sums) == set(tensors())
    found = await engine.sample(CALL, ["model.norm.weight", "nobody"], rows=2)
    assert found == {"model.norm.weight": [0.0, 0.0]}
    small.quirks["/weights_checker"] = (404, {})
    assert await engine.own_checksums(CALL) is None


# ------------------------------------------------------------------------------- verify


def sending(*engines: SGLangServer) -> WeightBroadcaster:
    return WeightBroadcaster(
        engines,
        lock=None,
        backend="gloo",
        bucket_bytes=1100,
        pause_mode=PauseMode.RECOMPUTE,
        progress=False,
        master_address="127.0.0.1",
    )


@pytest.fixture
def forgetful() -> Iterator[SmallSGLang]:
    """A server that does not know one of the tensors, and drops it with 200, as SGLang does."""
    weights = {name: torch.zeros_like(t) for name, t in tensors().items() if name != "lm_head.weight"}
    with SmallSGLang(weights=weights) as server:
        yield server


@pytest.mark.parametrize("against", ["engines", "source"])
async def test_engines_without_our_checksums_are_verified_by_their_own(
    small: SmallSGLang, adapt: Adapt, against: Literal["engines", "source"]
) -> None:
    with SmallSGLang(weights={name: torch.zeros_like(t) for name, t in tensors().items()}) as other:
        async with sending(adapt(), SGLangServer(other.url)) as sender:
            report = await sender.update_weights(StateDictSource(tensors(2)), version=5, verify=against)
    words = {"engines": "checksums", "source": "first rows of 5 tensors equal"}[against]
    assert all(any(words in note for note in outcome.notes) for outcome in report.engines.values())


async def test_a_tensor_dropped_in_silence_is_found_before_the_version_is_given(
    small: SmallSGLang, adapt: Adapt, forgetful: SmallSGLang
) -> None:
    careless = SGLangServer(forgetful.url, check_names=False)
    async with sending(adapt(), careless) as sender:
        with pytest.raises(UpdateFailed, match=r"lm_head\.weight") as caught:
            await sender.update_weights(StateDictSource(tensors(2)), version=5, verify="engines")
    assert caught.value.phase == "verify"
    assert small.version == forgetful.version == "default"


async def test_weights_that_differ_from_the_source_are_found_by_samples(small: SmallSGLang, adapt: Adapt) -> None:
    answer = (200, [[1.0] * 8])
    async with sending(adapt(check_names=False)) as sender:
        small.quirks["/get_weights_by_name"] = answer
        with pytest.raises(UpdateFailed, match="differ from the source"):
            await sender.update_weights(StateDictSource(tensors(2)), version=5, verify="source")
    assert small.version == "default"
