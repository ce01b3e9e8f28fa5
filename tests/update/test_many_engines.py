"""The source's event loop keeps its rhythm with many engines and many tensors, above what an idle process sees."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
import ray
import torch

from async_wsync import EngineState, StateDictSource, Timeouts, TorchEngine, WeightBroadcaster, WeightReceiver
from async_wsync.engines.torch.messages import Reply, Request
from async_wsync.runtime.loop_gap import LoopGapMeter
from async_wsync.runtime.object_refs import await_ref
from tests.support.cluster import RayCluster
from tests.support.idle import IdleProcess, longest_beyond

BOUND = 0.020  # G7
TRIES = 3  # a virtual machine's CPU may be taken away while it counts as used
ENGINES = 8  # in one process: it is the source that must cope with them, not this machine
TENSORS = 1_000
LIMITS = Timeouts(connect=60, lock=60, pause=60, flush=60, begin=60, bucket=60, end=60, resume=60, drain=10, close=10)


def many(count: int, value: float) -> dict[str, torch.Tensor]:
    flat = torch.full((count * 16,), value)
    names = (f"model.layers.{i // 64}.mlp.experts.{i % 64}.down_proj.weight" for i in range(count))
    return dict(zip(names, flat.view(count, 4, 4).unbind(), strict=True))


class Receivers:
    """Several engines in one process, each behind a method of its own: ``ask_0`` and so on."""

    def __init__(self, count: int) -> None:
        gc.freeze()
        self.models = [many(count, -1.0) for _ in range(ENGINES)]
        self.receivers = [WeightReceiver(model, name=f"r{i}") for i, model in enumerate(self.models)]

    def ready(self) -> None: ...

    def held(self) -> list[tuple[int | None, float]]:
        """The version of each, and the sum of all its elements."""
        return [
            (receiver.weight_version, float(sum(tensor.sum() for tensor in model.values())))
            for receiver, model in zip(self.receivers, self.models, strict=True)
        ]


def _forward(index: int) -> Any:
    def ask(self: Any, request: Request) -> Reply:
        reply: Reply = self.receivers[index].weight_sync(request)
        return reply

    return ask


for _index in range(ENGINES):
    setattr(Receivers, f"ask_{_index}", _forward(_index))


async def test_the_loop_keeps_turning_with_many_engines_and_many_tensors(ray_cluster: RayCluster) -> None:
    actor = ray.remote(num_cpus=0)(Receivers).remote(TENSORS)
    await await_ref(actor.ready.remote())
    adapters = [TorchEngine(actor, name=f"e{i}", method=f"ask_{i}") for i in range(ENGINES)]
    versions = iter(range(1, 100))
    found: dict[str, float] = {}
    state = many(TENSORS, 0.0)
    gc.collect()
    gc.freeze()
    try:
        async with WeightBroadcaster(adapters, lock=None, backend="gloo", progress=False, timeouts=LIMITS) as source:
            for verify in (None, None, "engines"):
                for _ in range(TRIES):
                    version = next(versions)
                    next(iter(state.values()))._base.fill_(float(version))  # type: ignore[union-attr]
                    await asyncio.sleep(0.05)
                    with IdleProcess() as idle, LoopGapMeter() as meter:
                        report = await source.update_weights(StateDictSource(state), version=version, verify=verify)
                        gaps = meter.gaps
                    assert report.num_tensors == TENSORS
                    assert set(source.engine_states.values()) == {EngineState.CURRENT}
                    found[f"verify={verify}, version {version}"] = longest = longest_beyond(gaps, idle.late)
                    if longest < BOUND:
                        break
                else:
                    shown = {what: f"{gap * 1e3:.1f} ms" for what, gap in found.items()}
                    pytest.fail(f"the loop was held for more than 20 ms above an idle process: {shown}; {report.spans}")
            held = await await_ref(actor.held.remote())
            assert held == ENGINES * [(version, float(version) * TENSORS * 16)]
    finally:
        gc.unfreeze()
        ray.kill(actor)
    print({what: f"{gap * 1e3:.1f} ms" for what, gap in found.items()})
