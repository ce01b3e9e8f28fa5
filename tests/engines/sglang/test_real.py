"""A real SGLang server on the CPU takes weights from us; what it then generates is compared with transformers."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from async_wsync.broadcaster import WeightBroadcaster
from async_wsync.engines.sglang.server import SGLangServer
from async_wsync.errors import EngineFailed, EngineRejected, EngineTimeout, UpdateFailed
from async_wsync.sources import SafetensorsSource, StateDictSource
from async_wsync.transfer.plan import plan_buckets
from async_wsync.types import Call, EngineInfo, EngineState, PauseMode, UpdateSpec, WireFormat
from tests.engines.sglang.model import LORA_CONFIG
from tests.engines.sglang.server import SGLangProcess, generate, greedy, model_tool
from tests.support.groups import joined, opened

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

PROMPT = [5, 17, 200, 3]
COUNT = 12
CALL = Call(source="test", fence=1, timeout=60.0)
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three checkpoints of one architecture, sharded, with an index."""
    folder = tmp_path_factory.mktemp("models")
    for seed in range(3):
        model_tool("make", str(folder / str(seed)), str(seed + 1))
    return [folder / str(seed) for seed in range(3)]


@pytest.fixture(scope="module")
def expected(models: list[Path]) -> list[list[int]]:
    """The greedy tokens of each."""
    tokens = [greedy(model, PROMPT, COUNT) for model in models]
    assert len({tuple(t) for t in tokens}) == 3, "the models must differ"
    return tokens


@pytest.fixture(scope="module")
def server(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangProcess]:
    process = SGLangProcess(models[0], tmp_path_factory.mktemp("log") / "server.log")
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.kill()


def broadcaster(*engines: Any, **options: Any) -> WeightBroadcaster:
    defaults: dict[str, Any] = {
        "lock": None,
        "backend": "gloo",
        "bucket_bytes": 64_000,
        "pause_mode": PauseMode.RECOMPUTE,
        "progress": False,
        "master_address": "127.0.0.1",
    }
    return WeightBroadcaster(engines, **{**defaults, **options})


def next_version() -> int:
    """Rising over all tests of the module, since they share a server."""
    return time.monotonic_ns() // 1_000_000


async def push(url: str, checkpoint: Path, **options: Any) -> Any:
    async with broadcaster(SGLangServer(url, **options)) as sender:
        return await sender.update_weights(SafetensorsSource(checkpoint), version=next_version())


async def greeting(url: str, **options: Any) -> EngineInfo:
    engine = SGLangServer(url, **options)
    try:
        return await engine.hello(CALL)
    finally:
        await engine.aclose()


async def tokens_of(url: str) -> list[int]:
    ids: list[int] = (await generate(url, PROMPT, COUNT))["output_ids"]
    return ids


