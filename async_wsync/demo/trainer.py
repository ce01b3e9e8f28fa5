"""The trainer: AdamW on random windows of the text."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from async_wsync.demo.model import ModelShape, Transformer
from async_wsync.demo.text import Text

__all__ = ["Trainer"]

BATCH = 8
PEAK_RATE = 4e-3
WARMUP_STEPS = 40


class Trainer:
    """Owns the model and its optimizer. ``train`` blocks: call it in a thread or an actor of its own."""

    def __init__(self, text: Text, *, seed: int, num_steps: int) -> None:
        torch.manual_seed(seed)
        self.model = Transformer(ModelShape(vocab=len(text.alphabet)))
        self._text = text
        self._num_steps = num_steps
        self._step = 0
        self._draw = torch.Generator().manual_seed(seed)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.05)

    def train(self, num_steps: int) -> float:
        """Take ``num_steps`` steps; returns their mean loss, in nats a character."""
        losses = [self._train_once() for _ in range(num_steps)]
        return sum(losses) / len(losses)

    def _train_once(self) -> float:
        length = self.model.shape.context
        starts = torch.randint(len(self._text.tokens) - length - 1, (BATCH,), generator=self._draw)
        windows = torch.stack([self._text.tokens[start : start + length + 1] for start in starts.tolist()])
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate()
        logits = self.model(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._step += 1
        return loss.item()

    def _rate(self) -> float:
        warm = min(1.0, (self._step + 1) / WARMUP_STEPS)
        left = max(0.1, 1.0 - self._step / max(1, self._num_steps))
        return PEAK_RATE * warm * left
