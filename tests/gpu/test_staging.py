"""A source's tensors on their way to the wire, where either is on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from async_wsync.sources import StateDictSource
from async_wsync.sources.reader import SourceReader
from async_wsync.types import WireFormat
from tests.gpu.queued import busy_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MB = 1 << 20


async def staged(reader: SourceReader, device: torch.device) -> list[torch.Tensor]:
    buckets = await reader.plan(bucket_bytes=64 * MB)
    stream = reader.buckets(buckets, {WireFormat.PACKED}, device=device)
    return [tensor async for bucket in stream for tensor in bucket.wire[WireFormat.PACKED]]


@pytest.mark.parametrize("source", ["cpu", "cuda"])
@pytest.mark.parametrize("wire", ["cpu", "cuda"])
async def test_tensors_are_staged_where_the_backend_takes_them(source: str, wire: str) -> None:
    state = {"small": torch.full((100,), 1.5, device=source), "large": torch.full((MB,), 2.5, device=source)}
    device = torch.device("cuda", 0) if wire == "cuda" else torch.device("cpu")
    reader = SourceReader(StateDictSource(state))
    tensors = await staged(reader, device)
    assert {tensor.device for tensor in tensors} == {device}
    values = [tensor.cpu().view(torch.float32) for tensor in tensors]
    assert [(float(value[0]), value.numel()) for value in values] == [(1.5, 100), (2.5, MB)]
    await reader.aclose()


@pytest.mark.parametrize("wire", ["cpu", "cuda"])
async def test_staging_waits_for_what_made_the_tensors_and_not_for_later_training(wire: str) -> None:
    device = torch.device("cuda", 0) if wire == "cuda" else torch.device("cpu")
    state = {f"layer.{i}": torch.zeros(1000, device="cuda") for i in range(100)}
    reader = SourceReader(StateDictSource(state))
    buckets = await reader.plan(bucket_bytes=64 * MB)
    busy_for(1.0)
    for tensor in state.values():
        tensor.fill_(7.0)
    stream = reader.buckets(buckets, {WireFormat.PACKED}, device=device)
    busy_for(4.0)
    later = torch.cuda.current_stream().record_event()
    (bucket,) = [bucket async for bucket in stream]
    assert not later.query(), "staging waited for what was queued after it"
    assert bool((bucket.wire[WireFormat.PACKED][0].cpu().view(torch.float32) == 7.0).all())
    bucket.release()
    await reader.aclose()