@pytest.mark.parametrize("wire", [WireFormat.FLATTENED, WireFormat.PER_TENSOR])
async def test_after_an_update_it_generates_what_transformers_does_with_the_new_weights(
    server: SGLangProcess, models: list[Path], expected: list[list[int]], wire: WireFormat
) -> None:
    await push(server.url, models[0], wire_format=wire)
    assert await tokens_of(server.url) == expected[0]

    version = next_version()
    async with broadcaster(SGLangServer(server.url, wire_format=wire)) as sender:
        report = await sender.update_weights(SafetensorsSource(models[1]), version=version)
        assert (await tokens_of(server.url)) == expected[1] != expected[0]
        # The same group again: nothing is left over from the first update.
        await sender.update_weights(SafetensorsSource(models[2]), version=version + 1)

    assert await tokens_of(server.url) == expected[2]
    assert report.num_buckets > 1
    assert report.num_tensors == 21
    outcome = report.engines[server.url]
    assert outcome.state is EngineState.CURRENT
    assert outcome.version == version
    assert not outcome.notes, "its checkpoint could be read, so everything was checked"
    async with httpx.AsyncClient(trust_env=False) as client:
        info = (await client.get(f"{server.url}/model_info")).json()
    assert info["weight_version"] == str(version + 1)
    spans = (await generate(server.url, PROMPT, 4))["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == [str(version + 1)]


async def test_it_has_every_call_that_we_make(server: SGLangProcess) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        paths = (await client.get(f"{server.url}/openapi.json")).json()["paths"]
    ours: set[str] = set()
    for file in ("engine.py", "server.py", "http_transport.py"):
        text = (ROOT / "async_wsync" / "engines" / "sglang" / file).read_text()
        ours |= {f"/{route}" for route in re.findall(r'_(?:ask|read)\(\s*"([a-z_]+)"', text)}
    assert len(ours) >= 14
    assert ours <= set(paths)


# --------------------------------------------------------------------- requests in flight


async def start_long_request(url: str, count: int) -> asyncio.Task[dict[str, Any]]:
    """A request that has tokens, and far to go."""
    task = asyncio.create_task(generate(url, PROMPT, count))
    await asyncio.sleep(0.6)
    assert not task.done(), "the request ended before the update began"
    return task


@pytest.mark.parametrize("mode", [PauseMode.RECOMPUTE, PauseMode.KEEP])
async def test_a_request_in_flight_goes_on_with_the_new_weights(
    server: SGLangProcess, models: list[Path], mode: PauseMode
) -> None:
    await push(server.url, models[0])
    async with broadcaster(SGLangServer(server.url), pause_mode=mode) as sender:
        request = await start_long_request(server.url, 900)
        version = next_version()
        await sender.update_weights(SafetensorsSource(models[1]), version=version)
        answer = await request

    spans, made = answer["meta_info"]["weight_versions"], answer["output_ids"]
    assert len(made) == 900
    assert len(spans) == 2, spans
    assert spans[1]["version"] == str(version)
    assert spans[0]["start"] == 0
    assert spans[0]["end"] == spans[1]["start"]
    split = spans[1]["start"]
    assert 0 < split < 900
    assert made[:8] == greedy(models[0], PROMPT, 8)
    if mode is PauseMode.RECOMPUTE:
        # The cache was computed again: what follows is the new model's own continuation of the whole text.
        follows = min(8, 900 - split)
        assert made[split : split + follows] == greedy(models[1], PROMPT + made[:split], follows)


async def test_a_request_in_flight_is_ended_by_abort(server: SGLangProcess, models: list[Path]) -> None:
    await push(server.url, models[0])
    async with broadcaster(SGLangServer(server.url), pause_mode=PauseMode.ABORT) as sender:
        request = await start_long_request(server.url, 900)
        await sender.update_weights(SafetensorsSource(models[1]), version=next_version())
        answer = await request
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer["output_ids"]) < 900


async def test_draining_is_refused_and_the_engine_goes_on(
    server: SGLangProcess, models: list[Path], expected: list[list[int]]
) -> None:
    await push(server.url, models[0])
    async with broadcaster(SGLangServer(server.url), pause_mode=PauseMode.DRAIN) as sender:
        with pytest.raises(ValueError, match="no pause mode 'drain'"):
            await sender.update_weights(SafetensorsSource(models[1]), version=next_version())
    assert await tokens_of(server.url) == expected[0]


# ----------------------------------------------------------------- refused before a byte


def changed(checkpoint: Path, change: str) -> StateDictSource:
    weights: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob("*.safetensors"):
        weights |= load_file(file)
    if change == "unknown":
        weights["model.norm.bias"] = torch.zeros(64)
    elif change == "missing":
        del weights["model.norm.weight"]
    elif change == "shape":
        weights["model.norm.weight"] = torch.zeros(65)
    return StateDictSource(weights)


@pytest.mark.parametrize("change", ["unknown", "missing", "shape"])
async def test_what_does_not_fit_the_model_is_refused_before_a_byte(
    server: SGLangProcess, models: list[Path], expected: list[list[int]], change: str
) -> None:
    await push(server.url, models[0])
    version = (await greeting(server.url)).version
    async with broadcaster(SGLangServer(server.url)) as sender:
        with pytest.raises(EngineRejected, match=r"model\.norm") as caught:
            await sender.update_weights(changed(models[1], change), version=next_version())
    assert caught.value.engine == server.url
    assert await tokens_of(server.url) == expected[0]
    assert (await greeting(server.url)).version == version


