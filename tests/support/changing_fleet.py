"""What the tests of a changing fleet share: engines that sample and tell of their resources, a trainer's weights."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
from torch import nn

from async_wsync import ModuleSource, TorchEngine
from async_wsync.errors import EngineNotServing, LockUnavailable
from async_wsync.testing import ScriptedEngine
from async_wsync.transfer.checksum import combined_digest, model_digests
from async_wsync.types import Timeouts

LAYERS, WIDTH = 6, 128
BUCKET_BYTES = 128 * 1024
LIMITS = Timeouts(
    connect=10, lock=20, pause=4, flush=4, begin=4, bucket=3, idle=5, end=4, resume=4, drain=1.5, close=2, total=30
)


def layers(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def source(seed: int) -> ModuleSource:
    return ModuleSource(layers(seed))


def checksum(seed: int) -> str:
    """What `ScriptedEngine.generate` returns beside the version, for an engine that holds exactly this model."""
    return combined_digest(model_digests(layers(seed).state_dict()))


def resources() -> dict[str, int]:
    """Open files, threads and resident bytes of this process."""
    gc.collect()
    fields = Path("/proc/self/statm").read_text().split()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "rss": int(fields[1]) * os.sysconf("SC_PAGE_SIZE"),
    }


class FleetEngine(ScriptedEngine):
    """A scripted engine that can be asked for its process's resources."""

    def resources(self) -> dict[str, int]:
        return resources()

    def start_over(self) -> None:
        """Without a script, and with nothing on record."""
        with self._guard:
            self._faults, self._fired, self._seen = [], [], []


def start_engines(count: int) -> list[Any]:
    """Started side by side; threaded, so that one can be asked things while it generates."""
    actor = ray.remote(FleetEngine).options(num_cpus=0, max_concurrency=4)
    return [actor.remote(layers) for _ in range(count)]


class SparePool:
    """Engines started ahead, since a start takes seconds and a sweep needs one for each kill: ``total``, if known."""

    def __init__(self, size: int = 3, *, total: int | None = None) -> None:
        self._size = size if total is None else min(size, total)
        self._ready = start_engines(self._size)
        self._left = None if total is None else total - self._size

    async def take(self) -> Any:
        engine = self._ready.pop(0)
        more = self._size - len(self._ready)
        if self._left is not None:
            more = min(more, self._left)
            self._left -= more
        self._ready += start_engines(more)
        await engine.pid.remote()
        return engine

    def close(self) -> None:
        for engine in self._ready:
            ray.kill(engine)


@dataclass
class Engines:
    """Named engines, their pids, and adapters for a broadcaster."""

    handles: dict[str, Any]
    pids: dict[str, int] = field(default_factory=dict)

    @classmethod
    async def start(cls, count: int) -> Engines:
        engines = cls({f"e{i}": handle for i, handle in enumerate(start_engines(count))})
        for name in engines.handles:
            await engines.know(name)
        return engines

    async def know(self, name: str) -> None:
        self.pids[name] = await self.handles[name].pid.remote()

    async def put(self, name: str, handle: Any) -> TorchEngine:
        """``handle`` is ``name`` from now on."""
        self.handles[name] = handle
        await self.know(name)
        return TorchEngine(handle, name=name)

    def adapters(self) -> list[TorchEngine]:
        return [TorchEngine(handle, name=name) for name, handle in self.handles.items()]

    def kill(self, name: str) -> None:
        os.kill(self.pids[name], signal.SIGKILL)

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        os.kill(self.pids[name], signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pids[name], signal.SIGCONT)

    async def holds(self, name: str, seed: int) -> bool:
        return bool(await self.handles[name].digests.remote() == model_digests(layers(seed).state_dict()))

    async def verbs_since(self, name: str, moment: float) -> list[str]:
        return [seen.verb for seen in await self.handles[name].seen.remote() if seen.at >= moment]

    def close(self) -> None:
        for handle in self.handles.values():
            ray.kill(handle)


@dataclass
class Samples:
    """What the engines generated: (version, checksum) with the names of those that made it."""

    made: dict[tuple[int | None, str], set[str]] = field(default_factory=dict)
    count: int = 0
    refused: int = 0

    def torn(self, whole: dict[int, str]) -> list[tuple[int | None, str]]:
        """Those whose weights are not the ones published under their version."""
        return [key for key in self.made if key[0] is not None and whole.get(key[0]) != key[1]]


async def keep_sampling(name: str, engine: Any, samples: Samples, *, pause: float = 0.0, seconds: float = 0.0) -> None:
    """Generate for ever, ``seconds`` at a time; ends with the engine."""
    while True:
        try:
            sample = await engine.generate.remote(seconds)
        except ray.exceptions.RayActorError:
            return
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, EngineNotServing):
                raise
            samples.refused += 1
            await asyncio.sleep(0.02)
            continue
        samples.count += 1
        samples.made.setdefault(sample, set()).add(name)
        await asyncio.sleep(pause)


async def is_free(lock: Any, *, within: float) -> bool:
    """The lock is held by nobody, now or at most ``within`` seconds from now. Its server may be on its way back."""
    deadline = time.monotonic() + within
    while True:
        try:
            if not (await lock.status())["held"]:
                return True
        except LockUnavailable:
            pass
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
