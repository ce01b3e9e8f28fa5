"""Engine actors with a real model and a `WeightReceiver`, in each of Ray's three kinds."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import RayActorError
from torch import nn

from async_wsync import WeightReceiver
from async_wsync.transfer.checksum import model_digests

SIZE = 1024


async def killed(handle: Any) -> None:
    """Kill an actor and see it dead: `ray.kill` returns before that, and a call made at once may still be answered."""
    ray.kill(handle)
    with pytest.raises(RayActorError):
        while True:
            await handle.__ray_ready__.remote()


def a_model(seed: int, size: int = SIZE) -> nn.Module:
    """Two layers; the first one's matrix (size * size * 4 bytes) travels from storage to storage."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(size, size), nn.Linear(size, 4))


class _Engine(WeightReceiver):
    def __init__(self, seed: int = 0, size: int = SIZE) -> None:
        torch.set_num_threads(1)
        self.model = a_model(seed, size)
        self.size = size
        self.flushes, self.flush_seconds = 0, 0.0
        self.init_weight_receiver(self.model)

    def pid(self) -> int:
        return os.getpid()

    def slow_flush(self, seconds: float) -> int:
        """From now on a flush takes so long; returns how many there were."""
        self.flush_seconds = seconds
        return self.flushes

    def on_flush(self) -> bool:
        self.flushes += 1
        time.sleep(self.flush_seconds)
        return True

    def digests(self) -> dict[str, str]:
        return model_digests(self.model.state_dict())


@ray.remote(num_cpus=0, max_restarts=1)
class SyncEngine(_Engine):
    def ping(self) -> str:
        return "pong"

    def generate(self, seconds: float = 0.0, *, started: str = "") -> int | None:
        """``started``: a file that is made once the engine generates."""
        with self.serving() as version, torch.no_grad():
            if started:
                Path(started).touch()
            self.model(torch.ones(1, self.size))
            time.sleep(seconds)
            return version


@ray.remote(num_cpus=0, max_restarts=1, max_concurrency=4)
class ThreadedEngine(_Engine):
    def ping(self) -> str:
        return "pong"

    def generate(self, seconds: float = 0.0) -> int | None:
        with self.serving() as version, torch.no_grad():
            self.model(torch.ones(1, self.size))
            time.sleep(seconds)
            return version


@ray.remote(num_cpus=0, max_restarts=1)
class AsyncEngine(_Engine):
    async def ping(self) -> str:
        return "pong"

    async def generate(self, seconds: float = 0.0) -> int | None:
        async with self.serving() as version:
            with torch.no_grad():
                self.model(torch.ones(1, self.size))
            await asyncio.sleep(seconds)
            return version


KINDS = {"sync": SyncEngine, "threaded": ThreadedEngine, "async": AsyncEngine}