async def test_without_its_checkpoint_the_names_are_probed(server: SGLangProcess, models: list[Path]) -> None:
    engine = SGLangServer(server.url, checkpoint=models[0] / "nowhere")
    fits = UpdateSpec(update_id="u", version=1, manifest=changed(models[1], "").manifest(), buckets=(), group="")
    notes = await engine.check(CALL, fits)
    assert any("left" in note or "leaves out" in note for note in notes)
    for change in ("unknown", "shape"):
        wrong = UpdateSpec(
            update_id="u", version=1, manifest=changed(models[1], change).manifest(), buckets=(), group=""
        )
        if change == "shape":
            continue  # of a vector cut to its first row nothing can be told
        with pytest.raises(EngineRejected, match=r"model\.norm\.bias"):
            await engine.check(CALL, wrong)
    await engine.aclose()


async def test_any_order_of_the_source_arrives_right(
    server: SGLangProcess, models: list[Path], expected: list[list[int]]
) -> None:
    weights = dict(reversed(list(changed(models[2], "").tensors())))
    async with broadcaster(SGLangServer(server.url)) as sender:
        await sender.update_weights(StateDictSource(weights), version=next_version())
    assert await tokens_of(server.url) == expected[2]


# ------------------------------------------------------------------------------- failures

TRAINER = """
import asyncio, sys, time
from async_wsync.broadcaster import WeightBroadcaster
from async_wsync.engines.sglang.server import SGLangServer
from async_wsync.sources import SafetensorsSource

class Slow(SafetensorsSource):
    def tensors(self):
        for i, item in enumerate(super().tensors()):
            if i == 12:
                print("in the middle", flush=True)
                time.sleep(600)
            yield item

async def main():
    url, checkpoint, version = sys.argv[1:]
    async with WeightBroadcaster(
        [SGLangServer(url)], lock=None, backend="gloo", bucket_bytes=64_000, pause_mode="recompute",
        progress=False, master_address="127.0.0.1",
    ) as sender:
        await sender.update_weights(Slow(checkpoint), version=int(version))

asyncio.run(main())
"""


async def test_a_trainer_killed_in_the_middle_is_followed_by_one_that_heals(
    server: SGLangProcess, models: list[Path], expected: list[list[int]]
) -> None:
    await push(server.url, models[0])
    command = [sys.executable, "-c", TRAINER, server.url, str(models[1]), str(next_version())]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert trainer.stdout is not None
    with trainer, trainer.stdout:
        line = await asyncio.to_thread(trainer.stdout.readline)
        assert "in the middle" in line
        await asyncio.sleep(0.3)
        trainer.send_signal(signal.SIGKILL)

    await push(server.url, models[2])
    assert await tokens_of(server.url) == expected[2]


async def test_a_broadcast_that_never_comes_is_over_when_the_trainer_leaves(
    server: SGLangProcess, models: list[Path], expected: list[list[int]]
) -> None:
    engine = SGLangServer(server.url)
    group = await joined([engine], CALL, hello=False, timeout=60.0, connect_timeout=60.0)
    source = SafetensorsSource(models[1])
    manifest = source.manifest()
    update = UpdateSpec(
        update_id="u",
        version=1,
        manifest=manifest,
        buckets=plan_buckets(manifest, bucket_bytes=64_000),
        group=group.spec.name,
    )
    await engine.pause(CALL, PauseMode.RECOMPUTE)
    await engine.begin(CALL, update)
    receiving = asyncio.create_task(engine.receive(CALL, update, update.buckets[0]))
    await asyncio.sleep(1.0)
    assert not receiving.done()
    with pytest.raises(EngineTimeout):
        await engine.reset(Call(source="t", fence=1, timeout=1.0))  # it is stuck: its own end call waits, too

    left = time.monotonic()
    group.abort()
    with pytest.raises(EngineFailed) as caught:
        await receiving
    assert time.monotonic() - left < 10.0
    assert caught.value.is_collective
    await engine.reset(CALL)
    await engine.leave(CALL, group.spec.name)
    await group.aclose(5.0)
    await engine.aclose()

    await push(server.url, models[2])
    assert await tokens_of(server.url) == expected[2]


