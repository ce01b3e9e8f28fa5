"""Two trainer ranks, as two pipeline stages, each with half of the model, share engines, a lock and every update.

In a round the engines are paused once, each stage sends its half under the lock, and the version is published only if
both halves have arrived. Run it as is: python examples/two_sources.py
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
import torch
from torch import nn

from async_wsync import BroadcastLock, StateDictSource, TorchEngine, UpdateRound, WeightBroadcaster, WeightReceiver

LAYERS, WIDTH = 8, 256


def build() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


@ray.remote
class Engine(WeightReceiver):
    def __init__(self) -> None:
        self.model = build()
        self.init_weight_receiver(self.model)

    def generate(self, prompt: torch.Tensor) -> tuple[int | None, torch.Tensor]:
        with self.serving() as version, torch.inference_mode():
            return version, self.model(prompt)


@ray.remote
class Stage:
    """One stage of the pipeline: owns layers ``first`` to ``last - 1`` under the names they have in the whole model."""

    def __init__(self, name: str, first: int, last: int, engines: list[Any], lock: BroadcastLock, shared: UpdateRound):
        self.layers = {i: nn.Linear(WIDTH, WIDTH) for i in range(first, last)}
        self.round = shared
        self.broadcaster = WeightBroadcaster(
            [TorchEngine(engine, name=f"rollout-{i}") for i, engine in enumerate(engines)],
            lock=lock,
            name=name,
            progress=False,
        )

    async def push(self, version: int) -> str:
        weights = {f"{i}.{key}": value for i, layer in self.layers.items() for key, value in layer.state_dict().items()}
        report = await self.broadcaster.update_weights(StateDictSource(weights), version=version, round=self.round)
        return report.summary().splitlines()[0]

    async def part(self) -> dict[int, nn.Module]:
        return self.layers

    async def start(self) -> None:
        await self.broadcaster.connect()

    async def stop(self) -> None:
        await self.broadcaster.aclose()


async def main() -> None:
    engines = [Engine.remote() for _ in range(2)]
    lock = BroadcastLock.create(name="weights")
    shared = UpdateRound.create(name="pipeline", num_sources=2)
    stages = [
        Stage.remote("stage-0", 0, LAYERS // 2, engines, lock, shared),
        Stage.remote("stage-1", LAYERS // 2, LAYERS, engines, lock, shared),
    ]
    await asyncio.gather(*(stage.start.remote() for stage in stages))
    for version in (1, 2):
        for line in await asyncio.gather(*(stage.push.remote(version) for stage in stages)):
            print(line)

    whole: dict[int, nn.Module] = {}
    for stage in stages:
        whole |= await stage.part.remote()
    model, prompt = nn.Sequential(*(whole[i] for i in range(LAYERS))), torch.randn(WIDTH)
    for engine in engines:
        version, answer = await engine.generate.remote(prompt)
        print(f"answered with version {version}, equal to both stages': {torch.allclose(answer, model(prompt))}")
    await asyncio.gather(*(stage.stop.remote() for stage in stages))


if __name__ == "__main__":
    ray.init(address="local", num_cpus=6, include_dashboard=False)
    asyncio.run(main())
