"""What a small SGLang holds, and updates of it."""

from __future__ import annotations

from functools import partial

import torch

from tests.support import updates


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


update_of = partial(updates.update_of, bucket_bytes=1100, version=5, update_id="u")
