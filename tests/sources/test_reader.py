from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from async_wsync.errors import SourceError
from async_wsync.sources import IterableSource, MasterWeightSource, StateDictSource
from async_wsync.sources.reader import BucketStream, SourceReader, StagedBucket
from async_wsync.transfer.checksum import model_digests
from async_wsync.transfer.layout import lay_out
from async_wsync.transfer.unpack import ReceiveBuffers
from async_wsync.types import BucketSpec, Manifest, ParamMeta, WireFormat
from tests.support.updates import manifest_of
from tests.support.waiting import until

PACKED = {WireFormat.PACKED}
Named = tuple[str, torch.Tensor]


def flat_model(count: int = 6, size: int = 10) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.randn(size) for i in range(count)}


async def plan(reader: SourceReader, bucket_bytes: int = 80) -> tuple[BucketSpec, ...]:
    return await reader.plan(bucket_bytes=bucket_bytes)


async def take_all(stream: BucketStream) -> list[int]:
    taken = []
    async for staged in stream:
        taken.append(staged.bucket.index)
        staged.release()
    return taken


async def receive(reader: SourceReader, targets: dict[str, torch.Tensor], *, wires: set[WireFormat] = PACKED) -> int:
    count = 0
    async for staged in reader.buckets(await plan(reader), wires):
        assert staged.wire.keys() == wires
        for wire in wires:
            landing = ReceiveBuffers(lay_out(staged.bucket, wire), targets)
            for source, target in zip(staged.wire[wire], landing.buffers, strict=True):
                target.copy_(source)
            landing.apply()
        staged.release()
        count += 1
    return count


async def test_every_bucket_is_staged_in_every_format_asked_for() -> None:
    model = flat_model() | {"odd": torch.randn(5, 4).t(), "scalar": torch.tensor(3), "none": torch.empty(0, 3)}
    targets = {name: torch.zeros_like(t) for name, t in model.items()}
    reader = SourceReader(StateDictSource(model), num_buffers=1)
    assert await receive(reader, targets, wires=set(WireFormat)) == 5
    assert model_digests(targets) == model_digests(model)
    await reader.aclose()


async def test_a_source_can_be_pumped_again_for_a_retry() -> None:
    model = flat_model()
    reader = SourceReader(IterableSource(iter(model.items())))
    stream = reader.buckets(await plan(reader), PACKED)
    await anext(stream)
    targets = {name: torch.zeros_like(t) for name, t in model.items()}
    assert await receive(reader, targets) == 3
    assert model_digests(targets) == model_digests(model)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    await reader.aclose()


async def test_at_most_num_buffers_buckets_are_alive() -> None:
    pulled: list[str] = []
    alive: list[weakref.ref[torch.Tensor]] = []

    def make() -> Iterator[Named]:
        for i in range(10):
            tensor = torch.full((10,), float(i))
            alive.append(weakref.ref(tensor))
            pulled.append(str(i))
            yield str(i), tensor
            del tensor

    manifest = Manifest(params=tuple(ParamMeta(name=str(i), dtype="float32", shape=(10,)) for i in range(10)))
    reader = SourceReader(IterableSource(make, manifest=manifest), num_buffers=2)
    stream = reader.buckets(await plan(reader, 80), PACKED)
    held = [await anext(stream), await anext(stream)]
    await asyncio.sleep(0.1)
    assert pulled == ["0", "1", "2", "3"]
    held.pop(0).release()
    await until(lambda: len(pulled) == 6)
    # Packed, and not kept beside their packed copy, but for the one that the suspended generator still has.
    await until(lambda: sum(ref() is not None for ref in alive) <= 1)
    held += [await anext(stream)]
    for staged in held:
        staged.release()
        staged.release()  # twice is once
    assert await take_all(stream) == [3, 4]
    await reader.aclose()


async def test_the_next_bucket_is_staged_while_one_is_on_its_way() -> None:
    pulled: list[str] = []

    def make() -> Iterator[Named]:
        for name, tensor in model.items():
            pulled.append(name)
            yield name, tensor

    model = flat_model(2)
    reader = SourceReader(IterableSource(make, manifest=manifest_of(model)), num_buffers=2)
    stream = reader.buckets(await plan(reader, 40), PACKED)
    await anext(stream)
    await until(lambda: pulled == ["w0", "w1"])
    await reader.aclose()


MODEL = flat_model(3)


def bad_shape() -> Iterator[Named]:
    yield "w0", MODEL["w0"]
    yield "w1", torch.zeros(11)


def bad_dtype() -> Iterator[Named]:
    yield "w0", MODEL["w0"]
    yield "w1", MODEL["w1"].double()


def swapped() -> Iterator[Named]:
    yield from [("w0", MODEL["w0"]), ("w2", MODEL["w2"])]


def too_few() -> Iterator[Named]:
    yield from list(MODEL.items())[:2]


def too_many() -> Iterator[Named]:
    yield from MODEL.items()
    yield "more", torch.zeros(1)


def raises() -> Iterator[Named]:
    yield "w0", MODEL["w0"]
    raise ZeroDivisionError("bad shard")


