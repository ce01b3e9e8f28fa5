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

from async_wsync.demo.engine import DemoEngine, EngineTally, Sample
from async_wsync.demo.result import DemoResult, EngineResult, UpdateResult
from async_wsync.demo.sources import LocalTrainer, Pipeline, Sources, Updated
from async_wsync.demo.text import Text, load_text
from async_wsync.errors import UpdateFailed
from async_wsync.lock import BroadcastLock
from async_wsync.report import format_seconds
from async_wsync.runtime.object_refs import await_ref
from async_wsync.transfer.checksum import combined_digest

__all__ = ["DemoOptions", "run_demo"]

NUM_SAMPLES_SHOWN = 6
SAMPLE_LIMIT = 60.0  # seconds for an engine to write with the version asked for
OBJECT_STORE_BYTES = 100 << 20

Print = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """``address``: of a Ray cluster to join; None starts one. ``steps``: training steps between updates.

    ``sources``: 1, or 2 for two pipeline stages. ``kill_engine_at``: the update in whose middle an engine is killed.
    """

    updates: int = 20
    engines: int = 2
    steps: int = 60
    seed: int = 0
    address: str | None = None
    sources: int = 1
    kill_engine_at: int | None = None

    def __post_init__(self) -> None:
        for name in ("updates", "engines", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.sources not in (1, 2):
            raise ValueError(f"sources must be 1 or 2, got {self.sources}")
        if self.kill_engine_at is not None:
            if not 1 <= self.kill_engine_at <= self.updates:
                raise ValueError(f"kill-engine-at must be from 1 to {self.updates}, got {self.kill_engine_at}")
            if self.engines < 2:
                raise ValueError("kill-engine-at needs at least 2 engines: one has to go on")


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
        num_cpus = options.engines + options.sources + 1
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            **quiet,
        )
    try:
        yield
    finally:
        ray.shutdown()


class _Demo:
    def __init__(self, options: DemoOptions, out: Print) -> None:
        self._options = options
        self._out = out
        self._handles: dict[str, Any] = {}
        self._updates: list[UpdateResult] = []
        self._killed: list[str] = []

    async def run(self) -> DemoResult:
        started = time.monotonic()
        text = load_text()
        for i in range(self._options.engines):
            self._handles[f"rollout-{i}"] = self._start_engine(f"rollout-{i}", seed=self._options.seed + 1 + i)
        sources = self._make_sources(text)
        try:
            await self._introduce(text)
            await sources.start()
            for version in range(1, self._options.updates + 1):
                await self._step(sources, version)
            engines = await self._compare(sources)
        finally:
            await sources.aclose()
        return DemoResult(
            updates=tuple(self._updates),
            engines=engines,
            max_loop_gap=max(update.loop_gap for update in self._updates),
            seconds=time.monotonic() - started,
            killed=tuple(self._killed),
        )

    def _start_engine(self, name: str, *, seed: int) -> Any:
        return ray.remote(num_cpus=0)(DemoEngine).remote(name, seed=seed, tied=self._options.sources == 1)

    def _make_sources(self, text: Text) -> Sources:
        name = f"demo-{uuid.uuid4().hex[:8]}"
        lock = BroadcastLock.create(name=name)
        num_steps = self._options.updates * self._options.steps
        if self._options.sources == 1:
            return LocalTrainer(text, seed=self._options.seed, num_steps=num_steps, engines=self._handles, lock=lock)
        return Pipeline(text, name=name, seed=self._options.seed, num_steps=num_steps, engines=self._handles, lock=lock)

    async def _introduce(self, text: Text) -> None:
        trainers = "a trainer" if self._options.sources == 1 else "two pipeline stages"
        self._out(
            f"{trainers} will learn {len(text.tokens) / 1e3:.0f} k characters of Python's help; "
            f"{len(self._handles)} Ray engines write meanwhile"
        )
        for name, handle in self._handles.items():
            self._show(name, await self._sample(handle, version=None))

    # --------------------------------------------------------------------------- one version

    async def _step(self, sources: Sources, version: int) -> None:
        loss = await sources.train(self._options.steps)
        victim = None
        if version == self._options.kill_engine_at:
            victim = list(self._handles)[-1]
            await sources.kill_during(version, self._handles[victim])
        try:
            self._note(version, loss, await sources.update(version))
        except UpdateFailed as error:
            if victim is None:
                raise
            self._out(f"v{version:<3} loss {loss:.2f}  failed: {str(error).splitlines()[0]}")
        if victim is not None:
            await self._replace(sources, victim, version, loss)
        if version % max(1, self._options.updates // NUM_SAMPLES_SHOWN) == 0:
            name = list(self._handles)[version % len(self._handles)]
            self._show(name, await await_ref(self._handles[name].latest.remote()))

    def _note(self, version: int, loss: float, updated: Updated) -> None:
        reports, loop_gap = updated
        update = UpdateResult(version=version, loss=loss, reports=reports, loop_gap=loop_gap)
        self._updates.append(update)
        self._out(update.line())

    async def _replace(self, sources: Sources, victim: str, version: int, loss: float) -> None:
        name = f"{victim}-new"
        self._out(f"      {victim} was killed in the middle of v{version}; {name} takes its place")
        self._killed.append(victim)
        del self._handles[victim]
        self._handles[name] = self._start_engine(name, seed=self._options.seed + 100)
        started = time.monotonic()
        updated = await sources.replace(victim, name, self._handles[name], version)
        if updated is not None:
            self._note(version, loss, updated)
        self._out(f"      {name} is on v{version} after {format_seconds(time.monotonic() - started)}")

    # ------------------------------------------------------------------------------- the end

    async def _compare(self, sources: Sources) -> tuple[EngineResult, ...]:
        last = self._options.updates
        samples = {name: await self._sample(handle, version=last) for name, handle in self._handles.items()}
        self._show(*next(iter(samples.items())))
        digests = await sources.digests()
        results = []
        for name, handle in self._handles.items():
            tally: EngineTally = await await_ref(handle.tally.remote())
            results.append(EngineResult.of(name, tally, combined_digest(digests)))
        return tuple(results)

    async def _sample(self, handle: Any, *, version: int | None) -> Sample | None:
        """The first sample of ``version`` that the engine shows, or its newest when the limit is over."""
        limit = time.monotonic() + SAMPLE_LIMIT
        while True:
            sample: Sample | None = await await_ref(handle.latest.remote())
            if (sample is not None and sample.version == version) or time.monotonic() > limit:
                return sample
            await asyncio.sleep(0.1)

    def _show(self, engine: str, sample: Sample | None) -> None:
        if sample is not None:
            version = "untrained" if sample.version is None else f"v{sample.version}"
            self._out(f"      {engine}, {version}: {sample.text!r}")
