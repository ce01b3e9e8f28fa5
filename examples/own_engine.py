"""Your own engine: an async Ray actor with a cache, which goes on answering while its weights change.

Run it as is: python examples/own_engine.py
"""

from __future__ import annotations

import asyncio

import ray
import torch
from torch import nn

from async_wsync import BroadcastLock, ModuleSource, Reply, Request, TorchEngine, WeightBroadcaster, WeightReceiver

VOCABULARY, WIDTH = 512, 256


def build() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY))


@ray.remote
class MyEngine:
    """Holds a `WeightReceiver` instead of inheriting from it, and forwards ``weight_sync`` to it."""

    def __init__(self) -> None:
        self.model = build()
        self.cache: dict[int, int] = {}  # next token by token, computed with the weights of now
        self.receiver = WeightReceiver(self.model, name="my-engine", on_flush=self.drop_cache)

    def weight_sync(self, request: Request) -> Reply:
        return self.receiver.weight_sync(request)

    def drop_cache(self) -> None:
        self.cache.clear()

    async def generate(self, token: int, length: int) -> tuple[list[int], list[int | None]]:
        """Tokens, and the weight version each came from: the gate is passed anew for every token."""
        tokens, versions = [token], []
        for _ in range(length):
            async with self.receiver.serving(wait=30.0) as version:
                tokens.append(self.next_token(tokens[-1]))
            versions.append(version)
            await asyncio.sleep(0.002)  # other requests, and the next update, come in here
        return tokens, versions

    def next_token(self, token: int) -> int:
        if token not in self.cache:
            with torch.inference_mode():
                self.cache[token] = int(self.model(torch.tensor([token])).argmax())
        return self.cache[token]


async def main() -> None:
    engine, model = MyEngine.remote(), build()
    lock = BroadcastLock.create(name="weights")
    async with WeightBroadcaster([TorchEngine(engine, name="my-engine")], lock=lock) as broadcaster:
        await broadcaster.update_weights(ModuleSource(model), version=1)
        running = engine.generate.remote(3, 400)  # goes on through the next update
        await asyncio.sleep(0.2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        report = await broadcaster.update_weights(ModuleSource(model), version=2)
        print(report.summary())
        _, versions = await running
    spans = {version: versions.count(version) for version in dict.fromkeys(versions)}
    print(f"one request, tokens by weight version: {spans}")


if __name__ == "__main__":
    ray.init(address="local", num_cpus=4, include_dashboard=False)
    asyncio.run(main())
