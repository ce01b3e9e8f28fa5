"""The orchestrator: train a little, update every engine, again; then compare checksums."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
import torch

from async_wsync.broadcaster import WeightBroadcaster
from async_wsync.core.checksum import combined, model_digests
from async_wsync.demo.engine import DemoEngine, EngineTally, Sample
from async_wsync.demo.result import DemoResult, EngineResult, UpdateResult
from async_wsync.demo.text import load_text
from async_wsync.demo.trainer import Trainer
from async_wsync.engines.torch_engine import TorchEngine
from async_wsync.lock import BroadcastLock
from async_wsync.progress import TqdmProgress
from async_wsync.runtime.loop_gap import LoopGapMeter
from async_wsync.runtime.object_refs import await_ref
from async_wsync.runtime.threads import DaemonWorker
from async_wsync.sources import ModuleSource
from async_wsync.types import PauseMode

__all__ = ["DemoOptions", "run_demo"]

BUCKET_BYTES = 1 << 20  # small, so that the bar has something to show
NUM_SAMPLES_SHOWN = 6
LAST_SAMPLE_LIMIT = 30.0  # seconds for each engine to write with the last version
OBJECT_STORE_BYTES = 100 << 20

Print = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """``address``: of a Ray cluster to join; None starts one. ``steps``: training steps between updates."""

    updates: int = 20
    engines: int = 2
    steps: int = 60
    seed: int = 0
    address: str | None = None

    def __post_init__(self) -> None:
        for name in ("updates", "engines", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def run_demo(options: DemoOptions, *, out: Print = print) -> DemoResult:
    """Start or join Ray, run the demo, and leave."""
    torch.set_num_threads(1)  # the trainer has a core; the engines share the others
    with _ray_cluster(options):
        return asyncio.run(_Demo(options, out).run())


@contextmanager
def _ray_cluster(options: DemoOptions) -> Iterator[None]:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "namespace": "async-wsync-demo"}
    if options.address is not None:
        ray.init(address=options.address, **quiet)
    else:
        num_cpus = options.engines + 2
        ray.init(num_cpus=num_cpus, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet)
    try:
        yield
    finally:
        ray.shutdown()


class _Demo:
    def __init__(self, options: DemoOptions, out: Print) -> None:
        self._options = options
        self._out = out
        self._updates: list[UpdateResult] = []

    async def run(self) -> DemoResult:
        started = time.monotonic()
        worker = DaemonWorker("demo-trainer")
        try:
            with LoopGapMeter() as meter:
                trainer, handles = await self._start(worker)
                await self._train_and_update(trainer, worker, handles, meter)
                engines = await self._compare(trainer, worker, handles)
        finally:
            worker.close()
        return DemoResult(
            updates=tuple(self._updates),
            engines=engines,
            max_loop_gap=max(update.loop_gap for update in self._updates),
            seconds=time.monotonic() - started,
        )

    async def _start(self, worker: DaemonWorker) -> tuple[Trainer, dict[str, Any]]:
        actor = ray.remote(num_cpus=0)(DemoEngine)
        names = [f"rollout-{i}" for i in range(self._options.engines)]
        handles: dict[str, Any] = {name: actor.remote(name, self._options.seed + 1 + i) for i, name in enumerate(names)}
        text = await worker.run(load_text)
        num_steps = self._options.updates * self._options.steps
        trainer = await worker.run(lambda: Trainer(text, seed=self._options.seed, num_steps=num_steps))
        num_parameters = sum(p.numel() for p in trainer.model.parameters())
        self._out(
            f"training {num_parameters / 1e6:.1f} M parameters on {len(text.tokens) / 1e3:.0f} k characters of "
            f"Python's help; {len(names)} Ray engines write meanwhile"
        )
        for name, handle in handles.items():
            self._show(name, await self._sample(handle, version=None))
        return trainer, handles

    async def _train_and_update(
        self, trainer: Trainer, worker: DaemonWorker, handles: dict[str, Any], meter: LoopGapMeter
    ) -> None:
        engines = [TorchEngine(handle, name=name) for name, handle in handles.items()]
        lock = BroadcastLock.create(name=f"demo-{uuid.uuid4().hex[:8]}")
        async with WeightBroadcaster(
            engines,
            lock=lock,
            bucket_bytes=BUCKET_BYTES,
            pause_mode=PauseMode.DRAIN,  # each sample is of one version, so writers finish theirs first
            progress=TqdmProgress(leave=False),
        ) as broadcaster:
            for version in range(1, self._options.updates + 1):
                loss = await worker.run(trainer.train, self._options.steps)
                meter.reset()
                report = await broadcaster.update_weights(ModuleSource(trainer.model), version=version)
                update = UpdateResult(loss=loss, report=report, loop_gap=meter.reset())
                self._updates.append(update)
                self._out(update.line())
                if self._is_shown(version):
                    name = list(handles)[version % len(handles)]
                    self._show(name, await await_ref(handles[name].latest.remote()))

    async def _compare(
        self, trainer: Trainer, worker: DaemonWorker, handles: dict[str, Any]
    ) -> tuple[EngineResult, ...]:
        last = self._options.updates
        samples = {name: await self._sample(handle, version=last) for name, handle in handles.items()}
        self._show(*next(iter(samples.items())))
        own = combined(await worker.run(lambda: model_digests(trainer.model.state_dict())))
        results = []
        for name, handle in handles.items():
            tally: EngineTally = await await_ref(handle.tally.remote())
            results.append(EngineResult.of(name, tally, own))
        return tuple(results)

    async def _sample(self, handle: Any, *, version: int | None) -> Sample | None:
        """The first sample of ``version`` that the engine shows, or its newest when the limit is over."""
        limit = time.monotonic() + LAST_SAMPLE_LIMIT
        while True:
            sample: Sample | None = await await_ref(handle.latest.remote())
            if (sample is not None and sample.version == version) or time.monotonic() > limit:
                return sample
            await asyncio.sleep(0.1)

    def _is_shown(self, version: int) -> bool:
        return version % max(1, self._options.updates // NUM_SAMPLES_SHOWN) == 0

    def _show(self, engine: str, sample: Sample | None) -> None:
        if sample is not None:
            version = "untrained" if sample.version is None else f"v{sample.version}"
            self._out(f"      {engine}, {version}: {sample.text!r}")
