"""New weights for two Ray engines, awaited. Run it as is: python examples/minimal.py"""

from __future__ import annotations

import asyncio

import ray
import torch
from torch import nn

from async_wsync import BroadcastLock, ModuleSource, TorchEngine, WeightBroadcaster, WeightReceiver


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))


@ray.remote
class Engine(WeightReceiver):
    def __init__(self) -> None:
        self.model = build()
        self.init_weight_receiver(self.model)

    def generate(self, prompt: torch.Tensor) -> tuple[int | None, torch.Tensor]:
        with self.serving() as version, torch.inference_mode():
            return version, self.model(prompt)


async def main() -> None:
    model, prompt = build(), torch.randn(512)
    engines = [Engine.remote() for _ in range(2)]
    lock = BroadcastLock.create(name="weights")
    async with WeightBroadcaster([TorchEngine(engine) for engine in engines], lock=lock) as broadcaster:
        for version in (1, 2):
            with torch.no_grad():  # stands for a training step
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.01)
            report = await broadcaster.update_weights(ModuleSource(model), version=version)
            print(report.summary())
    for engine in engines:
        version, answer = await engine.generate.remote(prompt)
        print(f"answered with version {version}, equal to the trainer's: {torch.allclose(answer, model(prompt))}")


if __name__ == "__main__":
    ray.init(address="local", num_cpus=4, include_dashboard=False)
    asyncio.run(main())
