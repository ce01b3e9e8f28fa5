"""A pipeline stage: a Ray actor with half of the model, and a broadcaster of its own for that half."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from async_wsync.broadcaster import WeightBroadcaster
from async_wsync.demo.model import ModelShape, Transformer
from async_wsync.demo.text import load_text
from async_wsync.demo.trainer import Optimizer, next_token_loss
from async_wsync.engines.torch.engine import TorchEngine
from async_wsync.protocols import UpdateLock
from async_wsync.report import UpdateReport
from async_wsync.rounds.round import UpdateRound
from async_wsync.runtime.loop_gap import LoopGapMeter
from async_wsync.runtime.threads import DaemonWorker, start_daemon
from async_wsync.sources import ModuleSource
from async_wsync.transfer.checksum import model_digests
from async_wsync.types import UpdateEvent

__all__ = ["DemoStage"]


class DemoStage:
    """``index`` 0 has the embeddings and the lower layers, 1 the upper layers and the loss."""

    def __init__(
        self,
        index: int,
        *,
        seed: int,
        num_steps: int,
        engines: Mapping[str, Any],
        lock: UpdateLock,
        shared: UpdateRound,
        settings: Mapping[str, Any],
    ) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self._model = Transformer(ModelShape(vocab=len(load_text().alphabet), tied=False))
        self._own = [
            name for name, _ in self._model.named_parameters() if self._model.in_first_half(name) == (index == 0)
        ]
        parameters = dict(self._model.named_parameters())
        self._optimizer = Optimizer([parameters[name] for name in self._own], num_steps=num_steps)
        self._worker = DaemonWorker(f"demo-stage-{index}")
        self._round = shared
        self._hidden: Tensor | None = None
        self._victim: tuple[int, Any] | None = None
        self._broadcaster = WeightBroadcaster(
            [TorchEngine(handle, name=name) for name, handle in engines.items()],
            lock=lock,
            name=f"stage-{index}",
            progress=False,
            on_event=self._watch,
            **settings,
        )

    async def start(self) -> None:
        await self._broadcaster.connect()

    async def stop(self) -> None:
        await self._broadcaster.aclose()
        self._worker.close()

    # ---------------------------------------------------------------------------- training

    async def lower(self, ids: Tensor) -> Tensor:
        """Stage 0: what the lower half makes of ``ids``."""
        self._hidden = await self._worker.run(self._model.first_half, ids)
        return self._hidden.detach()

    async def upper(self, hidden: Tensor, targets: Tensor) -> tuple[float, Tensor]:
        """Stage 1: the loss, and its gradient by ``hidden``; takes its own step."""
        return await self._worker.run(self._upper, hidden, targets)

    def _upper(self, hidden: Tensor, targets: Tensor) -> tuple[float, Tensor]:
        hidden = hidden.clone().requires_grad_()
        loss = next_token_loss(self._model.second_half(hidden), targets)
        torch.autograd.backward(loss)
        self._optimizer.step()
        assert hidden.grad is not None
        return loss.item(), hidden.grad

    async def back(self, answer: tuple[float, Tensor]) -> float:
        """Stage 0: the gradient goes on down; returns the loss."""
        loss, gradient = answer
        await self._worker.run(self._back, gradient)
        return loss

    def _back(self, gradient: Tensor) -> None:
        assert self._hidden is not None
        torch.autograd.backward(self._hidden, gradient)
        self._hidden = None
        self._optimizer.step()

    # ---------------------------------------------------------------------------- updating

    async def update(self, version: int) -> tuple[UpdateReport, float]:
        """Send this half of ``version``; the report, and the longest event loop gap meanwhile."""
        source = ModuleSource(self._model, include=set(self._own).__contains__)
        with LoopGapMeter() as meter:
            report = await self._broadcaster.update_weights(source, version=version, round=self._round)
        return report, meter.longest

    async def replace(self, dead: str, name: str, handle: Any) -> None:
        await self._broadcaster.replace_engine(dead, TorchEngine(handle, name=name))

    async def kill_during(self, version: int, victim: Any) -> None:
        """Kill ``victim`` when the first bucket of ``version`` has arrived."""
        self._victim = (version, victim)

    def _watch(self, event: UpdateEvent) -> None:
        if self._victim is not None and event.kind == "bucket_done" and event.version == self._victim[0]:
            import ray

            start_daemon(ray.kill, self._victim[1], name="kill")  # talks to the cluster: not on this loop
            self._victim = None

    async def digests(self) -> dict[str, str]:
        """Of this half."""
        parameters = dict(self._model.named_parameters())
        return await self._worker.run(lambda: model_digests({name: parameters[name] for name in self._own}))
