"""Where a source's tensors are decides between gloo and NCCL, before the first of them is sent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from async_wsync import IterableSource
from async_wsync.sources.reader import SourceReader
from async_wsync.transfer.checksum import model_digests
from async_wsync.types import WireFormat

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


async def test_a_generator_of_cuda_tensors_with_a_manifest_is_known_to_be_on_cuda_and_staged_there() -> None:
    model = {f"w{i}": torch.full((1000,), float(i), device="cuda") for i in range(3)}
    manifest = IterableSource(list(model.items())).manifest()

    def make() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(1000, device="cuda")
        for name, tensor in model.items():
            yield name, buffer.copy_(tensor)

    reader = SourceReader(IterableSource(make(), manifest=manifest), find_device=True)
    await reader.manifest()
    assert reader.device.type == "cuda"
    async for staged in reader.buckets(await reader.plan(bucket_bytes=1 << 20), {WireFormat.PACKED}):
        (wire,) = staged.wire[WireFormat.PACKED]
        sent = dict(zip(model, wire.view(torch.float32).split(1000), strict=True))
        assert model_digests(sent) == model_digests(model)
        staged.release()
    await reader.aclose()
