"""An engine is killed in the middle of a broadcast. The update ends on the others, a new engine takes its place.

Run it as is: python examples/survive_engine_crash.py
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import ray
import torch
from torch import nn

from async_wsync import (
    EngineNotServing,
    ModuleSource,
    TorchEngine,
    UpdateEvent,
    WeightBroadcaster,
    WeightReceiver,
    combined_digest,
    model_digests,
)

LAYERS, WIDTH, MIB = 8, 512, 1024 * 1024


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


@ray.remote(max_concurrency=2)
class Engine(WeightReceiver):
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = build()
        self.init_weight_receiver(self.model)

    def pid(self) -> int:
        return os.getpid()

    def generate(self) -> tuple[int | None, str]:
        """A sample: the version it was made with, and a checksum of the very weights that made it."""
        with self.serving(wait=5.0) as version, torch.inference_mode():
            self.model(torch.ones(WIDTH))
            return version, combined_digest(model_digests(self.model.state_dict()))


async def keep_generating(engine: ray.actor.ActorHandle, samples: list[tuple[int | None, str]]) -> None:
    """What a rollout orchestrator does all day; ends when the engine does."""
    while True:
        try:
            samples.append(await engine.generate.remote())
        except ray.exceptions.RayActorError:
            return
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, EngineNotServing):
                raise
            await asyncio.sleep(0.05)


async def main() -> None:
    engines = {f"rollout-{i}": Engine.remote() for i in range(3)}
    pids = dict(zip(engines, await asyncio.gather(*(e.pid.remote() for e in engines.values())), strict=True))
    samples: list[tuple[int | None, str]] = []
    rollouts = [asyncio.create_task(keep_generating(engine, samples)) for engine in engines.values()]
    killed: list[float] = []

    def kill_in_the_middle(event: UpdateEvent) -> None:
        if event.version == 2 and event.kind == "bucket_done" and not killed:
            os.kill(pids["rollout-1"], signal.SIGKILL)
            killed.append(time.monotonic())

    model, made = build(), {}
    async with WeightBroadcaster(
        [TorchEngine(engine, name=name) for name, engine in engines.items()],
        lock=None,
        bucket_bytes=MIB,
        progress=False,
        on_engine_failure="drop",
        on_event=kill_in_the_middle,
    ) as broadcaster:

        async def push(version: int) -> None:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.01)
            made[version] = combined_digest(model_digests(model.state_dict()))
            print((await broadcaster.update_weights(ModuleSource(model), version=version)).summary())

        await push(1)
        await push(2)
        print(f"rollout-1 was killed; the others had version 2 after {time.monotonic() - killed[0]:.2f} s\n")

        newcomer = Engine.remote()
        await newcomer.pid.remote()
        rollouts.append(asyncio.create_task(keep_generating(newcomer, samples)))
        await broadcaster.replace_engine("rollout-1", TorchEngine(newcomer, name="rollout-1b"))
        print("before its first update: " + ", ".join(f"{n} {s}" for n, s in broadcaster.engine_states.items()))
        caught_up = await broadcaster.catch_up(ModuleSource(model))
        assert caught_up is not None
        print(caught_up.summary())
        await push(3)
        assert broadcaster.current_engines() == ("rollout-0", "rollout-1b", "rollout-2")
        await asyncio.sleep(0.3)

    for task in rollouts:
        task.cancel()
    published = [(version, checksum) for version, checksum in samples if version is not None]
    torn = [sample for sample in published if made[sample[0]] != sample[1]]
    print(f"\n{len(published)} samples from versions {sorted({v for v, _ in published})}, {len(torn)} of them torn")
    assert not torn


if __name__ == "__main__":
    ray.init(address="local", num_cpus=6, include_dashboard=False)
    asyncio.run(main())