def cancels() -> Iterator[Named]:
    yield "w0", MODEL["w0"]
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("make", "param", "message"),
    [
        (bad_shape, "w1", r"'w1' has shape \(11,\)"),
        (bad_dtype, "w1", "'w1' is float64"),
        (swapped, "w2", "'w2' where its manifest has 'w1'"),
        (too_few, "w2", "ended before 'w2'"),
        (too_many, "more", "'more', which its manifest lacks"),
        (raises, "w0", "after 'w0'.*bad shard"),
        (cancels, "w0", "after 'w0'.*Cancelled"),
    ],
)
async def test_a_source_that_breaks_its_word_is_named(
    make: Callable[[], Iterator[Named]], param: str, message: str
) -> None:
    reader = SourceReader(IterableSource(make, manifest=manifest_of(MODEL)))
    with pytest.raises(SourceError, match=message) as caught:
        await take_all(reader.buckets(await plan(reader, 40), PACKED))
    assert caught.value.param == param
    await reader.aclose()


async def test_an_error_while_the_manifest_is_made_is_translated_but_a_callers_mistake_is_not() -> None:
    reader = SourceReader(IterableSource(raises))
    with pytest.raises(SourceError, match="bad shard") as caught:
        await reader.manifest()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    await reader.aclose()
    with pytest.raises(ValueError, match="not a tensor"):
        await SourceReader(StateDictSource({"a": 1})).manifest()  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="num_buffers"):
        SourceReader(StateDictSource({}), num_buffers=0)


async def test_a_cast_source_sends_the_declared_dtype_and_digests_it() -> None:
    masters = flat_model()
    targets = {name: torch.zeros_like(t, dtype=torch.bfloat16) for name, t in masters.items()}
    reader = SourceReader(MasterWeightSource(masters, dtype=torch.bfloat16), digests=True)
    await receive(reader, targets)
    assert model_digests(targets) == model_digests({n: t.bfloat16() for n, t in masters.items()})
    assert await reader.digests() == model_digests(targets)
    await reader.aclose()


async def test_digests_can_be_had_without_sending_and_include_ties() -> None:
    weight = torch.randn(3)
    reader = SourceReader(StateDictSource({"a": weight, "b": weight}))
    assert (await reader.manifest()).aliases == (("b", "a"),)
    assert await reader.digests() == model_digests({"a": weight, "b": weight})
    await reader.aclose()


async def test_giving_up_closes_the_source_in_its_own_thread() -> None:
    threads: list[tuple[str, str]] = []

    def make() -> Iterator[Named]:
        try:
            yield from MODEL.items()
        finally:
            threads.append(("closed in", threading.current_thread().name))

    reader = SourceReader(IterableSource(make, manifest=manifest_of(MODEL)), num_buffers=1)
    await anext(reader.buckets(await plan(reader, 40), PACKED))
    await reader.aclose()
    await reader.aclose()
    assert threads == [("closed in", "async-wsync-source")]
    assert "closed" in repr(reader)


async def test_a_source_that_blocks_for_ever_is_abandoned_in_bounded_time(caplog: pytest.LogCaptureFixture) -> None:
    entered, let_go = threading.Event(), threading.Event()

    def make() -> Iterator[Named]:
        yield "w0", MODEL["w0"]
        entered.set()
        let_go.wait(60)

    reader = SourceReader(IterableSource(make, manifest=manifest_of(MODEL)))
    stream = reader.buckets(await plan(reader, 40), PACKED)
    (await anext(stream)).release()
    await until(entered.is_set)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await anext(stream)
    began = time.monotonic()
    await reader.aclose(timeout=0.1)
    assert time.monotonic() - began < 5
    assert "abandoned" in caplog.text
    let_go.set()


async def test_a_cancelled_anext_loses_no_bucket() -> None:
    gate = threading.Event()

    def make() -> Iterator[Named]:
        gate.wait(60)
        yield from MODEL.items()

    reader = SourceReader(IterableSource(make, manifest=manifest_of(MODEL)))
    stream = reader.buckets(await plan(reader, 40), PACKED)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await anext(stream)
    gate.set()
    assert await take_all(stream) == [0, 1, 2]
    await reader.aclose()


@pytest.mark.parametrize("pulled_before", [0, 1])
async def test_a_source_that_runs_collectives_is_walked_to_its_end_although_the_update_failed(
    pulled_before: int,
) -> None:
    walked: list[str] = []

    def make() -> Iterator[Named]:
        for name, tensor in MODEL.items():
            walked.append(name)
            yield name, tensor

    reader = SourceReader(IterableSource(make, manifest=manifest_of(MODEL), collective=True), num_buffers=1)
    buckets = await plan(reader, 40)
    if pulled_before:
        await anext(reader.buckets(buckets, PACKED))
    await reader.aclose()
    assert walked == ["w0", "w1", "w2"]


