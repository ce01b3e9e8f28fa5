"""A decoder-only transformer in plain PyTorch, small enough to learn on one core."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["ModelShape", "Transformer", "continue_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The defaults give about 1.3 million parameters. ``tied``: input and output embeddings are one tensor."""

    vocab: int
    context: int = 64
    width: int = 160
    layers: int = 4
    heads: int = 4
    tied: bool = True


class Block(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_attention = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.norm_mlp = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        added: Tensor = self.down(F.gelu(self.up(self.norm_mlp(x))))
        return x + added


class Transformer(nn.Module):
    """Token ids of shape (batch, length <= context) to logits of shape (batch, length, vocab).

    ``first_half`` and ``second_half`` are the same in two steps, for two pipeline stages.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight  # travels once
        self.apply(_init)

    def forward(self, ids: Tensor) -> Tensor:
        return self.second_half(self.first_half(ids))

    def first_half(self, ids: Tensor) -> Tensor:
        x: Tensor = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks[: self.shape.layers // 2]:
            x = block(x)
        return x

    def second_half(self, x: Tensor) -> Tensor:
        for block in self.blocks[self.shape.layers // 2 :]:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def in_first_half(self, name: str) -> bool:
        """Whether the parameter called ``name`` is used by ``first_half``."""
        head, _, rest = name.partition(".")
        return head in ("tokens", "positions") or (
            head == "blocks" and int(rest.partition(".")[0]) < self.shape.layers // 2
        )


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


@torch.inference_mode()
def continue_text(
    model: Transformer, ids: list[int], *, length: int, temperature: float, generator: torch.Generator
) -> list[int]:
    """``ids`` and ``length`` more, each drawn from the model's distribution at ``temperature``."""
    tokens = torch.tensor([ids])
    for _ in range(length):
        logits = model(tokens[:, -model.shape.context :])[:, -1] / temperature
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1)
    drawn: list[int] = tokens[0].tolist()
    return drawn
