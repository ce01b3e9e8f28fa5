"""Source actors that share one model: each has the layers whose number leaves its own remainder."""

from __future__ import annotations

import os
import signal
from typing import Any

import ray
import torch
from torch import nn

from async_wsync import StateDictSource, TorchEngine, WeightBroadcaster
from async_wsync.errors import WeightSyncError
from async_wsync.rounds import UpdateRound
from async_wsync.types import Timeouts, UpdateEvent

LAYERS, WIDTH = 6, 128
LIMITS = Timeouts(
    connect=10, lock=20, pause=4, flush=4, begin=4, bucket=4, idle=5, end=4, resume=4, drain=2, close=2, total=40
)


def layers(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def part_of(seed: int, index: int, num_sources: int) -> dict[str, torch.Tensor]:
    state = layers(seed).state_dict()
    return {name: tensor for name, tensor in state.items() if int(name.split(".")[0]) % num_sources == index}


class Source:
    """A broadcaster, or one after another. ``kill_at``: kill -9 itself as its update tells of its so-manieth event."""

    def __init__(self, index: int, lock: Any, round_: UpdateRound) -> None:
        self.index = index
        self.lock = lock
        self.round = round_
        self.kill_at: int | None = None
        self.events: list[str] = []
        self.broadcaster: WeightBroadcaster

    def _on_event(self, event: UpdateEvent) -> None:
        self.events.append(event.kind)
        if self.kill_at == len(self.events):
            os.kill(os.getpid(), signal.SIGKILL)

    async def connect(self, engines: list[Any], names: list[str], **options: Any) -> None:
        self.broadcaster = WeightBroadcaster(
            [TorchEngine(engine, name=name) for engine, name in zip(engines, names, strict=True)],
            lock=self.lock,
            timeouts=LIMITS,
            progress=False,
            bucket_bytes=128 * 1024,
            name=f"source-{self.index}",
            on_event=self._on_event,
            **options,
        )
        await self.broadcaster.connect()

    async def close(self) -> None:
        await self.broadcaster.aclose()

    async def update(
        self, version: int, seed: int, *, kill_at: int | None = None, num_sources: int = 2, empty: bool = False
    ) -> dict[str, Any]:
        """How the update ended, as plain data."""
        self.kill_at, self.events = kill_at, []
        part = {} if empty else part_of(seed, self.index, num_sources)
        outcome: dict[str, Any] = {"error": None, "error_kind": None}
        try:
            await self.broadcaster.update_weights(StateDictSource(part), version=version, round=self.round, verify=None)
        except WeightSyncError as error:
            outcome = {"error": str(error), "error_kind": type(error).__name__}
        states = {name: str(state) for name, state in self.broadcaster.engine_states.items()}
        return {**outcome, "states": states, "events": self.events, "version": self.broadcaster.version}


SourceActor = ray.remote(num_cpus=0)(Source)
