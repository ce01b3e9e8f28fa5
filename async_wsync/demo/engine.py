"""The rollout engine of the demo: a Ray actor that writes text all the time, whatever its weights are."""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass

import torch

from async_wsync.demo.model import ModelShape, Transformer, continue_text
from async_wsync.demo.text import load_text
from async_wsync.engines.torch.receiver import WeightReceiver
from async_wsync.errors import EngineNotServing
from async_wsync.transfer.checksum import model_digests

__all__ = ["DemoEngine", "EngineTally", "Sample"]

PROMPT = "The "
SAMPLE_CHARACTERS = 72
TEMPERATURE = 0.7
GATE_WAIT = 0.5  # seconds; then the loop looks whether it is to stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """``version``: of the weights it was written with; None for those the engine was built with."""

    version: int | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTally:
    """What an engine has done. ``digests``: of each tensor it holds now."""

    version: int | None
    num_samples: int
    versions_sampled: tuple[int, ...]
    digests: dict[str, str]


class DemoEngine(WeightReceiver):
    """Generates in a thread of its own; each sample is made of one version from its first letter to its last."""

    def __init__(self, name: str, *, seed: int, tied: bool) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self._text = load_text()
        self._model = Transformer(ModelShape(vocab=len(self._text.alphabet), tied=tied)).eval()
        self._random = torch.Generator().manual_seed(seed)
        self._latest: deque[Sample] = deque(maxlen=1)
        self._versions: set[int] = set()
        self._num_samples = 0
        self.init_weight_receiver(self._model, name=name)
        threading.Thread(target=self._write, name="generate", daemon=True).start()

    def latest(self) -> Sample | None:
        """The newest sample."""
        return self._latest[-1] if self._latest else None

    def tally(self) -> EngineTally:
        return EngineTally(
            version=self.weight_version,
            num_samples=self._num_samples,
            versions_sampled=tuple(sorted(self._versions)),
            digests=model_digests(self._model.state_dict()),
        )

    def pid(self) -> int:
        return os.getpid()

    def _write(self) -> None:
        prompt = self._text.encode(PROMPT)
        while True:
            try:
                with self.serving(wait=GATE_WAIT) as version:
                    tokens = continue_text(
                        self._model, prompt, length=SAMPLE_CHARACTERS, temperature=TEMPERATURE, generator=self._random
                    )
            except EngineNotServing:
                continue
            self._latest.append(Sample(version=version, text=self._text.decode(tokens)))
            self._num_samples += 1
            if version is not None:
                self._versions.add(version)
