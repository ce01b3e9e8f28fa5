"""Source actors that share one model: each has the layers whose number leaves its own remainder."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import ray
import torch

from async_wsync import StateDictSource, TorchEngine, UpdateReport, WeightBroadcaster
from async_wsync.errors import WeightSyncError
from async_wsync.rounds.round import UpdateRound
from async_wsync.types import UpdateEvent
from tests.support.changing_fleet import BUCKET_BYTES, LIMITS, layers, resources


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
        self.running: asyncio.Task[UpdateReport] | None = None
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
            bucket_bytes=BUCKET_BYTES,
            name=f"source-{self.index}",
            on_event=self._on_event,
            **options,
        )
        await self.broadcaster.connect()

    async def replace(self, name: str, engine: Any) -> None:
        await self.broadcaster.replace_engine(name, TorchEngine(engine, name=name))

    async def pid(self) -> int:
        return os.getpid()

    async def cancel(self) -> bool:
        """Cancel the update under way; False where there is none."""
        return self.running is not None and self.running.cancel()

    async def resources(self) -> dict[str, int]:
        return {**resources(), "tasks": len(asyncio.all_tasks())}

    async def close(self) -> None:
        await self.broadcaster.aclose()

    async def update(
        self, version: int, seed: int, *, kill_at: int | None = None, num_sources: int = 2, empty: bool = False
    ) -> dict[str, Any]:
        """How the update ended, as plain data."""
        self.kill_at, self.events = kill_at, []
        part = {} if empty else part_of(seed, self.index, num_sources)
        outcome: dict[str, Any] = {"error": None, "error_kind": None}
        update = self.broadcaster.update_weights(StateDictSource(part), version=version, round=self.round, verify=None)
        self.running = asyncio.create_task(update)
        try:
            await asyncio.wait({self.running})
            if self.running.cancelled():
                outcome = {"error": "cancelled", "error_kind": "CancelledError"}
            else:
                self.running.result()
        except WeightSyncError as error:
            outcome = {"error": str(error), "error_kind": type(error).__name__}
        self.running = None
        states = {name: str(state) for name, state in self.broadcaster.engine_states.items()}
        return {**outcome, "states": states, "events": self.events, "version": self.broadcaster.version}


SourceActor = ray.remote(num_cpus=0)(Source)
