"""What a small SGLang holds, and updates of it."""

from __future__ import annotations

from typing import Any

import torch

from async_wsync.transfer.plan import plan_buckets
from async_wsync.transfer.tensors import param_meta
from async_wsync.types import Manifest, UpdateSpec


def tensors(seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed_tokens.weight": ((32, 8), torch.float32),
        "model.scale": ((3,), torch.bfloat16),
        "model.norm.weight": ((8,), torch.float32),
        "model.codes": ((5,), torch.float16),
        "lm_head.weight": ((32, 8), torch.bfloat16),
    }
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (shape, dtype) in shapes.items()}


def update_of(weights: dict[str, torch.Tensor], *, group: str = "", version: int = 5, **facts: Any) -> UpdateSpec:
    manifest = Manifest(
        params=tuple(param_meta(name, tensor) for name, tensor in weights.items()), aliases=facts.pop("aliases", ())
    )
    buckets = plan_buckets(manifest, bucket_bytes=1100)
    return UpdateSpec(update_id="u", version=version, manifest=manifest, buckets=buckets, group=group, **facts)
