"""Training: random windows of the text, AdamW, and a trainer that has the whole model to itself."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from async_wsync.demo.model import ModelShape, Transformer
from async_wsync.demo.text import Text

__all__ = ["Batches", "Optimizer", "Trainer", "next_token_loss"]

BATCH = 8
PEAK_RATE = 4e-3
WARMUP_STEPS = 40


class Batches:
    """The same random windows for everyone with the same ``seed``."""

    def __init__(self, text: Text, shape: ModelShape, *, seed: int) -> None:
        self._tokens = text.tokens
        self._length = shape.context
        self._random = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Ids and the ids that follow them, each of shape (batch, context)."""
        starts = torch.randint(len(self._tokens) - self._length - 1, (BATCH,), generator=self._random)
        windows = torch.stack([self._tokens[start : start + self._length + 1] for start in starts.tolist()])
        return windows[:, :-1], windows[:, 1:]


class Optimizer:
    """AdamW with warm-up, a falling rate and clipped gradients, over ``num_steps`` steps."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, num_steps: int) -> None:
        self._parameters = list(parameters)
        self._adam = torch.optim.AdamW(self._parameters, lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.05)
        self._num_steps = num_steps
        self._step = 0

    def step(self) -> None:
        """Apply the gradients, and clear them."""
        warm = min(1.0, (self._step + 1) / WARMUP_STEPS)
        left = max(0.1, 1.0 - self._step / max(1, self._num_steps))
        for group in self._adam.param_groups:
            group["lr"] = PEAK_RATE * warm * left
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._adam.step()
        self._adam.zero_grad()
        self._step += 1


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy, in nats a token."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Trainer:
    """Owns the whole model. ``train`` blocks: call it in a thread of its own."""

    def __init__(self, text: Text, *, seed: int, num_steps: int) -> None:
        torch.manual_seed(seed)
        self.model = Transformer(ModelShape(vocab=len(text.alphabet)))
        self._batches = Batches(text, self.model.shape, seed=seed)
        self._optimizer = Optimizer(self.model.parameters(), num_steps=num_steps)

    def train(self, num_steps: int) -> float:
        """Take ``num_steps`` steps; returns their mean loss."""
        return sum(self._train_once() for _ in range(num_steps)) / num_steps

    def _train_once(self) -> float:
        ids, targets = self._batches.draw()
        loss = next_token_loss(self.model(ids), targets)
        torch.autograd.backward(loss)
        self._optimizer.step()
        return loss.item()
