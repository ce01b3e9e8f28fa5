"""Sources that put one tensor after another in the same memory: what is sent is what each held when it was yielded."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from async_wsync.sources import IterableSource, ModuleSource, StateDictSource
from async_wsync.sources.reader import SourceReader
from async_wsync.transfer.checksum import model_digests
from async_wsync.transfer.layout import DIRECT_BYTES, lay_out
from async_wsync.transfer.pack import own_copy
from async_wsync.transfer.tensors import param_meta, torch_dtype
from async_wsync.transfer.unpack import ReceiveBuffers
from async_wsync.types import Manifest, ParamMeta, WireFormat
from tests.support.tensors import DTYPES, LAYOUTS, random_tensor, rearranged

PACKED = {WireFormat.PACKED}
Named = tuple[str, torch.Tensor]
Make = Callable[[], Iterator[Named]]

SMALL = 1000
LARGE = DIRECT_BYTES  # floats: four times the size from which a tensor goes direct
SIZES: dict[str, list[int]] = {
    "small": [SMALL] * 8,
    "many, over several slices": [100] * 300,
    "large": [LARGE] * 5,
    "mixed": [SMALL, LARGE, SMALL, 1, LARGE, LARGE, 0, SMALL],
}


class Refill:
    """Makes generators of ``wN`` filled with N + 1, all in one buffer that is spoilt when they end."""

    def __init__(self, sizes: list[int], dtype: torch.dtype = torch.float32) -> None:
        self.buffer = torch.zeros(max(sizes))
        self.expected = {f"w{i}": torch.full((size,), float(i + 1), dtype=dtype) for i, size in enumerate(sizes)}
        self.walks = self.refills = 0
        metas = [ParamMeta(name=n, dtype=str(dtype)[6:], shape=tuple(t.shape)) for n, t in self.expected.items()]
        self.manifest = Manifest(params=tuple(metas))

    def __call__(self) -> Iterator[Named]:
        self.walks += 1
        try:
            for i, (name, tensor) in enumerate(self.expected.items()):
                self.buffer.fill_(float(i + 1))
                self.refills += 1
                yield name, self.buffer[: tensor.numel()]
        finally:
            self.buffer.fill_(float("nan"))

    async def walk_async(self) -> AsyncIterator[Named]:
        for item in self():
            await asyncio.sleep(0)
            yield item


class RefillingSource:
    """A source of somebody's own, which declares nothing."""

    def __init__(self, refill: Refill, *, casts: bool = False) -> None:
        self._refill = refill
        self.casts = casts

    def manifest(self) -> Manifest:
        return self._refill.manifest

    def tensors(self) -> Iterator[Named]:
        return self._refill()


SOURCES: dict[str, Callable[[Refill], Any]] = {
    "callable": IterableSource,
    "callable with a manifest": lambda refill: IterableSource(refill, manifest=refill.manifest),
    "generator": lambda refill: IterableSource(refill()),
    "generator with a manifest": lambda refill: IterableSource(refill(), manifest=refill.manifest),
    "collective": lambda refill: IterableSource(refill, manifest=refill.manifest, collective=True),
    "async": lambda refill: IterableSource(refill.walk_async),
    "async generator": lambda refill: IterableSource(refill.walk_async()),
    "one's own": RefillingSource,
}


async def receive(
    reader: SourceReader, *, bucket_bytes: int, wires: set[WireFormat] = PACKED, atomic_groups: tuple[str, ...] = ()
) -> list[dict[str, str]]:
    """The digests of what arrived in each format. Buckets are looked at only once the next ones are staged."""
    plan = await reader.plan(bucket_bytes=bucket_bytes, atomic_groups=atomic_groups)
    metas = (await reader.manifest()).params
    zeros = [{m.name: torch.zeros(m.shape, dtype=torch_dtype(m.dtype)) for m in metas} for _ in wires]
    targets = dict(zip(wires, zeros, strict=True))
    waiting: list[Any] = []
    stream = reader.buckets(plan, wires)
    for left in range(len(plan), 0, -1):
        waiting.append(await anext(stream))
        if len(waiting) == 2 or left == 1:
            land(waiting.pop(0), targets)
    for staged in waiting:
        land(staged, targets)
    assert [staged async for staged in stream] == []
    return [model_digests(t) for t in targets.values()]


def land(staged: Any, targets: dict[WireFormat, dict[str, torch.Tensor]]) -> None:
    for wire, named in targets.items():
        landing = ReceiveBuffers(lay_out(staged.bucket, wire), named)
        for sent, buffer in zip(staged.wire[wire], landing.buffers, strict=True):
            buffer.copy_(sent)
        landing.apply()
    staged.release()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", SOURCES)
async def test_a_source_that_refills_one_buffer_sends_the_values_of_each_tensor(kind: str, sizes: str) -> None:
    refill = Refill(SIZES[sizes])
    reader = SourceReader(SOURCES[kind](refill), digests=True)
    expected = model_digests(refill.expected)
    assert await receive(reader, bucket_bytes=64 * 1024) == [expected]
    assert await reader.digests() == expected
    await reader.aclose()
    assert refill.refills == refill.walks * len(expected)
    assert refill.buffer.isnan().all()


