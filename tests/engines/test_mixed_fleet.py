"""A real SGLang, a real vLLM and a plain PyTorch engine take the same updates; what each generates is transformers'.

Runs where vLLM is installed; ``ASYNC_WSYNC_SGLANG_PYTHON`` names the Python that has SGLang.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from async_wsync import TorchEngine, WeightBroadcaster, WeightReceiver
from async_wsync.engines.sglang.server import SGLangServer
from async_wsync.engines.torch.messages import Reply, Request
from async_wsync.engines.vllm.engine import VLLMServer
from async_wsync.sources import SafetensorsSource
from async_wsync.types import Call, EngineState, PauseMode, UpdateEvent
from tests.engines.sglang.server import SGLangProcess, generate
from tests.engines.vllm import rig

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("default"),  # transformers' and vLLM's own
    pytest.mark.skipif(
        "ASYNC_WSYNC_SGLANG_PYTHON" not in os.environ,
        reason="ASYNC_WSYNC_SGLANG_PYTHON does not name a Python that has SGLang",
    ),
]

ROOT = Path(__file__).resolve().parents[2]
NUM_TOKENS = 16
BUCKET_BYTES = 64 * 1024
NUM_CHECKPOINTS = 3
WRONG = "model.layers.1.mlp.up_proj.weight"


class LlamaEngine:
    """transformers' Llama as an engine, with nothing of SGLang or vLLM."""

    def __init__(self, seed: int) -> None:
        self._model = rig.tiny_model(seed)
        self._receiver = WeightReceiver(self._model, name="torch")

    def weight_sync(self, request: Request) -> Reply:
        return self._receiver.weight_sync(request)

    def generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        with self._receiver.serving():
            return rig.greedy(self._model, prompt, num_tokens)


