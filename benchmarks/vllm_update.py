"""Seconds and GB/s of weight updates into one real vLLM on the CPU, and the share of vLLM's own loading.

Needs vLLM and transformers; run it in the environment of `nox -s vllm`:

    .nox/vllm/bin/python benchmarks/vllm_update.py
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


async def measure(size: str, *, hidden: int, layers: int, updates: int, server: bool) -> None:
    import ray
    import torch

    from async_wsync.engines.vllm.engine import VLLMActor, VLLMServer
    from tests.engines.vllm import rig

    model = rig.tiny_model(0, hidden=hidden, layers=layers).to(torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        path = rig.save(model, Path(folder) / "model")
        if not server:
            handle = rig.start_actor(path, dtype="bfloat16")
            await handle.ready.remote()
            await send(size, "actor", VLLMActor(handle), model, updates)
            ray.kill(handle)
            return
        process = rig.Server(path, Path(folder) / "log", dtype="bfloat16")
        try:
            process.wait_ready()
            await send(size, "server", VLLMServer(process.url), model, updates)
        finally:
            process.stop()


async def send(size: str, kind: str, engine: Any, model: Any, updates: int) -> None:
    from async_wsync import WeightBroadcaster
    from async_wsync.sources import ModuleSource
    from async_wsync.types import Call

    async with WeightBroadcaster([engine], lock=None, backend="gloo", progress=False) as broadcaster:
        for version in range(updates):
            report = await broadcaster.update_weights(ModuleSource(model), version=version)
            call = Call(source="benchmark", fence=0, timeout=10.0)
            loading, sending = await engine.load_seconds(call), report.phases["receive"]
            print(
                f"| {size} | {kind} | {report.nbytes / 1e6:.1f} MB | {report.num_tensors} | {report.num_buckets} | "
                f"{report.seconds:.2f} s | {sending:.2f} s | {report.nbytes / report.seconds / 1e9:.3f} GB/s | "
                f"{report.nbytes / sending / 1e9:.3f} GB/s | {loading:.3f} s ({loading / report.seconds:.0%}) |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--only", choices=("tiny", "large"))
    parser.add_argument("--engine", choices=("actor", "server"), default="actor")
    args = parser.parse_args()
    sizes = {"tiny": {"hidden": 128, "layers": 2}, "large": {"hidden": 1024, "layers": 26}}
    print("| model | engine | bytes | tensors | buckets | update | broadcast | whole | broadcast alone | loading |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for size, shape in sizes.items():
        if args.only in (None, size):
            asyncio.run(measure(size, **shape, updates=args.updates, server=args.engine == "server"))


if __name__ == "__main__":
    main()