@pytest.mark.parametrize("num_buffers", [2, 4])
@pytest.mark.parametrize("bucket_bytes", [1, 3 * 4 * SMALL, 1 << 30])
async def test_buckets_of_any_size_packed_ahead_in_every_format_hold_the_right_values(
    bucket_bytes: int, num_buffers: int
) -> None:
    refill = Refill(SIZES["mixed"])
    reader = SourceReader(IterableSource(refill), num_buffers=num_buffers)
    found = await receive(reader, bucket_bytes=bucket_bytes, wires=set(WireFormat), atomic_groups=("w[12]", "w[35]"))
    assert found == [model_digests(refill.expected)] * 3
    await reader.aclose()


async def test_a_refilling_source_is_walked_again_for_a_rebuild_and_for_checks() -> None:
    refill = Refill(SIZES["mixed"])
    reader = SourceReader(IterableSource(refill, manifest=refill.manifest))
    await anext(reader.buckets(await reader.plan(bucket_bytes=8 * SMALL), PACKED))
    expected = model_digests(refill.expected)
    assert await receive(reader, bucket_bytes=8 * SMALL) == [expected]
    assert await reader.digests() == expected
    rows = await reader.first_rows(["w1", "w4"])
    assert rows == {"w1": [2.0], "w4": [5.0]}
    await reader.aclose()
    assert refill.walks == 4


@pytest.mark.parametrize("sizes", SIZES)
async def test_a_cast_of_a_refilled_buffer_is_a_cast_of_each_tensor(sizes: str) -> None:
    refill = Refill(SIZES[sizes], dtype=torch.bfloat16)
    reader = SourceReader(RefillingSource(refill, casts=True), digests=True)
    expected = model_digests(refill.expected)
    assert await receive(reader, bucket_bytes=64 * 1024) == [expected]
    assert await reader.digests() == expected
    await reader.aclose()


class LazyMapping(Mapping[str, torch.Tensor]):
    """Makes each value when it is looked up, in the one buffer."""

    def __init__(self, refill: Refill) -> None:
        self._refill = refill

    def __getitem__(self, name: str) -> torch.Tensor:
        wanted = self._refill.expected[name]
        return self._refill.buffer[: wanted.numel()].copy_(wanted)

    def __iter__(self) -> Iterator[str]:
        return iter(self._refill.expected)

    def __len__(self) -> int:
        return len(self._refill.expected)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
async def test_a_mapping_that_makes_its_tensors_in_one_buffer_has_no_ties_and_arrives_as_it_is(
    dtype: torch.dtype | None,
) -> None:
    refill = Refill(SIZES["mixed"], dtype=dtype or torch.float32)
    source = StateDictSource(LazyMapping(refill), dtype=dtype)
    assert source.manifest().aliases == ()
    reader = SourceReader(source)
    assert await receive(reader, bucket_bytes=64 * 1024) == [model_digests(refill.expected)]
    await reader.aclose()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_of_ones_own_is_bit_for_bit_what_it_copies_and_shares_nothing(dtype: str) -> None:
    for layout in LAYOUTS:
        for shape in [(), (0, 3), (1, 1), (4, 5)]:
            tensor = rearranged(random_tensor(dtype, shape, 1), layout)
            meta = param_meta("w", tensor)
            copy = own_copy(meta, tensor, torch.device("cpu"))
            assert model_digests({"w": copy}) == model_digests({"w": tensor})
            assert not copy.requires_grad
            shares = copy.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            assert not (tensor.numel() and shares)


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_no_more_than_num_buffers_buckets_of_a_refilling_source_are_alive(size: int) -> None:
    refill = Refill([size] * 12)
    nbytes = 4 * size
    reader = SourceReader(IterableSource(refill, manifest=refill.manifest), num_buffers=2)
    stream = reader.buckets(await reader.plan(bucket_bytes=2 * nbytes), PACKED)
    held = [await anext(stream), await anext(stream)]
    assert sum(t.nbytes for staged in held for t in staged.wire[WireFormat.PACKED]) == 4 * nbytes
    refs = [weakref.ref(t) for staged in held for t in staged.wire[WireFormat.PACKED]]
    await asyncio.sleep(0.05)
    assert refill.refills == 4
    for staged in held:
        staged.release()
    assert [ref() for ref in refs] == [None] * len(refs)
    await reader.aclose()


STABLE: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "state dict": StateDictSource,
    "list": lambda model: IterableSource(list(model.items())),
    "items": lambda model: IterableSource(model.items()),
    "declared": lambda model: IterableSource(lambda: iter(model.items()), stable_tensors=True),
    "declared generator": lambda model: IterableSource(iter(model.items()), stable_tensors=True),
}


@pytest.mark.parametrize("kind", STABLE)
async def test_stable_tensors_are_sent_from_their_own_memory(kind: str) -> None:
    model = {"a": torch.randn(LARGE), "b": torch.randn(LARGE)}
    await is_not_copied(STABLE[kind](model), model)


async def test_a_modules_parameters_are_sent_from_their_own_memory() -> None:
    model = torch.nn.Linear(512, 512, bias=False)
    await is_not_copied(ModuleSource(model), dict(model.named_parameters()))


async def is_not_copied(source: Any, model: Mapping[str, torch.Tensor]) -> None:
    reader = SourceReader(source)
    addresses = []
    async for staged in reader.buckets(await reader.plan(bucket_bytes=1), PACKED):
        addresses += [t.data_ptr() for t in staged.wire[WireFormat.PACKED]]
        staged.release()
    assert addresses == [t.data_ptr() for t in model.values()]
    await reader.aclose()