@dataclass
class Fleet:
    """Three engines, started on the first of ``checkpoints``; ``wanted`` are the greedy tokens of each checkpoint.

    ``held``: the number of the checkpoint that all three are on.
    """

    sglang: SGLangProcess
    vllm: rig.Server
    torch: Any
    checkpoints: Sequence[Path]
    wanted: Sequence[list[int]]
    held: int = 0

    def adapters(self) -> list[SGLangServer | VLLMServer | TorchEngine]:
        return [
            SGLangServer(self.sglang.url, name="sglang"),
            VLLMServer(self.vllm.url, name="vllm"),
            TorchEngine(self.torch, name="torch"),
        ]

    async def say(self) -> dict[str, list[int]]:
        """What each engine generates."""
        return {
            "sglang": (await generate(self.sglang.url, rig.PROMPT, NUM_TOKENS))["output_ids"],
            "vllm": await self.vllm.generate(rig.PROMPT, NUM_TOKENS),
            "torch": await self.torch.generate.remote(rig.PROMPT, NUM_TOKENS),
        }

    async def known_versions(self) -> dict[str, int | None]:
        """The version that each engine itself answers with."""
        found = {}
        for engine in self.adapters():
            async with aclosing(engine):
                call = Call(source="test", fence=time.time_ns() // 1_000_000, timeout=20.0)
                found[engine.name] = (await engine.hello(call)).version
        return found


def broadcaster(*engines: Any, **options: Any) -> WeightBroadcaster:
    settings: dict[str, Any] = {
        "lock": None,
        "backend": "gloo",
        "bucket_bytes": BUCKET_BYTES,
        "pause_mode": PauseMode.RECOMPUTE,
        "progress": False,
        "master_address": "127.0.0.1",
    }
    return WeightBroadcaster(engines, **{**settings, **options})


@pytest.fixture(scope="module")
def fleet(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    import ray

    folder = tmp_path_factory.mktemp("fleet")
    models = [rig.tiny_model(seed) for seed in range(NUM_CHECKPOINTS)]
    checkpoints = [Path(rig.save(model, folder / str(seed))) for seed, model in enumerate(models)]
    wanted = [rig.greedy(model, rig.PROMPT, NUM_TOKENS) for model in models]
    assert len({tuple(tokens) for tokens in wanted}) == NUM_CHECKPOINTS, "the checkpoints must differ"
    vllm = rig.Server(str(checkpoints[0]), folder / "vllm.log")
    try:
        sglang = SGLangProcess(checkpoints[0], folder / "sglang.log")
        try:
            handle = ray.remote(LlamaEngine).options(num_cpus=0).remote(0)
            sglang.wait_until_ready()
            vllm.wait_ready()
            yield Fleet(sglang, vllm, handle, checkpoints, wanted)
            ray.kill(handle)
        finally:
            sglang.kill()
    finally:
        vllm.stop()


def everywhere(value: Any) -> dict[str, Any]:
    return dict.fromkeys(("sglang", "vllm", "torch"), value)


async def test_sglang_vllm_and_torch_take_each_update_together(fleet: Fleet) -> None:
    assert await fleet.say() == everywhere(fleet.wanted[0])
    events: list[UpdateEvent] = []
    async with broadcaster(*fleet.adapters(), on_event=events.append) as wb:
        for number in (1, 2):
            version = 10 + number
            report = await wb.update_weights(SafetensorsSource(fleet.checkpoints[number]), version=version)
            assert await fleet.say() == everywhere(fleet.wanted[number])
            assert await fleet.known_versions() == everywhere(version)
            outcomes = {name: (o.state, o.version, o.error) for name, o in report.engines.items()}
            assert outcomes == everywhere((EngineState.CURRENT, version, None))
            assert report.num_buckets > 5
            assert all(f"{name}: current, version {version}" in report.summary() for name in report.engines)
            fleet.held = number
    kinds = [event.kind for event in events]
    assert (kinds.count("update_started"), kinds.count("update_finished")) == (2, 2), "one for all, not one for each"


async def push(fleet: Fleet, checkpoint: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """``async-wsync push`` to both servers, as a person runs it."""
    command = [sys.executable, "-m", "async_wsync", "push", str(checkpoint)]
    servers = ["--sglang", fleet.sglang.url, "--vllm", fleet.vllm.url, "--master-address", "127.0.0.1"]
    return await asyncio.to_thread(
        subprocess.run,
        [*command, *servers, *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


async def test_a_push_reaches_both_servers_and_a_dry_run_before_it_changes_nothing(
    fleet: Fleet, tmp_path: Path
) -> None:
    urls = (fleet.sglang.url, fleet.vllm.url)
    target = (fleet.held + 1) % NUM_CHECKPOINTS
    old, new = fleet.wanted[fleet.held], fleet.wanted[target]
    before = await fleet.known_versions()
    assert await fleet.say() == everywhere(old)

    done = await push(fleet, fleet.checkpoints[target], "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was sent" in done.stdout
    assert all(f"{url}: fits" in done.stdout for url in urls)

    tensors = load_file(fleet.checkpoints[target] / "model.safetensors")
    tensors[WRONG] = tensors[WRONG][:-8].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    done = await push(fleet, tmp_path, "--dry-run")
    assert done.returncode == 3, done.stdout + done.stderr
    refusals = [line.strip() for line in done.stdout.splitlines() if WRONG in line]
    assert all(any(line.startswith(url) for line in refusals) for url in urls), "each server is named"

    assert await fleet.say() == everywhere(old)
    assert await fleet.known_versions() == before

    done = await push(fleet, fleet.checkpoints[target])
    assert done.returncode == 0, done.stdout + done.stderr
    version = max(before["sglang"] or 0, before["vllm"] or 0) + 1
    assert all(f"{url}: current, version {version}" in done.stdout for url in urls)
    assert await fleet.say() == {"sglang": new, "vllm": new, "torch": old}
    assert await fleet.known_versions() == {**before, "sglang": version, "vllm": version}