async def test_a_join_that_nobody_answers_ends_when_the_rendezvous_is_given_up(server: SGLangProcess) -> None:
    engine = SGLangServer(server.url)
    rendezvous = await opened(3, timeout=10.0, connect_timeout=2.0)
    joining = asyncio.create_task(engine.join(CALL, rendezvous.spec, rank_offset=1))
    with pytest.raises(Exception, match="2"):
        await rendezvous.complete({1: engine.name, 2: "nobody"}, hello=False)
    await rendezvous.aclose()
    with pytest.raises(EngineFailed):
        await joining
    assert (await generate(server.url, PROMPT, 2))["output_ids"]
    await engine.aclose()


# ------------------------------------------------------------------------ a second server


@pytest.fixture(scope="module")
def second(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangProcess]:
    options = ("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "8")
    targets = ("--lora-target-modules", "q_proj", "v_proj")
    process = SGLangProcess(models[0], tmp_path_factory.mktemp("log") / "second.log", *options, *targets)
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.kill()


async def test_two_servers_take_one_update_and_hold_equal_weights(
    server: SGLangProcess, second: SGLangProcess, models: list[Path], expected: list[list[int]]
) -> None:
    engines = [SGLangServer(server.url), SGLangServer(second.url)]
    async with broadcaster(*engines) as sender:
        report = await sender.update_weights(SafetensorsSource(models[1]), version=next_version())
        assert {o.state for o in report.engines.values()} == {EngineState.CURRENT}
        assert await tokens_of(server.url) == await tokens_of(second.url) == expected[1]
        sums = [await engine.own_checksums(CALL) for engine in engines]
    assert sums[0]
    assert sums[0] == sums[1]


async def test_a_lora_adapter_is_loaded_from_memory(second: SGLangProcess, tmp_path: Path) -> None:
    model_tool("lora", str(tmp_path))
    adapter = load_file(tmp_path / "adapter_model.safetensors")
    engine = SGLangServer(second.url)
    plain = (await generate(second.url, PROMPT, COUNT))["output_ids"]

    await engine.load_lora(CALL, "tuned", adapter, LORA_CONFIG)
    tuned = (await generate(second.url, PROMPT, COUNT, lora_path="tuned"))["output_ids"]
    assert tuned != plain
    await engine.load_lora(CALL, "tuned", {name: t * 0 for name, t in adapter.items()}, LORA_CONFIG)
    assert (await generate(second.url, PROMPT, COUNT, lora_path="tuned"))["output_ids"] == plain

    assert await engine.unload_lora(CALL, "tuned")
    assert not await engine.unload_lora(CALL, "tuned")
    await engine.aclose()


async def test_a_server_killed_in_the_middle_is_named_and_the_other_is_healed(
    server: SGLangProcess, second: SGLangProcess, models: list[Path], expected: list[list[int]]
) -> None:
    killed = asyncio.Event()

    def on_event(event: Any) -> None:
        if event.kind == "bucket_done" and event.bucket == 1 and not killed.is_set():
            second.kill()
            killed.set()

    async with broadcaster(SGLangServer(server.url), SGLangServer(second.url), on_event=on_event) as sender:
        with pytest.raises(UpdateFailed, match=second.url) as caught:
            await sender.update_weights(SafetensorsSource(models[2]), version=next_version())
        assert killed.is_set()
        outcomes = caught.value.outcomes
        assert outcomes[second.url].state is EngineState.LOST
        assert outcomes[server.url].state is EngineState.TORN
        await sender.remove_engines([second.url])
        await sender.update_weights(SafetensorsSource(models[2]), version=next_version())
    assert await tokens_of(server.url) == expected[2]


# -------------------------------------------------------------------------- two ranks


async def test_two_tensor_parallel_ranks(models: list[Path], expected: list[list[int]], tmp_path: Path) -> None:
    process = SGLangProcess(models[0], tmp_path / "tp2.log", tp=2)
    try:
        await asyncio.to_thread(process.wait_until_ready)
        with pytest.raises(EngineRejected, match="tp_size=2"):
            await greeting(process.url)
        assert await tokens_of(process.url) == expected[0]
        await push(process.url, models[1], num_ranks=2)
        assert await tokens_of(process.url) == expected[1]
    finally:
        process.kill()
