"""The same tensors again: the same objects, and no work for the garbage collector."""

from __future__ import annotations

import gc
import pickle
import uuid
from typing import Any

import pytest
import torch

from async_wsync import StateDictSource
from async_wsync.engines.update_codec import pack_update, unpack_update
from async_wsync.runtime.loop_gap import LoopGapMeter
from async_wsync.runtime.threads import spawn, wait_for
from async_wsync.sources.reader import SourceReader
from async_wsync.transfer.known_manifests import KnownParams, known_manifest
from async_wsync.transfer.layout import lay_out
from async_wsync.types import BucketSpec, Manifest, ParamMeta, UpdateSpec, WireFormat
from tests.support.idle import IdleProcess, longest_beyond

MANY = 50_000
BOUND = 0.020  # G7
TRIES = 3  # a virtual machine's CPU may be taken away while it counts as used


def many(value: float = 0.0, count: int = MANY) -> dict[str, torch.Tensor]:
    flat = torch.full((count * 16,), value)
    names = (f"model.layers.{i // 64}.mlp.experts.{i % 64}.down_proj.weight" for i in range(count))
    return dict(zip(names, flat.view(count, 4, 4).unbind(), strict=True))


def with_buckets(manifest: Manifest, buckets: Any) -> UpdateSpec:
    return UpdateSpec(update_id="u", version=1, manifest=manifest, buckets=buckets, group="g", strict=True)


def meta(name: str, *shape: int) -> ParamMeta:
    return ParamMeta(name=name, dtype="float32", shape=shape)


def made(*metas: ParamMeta) -> tuple[ParamMeta, ...]:
    params = KnownParams()
    for one in metas:
        params.add(one)
    return params.all()


def test_of_a_manifest_that_differs_in_the_middle_the_rest_is_used_again() -> None:
    first = known_manifest(Manifest(params=(meta("fam.a", 1), meta("fam.b", 2), meta("fam.c", 3))))
    params = made(meta("fam.a", 1), meta("fam.b", 20), meta("fam.c", 3), meta("fam.d", 4))
    assert params == (meta("fam.a", 1), meta("fam.b", 20), meta("fam.c", 3), meta("fam.d", 4))
    assert params[0] is first.params[0]
    assert params[2] is first.params[2]
    second = known_manifest(Manifest(params=params))
    assert second.params is params
    assert made(meta("fam.a", 1), meta("fam.b", 20))[1] is params[1], "the latest is the likeliest"


def test_a_tensor_of_another_dtype_is_another_tensor() -> None:
    known_manifest(Manifest(params=(meta("dtype.a", 1),)))
    (param,) = made(ParamMeta(name="dtype.a", dtype="float16", shape=(1,)))
    assert param.dtype == "float16"


def test_views_of_one_memory_are_tied_only_if_they_are_equal() -> None:
    base = torch.arange(6.0)
    state = {
        "base": base,
        "same": base.view(6),
        "other shape": base.view(2, 3),
        "part": base[:2],
        "other shape again": base.view(2, 3),
        "behind": base[2:],
        "behind again": base[2:],
    }
    manifest = StateDictSource(state).manifest()
    assert dict(manifest.aliases) == {
        "same": "base",
        "other shape again": "other shape",
        "behind again": "behind",
    }
    assert [param.name for param in manifest.params] == ["base", "other shape", "part", "behind"]


async def test_describing_the_same_tensors_again_brings_no_garbage_collection_nearer() -> None:
    reader = SourceReader(StateDictSource(many(count=10_000)))
    first = await reader.manifest()
    await reader.aclose()
    collections: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            collections.append(info["generation"])

    reader = SourceReader(StateDictSource(many(1.0, count=10_000)))
    gc.callbacks.append(note)
    try:
        again = await reader.manifest()
    finally:
        gc.callbacks.remove(note)
    await reader.aclose()
    assert again is first
    assert len(collections) < 10, "one for every 700 objects that are made and kept"


def test_a_packed_update_is_small_and_comes_out_as_it_went_in() -> None:
    state = many(count=5_000)
    state["tied"] = next(iter(state.values()))
    manifest = StateDictSource(state).manifest()
    half = len(manifest.params) // 2
    buckets = tuple(
        BucketSpec(index=index, params=params, nbytes=64 * len(params))
        for index, params in enumerate((manifest.params[:half], manifest.params[half:]))
    )
    update = with_buckets(manifest, buckets)
    packed = pack_update(update)
    assert unpack_update(packed) == update
    assert len(packed) < len(pickle.dumps(manifest)) / 5


@pytest.mark.parametrize("which", ["unknown tensors", "known tensors"])
async def test_the_loop_has_its_turn_while_50_000_tensors_are_described_planned_packed_and_staged(which: str) -> None:
    seen: list[float] = []
    while len(seen) < TRIES and (not seen or seen[-1] >= BOUND):
        prefix = "known" if which == "known tensors" else uuid.uuid4().hex
        source = StateDictSource({f"{prefix}.{name}": tensor for name, tensor in many().items()})
        gc.collect()
        gc.freeze()
        try:
            if which == "known tensors":
                await prepared(source)
            seen.append(await prepared(source))
        finally:
            gc.unfreeze()
    assert seen[-1] < BOUND, f"beyond an idle process', each time: {seen}"


async def prepared(source: StateDictSource) -> float:
    """Everything that an update does here before its first byte is sent; the longest gap beyond an idle process'."""
    with IdleProcess() as idle, LoopGapMeter() as meter:
        reader = SourceReader(source)
        manifest = await reader.manifest()
        buckets = await reader.plan(bucket_bytes=64 << 20)
        packed = await wait_for(spawn(pack_update, with_buckets(manifest, buckets), name="pack"))
        async for staged in reader.buckets(buckets, {WireFormat.PACKED}):
            staged.release()
        await reader.aclose()
    assert packed
    assert lay_out(buckets[0], WireFormat.PACKED).flat_nbytes == MANY * 64
    beyond = longest_beyond(meter.gaps, idle.late)
    print(f"\nlongest gap {meter.longest * 1e3:.1f} ms, {beyond * 1e3:.1f} ms beyond an idle process'")
    return beyond
