"""Sharded trainers: two real ranks, of which one is the source and the other takes part."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

RANKS = 2
TIES = {"2.weight": "0.weight"}
LIMIT = 90.0

Part = Callable[[int], Any]


def trainer(rank: int, store: str, parts: Sequence[Part], results: Any) -> None:
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    try:
        results.put((rank, [part(rank) for part in parts]))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def on_two_ranks(parts: Sequence[Part], folder: Path) -> list[tuple[Any, Any]]:
    """What each part returned on rank 0 and on rank 1, which are processes of their own."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    args = (str(folder / "store"), parts, results)
    ranks = [context.Process(target=trainer, args=(rank, *args), daemon=True) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    try:
        found = dict(results.get(timeout=LIMIT) for _ in ranks)
        for process in ranks:
            process.join(LIMIT)
        assert [process.exitcode for process in ranks] == [0] * RANKS
        return list(zip(found[0], found[1], strict=True))
    finally:
        for process in ranks:
            process.kill()
            process.join(10)


def sharded_model() -> tuple[Any, dict[str, str]]:
    """An FSDP2 model with a tied weight, a parameter of one row (an empty shard on rank 1), and its digests."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from async_wsync.transfer.checksum import model_digests

    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.Linear(33, 1), torch.nn.Linear(16, 33, bias=False))
    model[2].weight = model[0].weight
    model.register_buffer("steps", torch.tensor(3))
    digests = model_digests(model.state_dict())
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    return model, digests


def send_all(rank: int) -> Any:
    from async_wsync.sources import ModuleSource, participate

    model, expected = sharded_model()
    source = ModuleSource(model)
    assert source.collective
    if rank:
        return participate(source)
    return asyncio.run(_pump(source, expected, give_up=False))


def give_up_half_way(rank: int) -> Any:
    from async_wsync.sources import ModuleSource, participate

    model, expected = sharded_model()
    source = ModuleSource(model)
    if rank:
        return participate(source)
    return asyncio.run(_pump(source, expected, give_up=True))


def fail_before_the_first_bucket(rank: int) -> Any:
    from async_wsync.sources import ModuleSource, participate

    source = ModuleSource(sharded_model()[0])
    if rank:
        return participate(source)
    return asyncio.run(_fail_early(source))


def gather_into_one_buffer(rank: int) -> Any:
    """A trainer of one's own that gathers every parameter, small and large, into the same memory."""
    import torch
    import torch.distributed as dist

    from async_wsync.sources import IterableSource, participate
    from async_wsync.transfer.checksum import model_digests
    from async_wsync.types import Manifest, ParamMeta

    sizes = [10, 100_000, 20, 300_000, 100_000, 30]
    buffer = torch.zeros(RANKS * max(sizes))

    def gather() -> Any:
        for i, size in enumerate(sizes):
            full = buffer[: RANKS * size]
            dist.all_gather_into_tensor(full, torch.full((size,), float(10 * i + rank)))
            yield f"w{i}", full

    metas = [ParamMeta(name=f"w{i}", dtype="float32", shape=(RANKS * size,)) for i, size in enumerate(sizes)]
    source = IterableSource(gather, manifest=Manifest(params=tuple(metas)), collective=True)
    if rank:
        return participate(source)
    shards = [[torch.full((size,), float(10 * i + r)) for r in range(RANKS)] for i, size in enumerate(sizes)]
    expected = model_digests({f"w{i}": torch.cat(parts) for i, parts in enumerate(shards)})
    return asyncio.run(_pump(source, expected, give_up=False, aliases={}, bucket_bytes=1 << 22))


def send_what_fsdp_flattened(rank: int) -> Any:
    """FSDP's first version, with wrappers around it and within, whose state_dict is a collective."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    from async_wsync.sources import ModuleSource, participate
    from async_wsync.transfer.checksum import model_digests

    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.Linear(33, 1))
    expected = model_digests(model.state_dict())
    model[0] = torch.compile(model[0])
    model[1] = FullyShardedDataParallel(model[1], device_id=torch.device("cpu"), use_orig_params=True)
    source = ModuleSource(FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True))
    if rank:
        return participate(source)
    return asyncio.run(_pump(source, expected, give_up=False, aliases={}))


async def _fail_early(source: Any) -> str:
    from async_wsync.sources.reader import SourceReader

    reader = SourceReader(source)
    await reader.manifest()
    await reader.aclose()
    return "gave up"


async def _pump(
    source: Any,
    expected: dict[str, str],
    *,
    give_up: bool,
    aliases: Mapping[str, str] = TIES,
    bucket_bytes: int = 200,
) -> Any:
    """Land every bucket in a model of our own; True if it then equals the one that was sharded."""
    import torch

    from async_wsync.sources.reader import SourceReader
    from async_wsync.transfer.checksum import model_digests
    from async_wsync.transfer.layout import lay_out
    from async_wsync.transfer.tensors import torch_dtype
    from async_wsync.transfer.unpack import ReceiveBuffers
    from async_wsync.types import WireFormat

    reader = SourceReader(source, num_buffers=1, digests=True)
    manifest = await reader.manifest()
    assert dict(manifest.aliases) == aliases
    targets = {m.name: torch.zeros(m.shape, dtype=torch_dtype(m.dtype)) for m in manifest.params}
    async for staged in reader.buckets(await reader.plan(bucket_bytes=bucket_bytes), {WireFormat.PACKED}):
        landing = ReceiveBuffers(lay_out(staged.bucket, WireFormat.PACKED), targets)
        for sent, buffer in zip(staged.wire[WireFormat.PACKED], landing.buffers, strict=True):
            buffer.copy_(sent)
        landing.apply()
        staged.release()
        if give_up:
            await reader.aclose()
            return "gave up"
    assert await reader.digests() == expected
    await reader.aclose()
    return {**model_digests(targets), **{alias: expected[alias] for alias in aliases}} == expected


PARTS = (send_all, give_up_half_way, fail_before_the_first_bucket, gather_into_one_buffer, send_what_fsdp_flattened)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Part, tuple[Any, Any]]:
    """All parts in one pair of processes, as each takes seconds to import torch."""
    return dict(zip(PARTS, on_two_ranks(PARTS, tmp_path_factory.mktemp("ranks")), strict=True))


Outcomes = dict[Part, tuple[Any, Any]]


def test_sharded_weights_are_gathered_while_the_other_rank_takes_part(outcomes: Outcomes) -> None:
    assert outcomes[send_all] == (True, 5)


def test_tensors_gathered_into_one_buffer_arrive_as_they_were_gathered(outcomes: Outcomes) -> None:
    assert outcomes[gather_into_one_buffer] == (True, 6)


def test_a_model_in_fsdps_first_version_arrives_under_its_own_names(outcomes: Outcomes) -> None:
    assert outcomes[send_what_fsdp_flattened] == (True, 4)


@pytest.mark.parametrize("part", PARTS[1:3])
def test_the_other_rank_is_not_left_waiting_when_an_update_fails(part: Part, outcomes: Outcomes) -> None:
    assert outcomes[part] == ("gave up", 5)