@pytest.mark.parametrize("collective", [False, True])
async def test_a_walk_that_nobody_waits_for_any_more_ends_early_unless_other_ranks_take_part(collective: bool) -> None:
    walked: list[str] = []
    reached, go_on = threading.Event(), threading.Event()

    def make() -> Iterator[Named]:
        try:
            for name, tensor in MODEL.items():
                walked.append(name)
                if name == "w1":
                    reached.set()
                    go_on.wait(60)
                yield name, tensor
        finally:
            walked.append("closed")

    reader = SourceReader(IterableSource(make, manifest=manifest_of(MODEL), collective=collective))
    digesting = asyncio.ensure_future(reader.digests())
    await until(reached.is_set)
    digesting.cancel()
    await asyncio.wait([digesting])
    closing = asyncio.ensure_future(reader.aclose())
    go_on.set()
    await closing
    assert walked == (["w0", "w1", "w2", "closed"] if collective else ["w0", "w1", "closed"])
    assert digesting.cancelled()


async def test_a_source_that_fails_when_it_is_read_again_says_so() -> None:
    def make() -> Iterator[Named]:
        yield "w0", MODEL["w0"]
        raise OSError("the disk is gone")

    reader = SourceReader(IterableSource(make, manifest=manifest_of(MODEL)))
    for read in (reader.digests(), reader.first_rows(["w0"])):
        with pytest.raises(SourceError, match="the disk is gone"):
            await read
    await reader.aclose()


@pytest.mark.parametrize("collective", [False, True])
@pytest.mark.parametrize("one_shot", [False, True])
async def test_the_device_is_found_before_the_first_bucket_and_the_tensor_looked_at_is_sent(
    one_shot: bool, collective: bool
) -> None:
    walks = 0

    def make() -> Iterator[Named]:
        nonlocal walks
        walks += 1
        yield from MODEL.items()

    source = IterableSource(make() if one_shot else make, manifest=manifest_of(MODEL), collective=collective)
    reader = SourceReader(source, find_device=True)
    await reader.manifest()
    assert (source.device, reader.device, walks) == (torch.device("cpu"), torch.device("cpu"), 1)
    targets = {name: torch.zeros_like(t) for name, t in MODEL.items()}
    await receive(reader, targets)
    assert model_digests(targets) == model_digests(MODEL)
    await reader.aclose()
    assert walks == (1 if one_shot or collective else 2)


async def test_a_generator_that_was_looked_at_in_an_update_that_failed_early_is_good_for_the_next() -> None:
    source = IterableSource(iter(MODEL.items()), manifest=manifest_of(MODEL))
    refused = SourceReader(source, find_device=True)
    await refused.manifest()
    await refused.aclose()
    reader = SourceReader(source, find_device=True)
    assert await take_all(reader.buckets(await plan(reader, 40), PACKED)) == [0, 1, 2]
    await reader.aclose()


async def test_a_collective_walk_begun_for_a_look_is_walked_to_its_end_when_the_update_fails_before_it() -> None:
    walked: list[str] = []

    def make() -> Iterator[Named]:
        for name, tensor in MODEL.items():
            walked.append(name)
            yield name, tensor

    reader = SourceReader(IterableSource(make, manifest=manifest_of(MODEL), collective=True), find_device=True)
    await reader.manifest()
    await reader.aclose()
    assert walked == ["w0", "w1", "w2"]


async def test_a_source_that_fails_when_its_device_is_looked_for_says_so() -> None:
    def make() -> Iterator[Named]:
        raise OSError("the disk is gone")
        yield

    reader = SourceReader(IterableSource(make, manifest=manifest_of(MODEL)), find_device=True)
    with pytest.raises(SourceError, match="the disk is gone"):
        await reader.manifest()
    await reader.aclose()


async def test_an_empty_source_gives_no_bucket() -> None:
    reader = SourceReader(StateDictSource({}))
    assert [staged async for staged in reader.buckets(await plan(reader), PACKED)] == []
    await reader.aclose()


async def test_released_and_dropped_buckets_free_their_memory() -> None:
    reader = SourceReader(StateDictSource(flat_model()), num_buffers=2)
    stream = reader.buckets(await plan(reader), PACKED)
    refs: list[weakref.ref[torch.Tensor]] = []

    def watch(staged: StagedBucket) -> None:
        refs.extend(weakref.ref(t) for t in staged.wire[WireFormat.PACKED])

    staged = await anext(stream)
    watch(staged)
    staged.release()
    dropped = await anext(stream)
    watch(dropped)
    del dropped
    await reader.aclose()
    gc.collect()
    assert len(refs) == 2 and all(ref() is None for ref in refs)


async def test_the_loop_runs_on_while_eight_thousand_tensors_are_packed() -> None:
    """Far above the 20 ms that a quiet machine keeps: this catches a GIL held for a whole bucket, not noise."""
    model = {f"w{i}": torch.zeros(64, 64, dtype=torch.bfloat16) for i in range(8000)}
    reader = SourceReader(StateDictSource(model))
    buckets = await plan(reader, 1 << 30)
    beats = 0
    stream = reader.buckets(buckets, PACKED)
    taking = asyncio.ensure_future(anext(stream))
    while not taking.done():
        await asyncio.sleep(0.001)
        beats += 1
    assert beats >= 5
    (await taking).release()
    await reader.aclose()
