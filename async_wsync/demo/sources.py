"""Where the demo's weights come from: one trainer in this process, or two pipeline stages in actors of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

import ray

from async_wsync.broadcaster import WeightBroadcaster
from async_wsync.demo.model import ModelShape
from async_wsync.demo.stage import DemoStage
from async_wsync.demo.text import Text
from async_wsync.demo.trainer import Batches, Trainer
from async_wsync.engines.torch.engine import TorchEngine
from async_wsync.errors import UpdateFailed
from async_wsync.progress import TqdmProgress
from async_wsync.protocols import UpdateLock
from async_wsync.report import UpdateReport
from async_wsync.rounds.round import UpdateRound
from async_wsync.runtime.loop_gap import LoopGapMeter
from async_wsync.runtime.object_refs import RemoteRaised, await_ref
from async_wsync.runtime.threads import DaemonWorker, start_daemon
from async_wsync.sources import ModuleSource
from async_wsync.transfer.checksum import model_digests
from async_wsync.types import PauseMode, UpdateEvent

__all__ = ["LocalTrainer", "Pipeline", "Sources"]

# Small buckets, so that the bar has something to show. Each sample is of one version, so writers finish theirs first.
SETTINGS: dict[str, Any] = {"bucket_bytes": 1 << 20, "pause_mode": PauseMode.DRAIN}

Updated = tuple[tuple[UpdateReport, ...], float]  # a report a source, and the longest event loop gap in seconds


class Sources(Protocol):
    """Whatever trains and sends. ``update`` raises `UpdateFailed`."""

    async def start(self) -> None: ...
    async def train(self, num_steps: int) -> float: ...
    async def update(self, version: int) -> Updated: ...
    async def kill_during(self, version: int, victim: Any) -> None: ...
    async def replace(self, dead: str, name: str, handle: Any, version: int) -> Updated | None:
        """Put a new engine in the place of a dead one; with its catch-up, where there was one."""
        ...

    async def digests(self) -> dict[str, str]: ...
    async def aclose(self) -> None: ...


class LocalTrainer:
    """One source: trains in a thread, and sends from this process."""

    def __init__(self, text: Text, *, seed: int, num_steps: int, engines: Mapping[str, Any], lock: UpdateLock) -> None:
        self._worker = DaemonWorker("demo-trainer")
        self._trainer = Trainer(text, seed=seed, num_steps=num_steps)
        self._victim: tuple[int, Any] | None = None
        self._broadcaster = WeightBroadcaster(
            [TorchEngine(handle, name=name) for name, handle in engines.items()],
            lock=lock,
            progress=TqdmProgress(leave=False),
            on_engine_failure="drop",
            on_event=self._watch,
            **SETTINGS,
        )

    async def start(self) -> None:
        await self._broadcaster.connect()

    async def train(self, num_steps: int) -> float:
        return await self._worker.run(self._trainer.train, num_steps)

    async def update(self, version: int) -> Updated:
        with LoopGapMeter() as meter:
            report = await self._broadcaster.update_weights(ModuleSource(self._trainer.model), version=version)
        return (report,), meter.longest

    async def kill_during(self, version: int, victim: Any) -> None:
        self._victim = (version, victim)

    def _watch(self, event: UpdateEvent) -> None:
        if self._victim is not None and event.kind == "bucket_done" and event.version == self._victim[0]:
            start_daemon(ray.kill, self._victim[1], name="kill")  # talks to the cluster: not on this loop
            self._victim = None

    async def replace(self, dead: str, name: str, handle: Any, version: int) -> Updated | None:
        await self._broadcaster.replace_engine(dead, TorchEngine(handle, name=name))
        with LoopGapMeter() as meter:
            report = await self._broadcaster.catch_up(ModuleSource(self._trainer.model))
        return None if report is None else ((report,), meter.longest)

    async def digests(self) -> dict[str, str]:
        return await self._worker.run(lambda: model_digests(self._trainer.model.state_dict()))

    async def aclose(self) -> None:
        await self._broadcaster.aclose()
        self._worker.close()


class Pipeline:
    """Two sources: each stage trains its half in an actor, and sends it as its part of a round."""

    def __init__(
        self,
        text: Text,
        *,
        name: str,
        seed: int,
        num_steps: int,
        engines: Mapping[str, Any],
        lock: UpdateLock,
    ) -> None:
        self._batches = Batches(text, ModelShape(vocab=len(text.alphabet)), seed=seed)
        shared = UpdateRound.create(name=f"{name}-round", num_sources=2)
        stage = ray.remote(num_cpus=0)(DemoStage)
        self._stages: list[Any] = [
            stage.remote(
                index,
                seed=seed,
                num_steps=num_steps,
                engines=dict(engines),
                lock=lock,
                shared=shared,
                settings=SETTINGS,
            )
            for index in range(2)
        ]

    async def start(self) -> None:
        await self._each("start")

    async def train(self, num_steps: int) -> float:
        lower, upper = self._stages
        total = 0.0
        for _ in range(num_steps):
            ids, targets = self._batches.draw()
            answer = upper.upper.remote(lower.lower.remote(ids), targets)
            loss: float = await await_ref(lower.back.remote(answer), what="a training step")
            total += loss
        return total / num_steps

    async def update(self, version: int) -> Updated:
        answers = await self._each("update", version)
        return tuple(report for report, _ in answers), max(gap for _, gap in answers)

    async def kill_during(self, version: int, victim: Any) -> None:
        await await_ref(self._stages[0].kill_during.remote(version, victim))

    async def replace(self, dead: str, name: str, handle: Any, version: int) -> Updated | None:
        await self._each("replace", dead, name, handle)
        return await self.update(version)  # a round fails as a whole; the next one heals all engines

    async def digests(self) -> dict[str, str]:
        lower, upper = await self._each("digests")
        return {**lower, **upper}

    async def aclose(self) -> None:
        await self._each("stop")

    async def _each(self, method: str, *args: Any) -> list[Any]:
        """Call ``method`` of both stages at once; the first `UpdateFailed` where both have answered."""
        refs = [getattr(stage, method).remote(*args) for stage in self._stages]
        answers = await asyncio.gather(*(await_ref(ref, what=method) for ref in refs), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, RemoteRaised) and isinstance(answer.cause, UpdateFailed):
                raise answer.cause
            if isinstance(answer, BaseException):
                raise answer
        return answers
