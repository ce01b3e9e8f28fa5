"""Weight updates into real vLLM engines: what they generate afterwards is what transformers generates."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from async_wsync import UpdateFailed, WeightBroadcaster
from async_wsync.engines.vllm.engine import VLLMActor, VLLMServer
from async_wsync.errors import EngineDied, EngineFailed, EngineRejected, StaleFence
from async_wsync.sources import ModuleSource, StateDictSource
from async_wsync.types import (
    Call,
    EngineInfo,
    EngineState,
    Manifest,
    PauseMode,
    Timeouts,
    UpdateEvent,
    UpdateSpec,
    WireFormat,
)
from tests.engines.vllm import rig
from tests.support.groups import joined
from tests.support.updates import update_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("default"),  # transformers' and vLLM's own
]

BUCKET_BYTES = 64 * 1024
LIMITS = Timeouts(bucket=20.0, connect=60.0, total=120.0, drain=10.0)
ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Fleet:
    """One vLLM behind a Ray actor and one behind a server, on the same first weights."""

    handle: Any
    server: rig.Server
    first: Any

    def actor(self) -> VLLMActor:
        return VLLMActor(self.handle, name="actor")

    def http(self) -> VLLMServer:
        return VLLMServer(self.server.url, name="server")

    async def say(self, engine: str, prompt: list[int] = rig.PROMPT) -> list[int]:
        if engine == "server":
            return await self.server.generate(prompt)
        answer = await self.handle.generate.remote(prompt, rig.sampling())
        tokens: list[int] = answer["token_ids"]
        return tokens

    async def hello(self, engine: str) -> EngineInfo:
        async with aclosing(self.adapter(engine)) as adapter:
            return await adapter.hello(_call())

    def adapter(self, engine: str) -> VLLMActor | VLLMServer:
        return self.http() if engine == "server" else self.actor()


@pytest.fixture(scope="module")
def fleet(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    import ray

    folder = tmp_path_factory.mktemp("vllm")
    first = rig.tiny_model(0)
    path = rig.save(first, folder / "model")
    server = rig.Server(path, folder / "server.log")
    try:
        handle = rig.start_actor(path)
        ray.get(handle.ready.remote(), timeout=rig.SERVER_START_SECONDS)
        server.wait_ready()
        yield Fleet(handle, server, first)
        ray.kill(handle)
    finally:
        server.stop()


def broadcaster(*engines: Any, **options: Any) -> WeightBroadcaster:
    settings: dict[str, Any] = {"lock": None, "backend": "gloo", "progress": False, "timeouts": LIMITS}
    return WeightBroadcaster(engines, **{**settings, "bucket_bytes": BUCKET_BYTES, **options})


_versions = iter(range(1, 1000))


async def heal(fleet: Fleet, *engines: Any, seed: int) -> Any:
    """A whole update of ``engines``; the model they have afterwards."""
    model = rig.tiny_model(seed)
    async with broadcaster(*engines) as wb:
        await wb.update_weights(ModuleSource(model), version=next(_versions))
    return model


# ------------------------------------------------------------------------ what is generated afterwards


@pytest.mark.parametrize("engine", ["actor", "server"])
async def test_greedy_tokens_are_those_of_transformers_on_the_new_weights(fleet: Fleet, engine: str) -> None:
    model = rig.tiny_model(10 if engine == "actor" else 11)
    wanted = rig.greedy(model, rig.PROMPT)
    assert await fleet.say(engine) == rig.greedy(fleet.first, rig.PROMPT) != wanted
    async with broadcaster(fleet.adapter(engine)) as wb:
        report = await wb.update_weights(ModuleSource(model), version=(version := next(_versions)))
        assert await fleet.say(engine) == wanted
        assert wb.current_engines() == (engine,)
    assert report.num_buckets > 5
    info = await fleet.hello(engine)
    assert (info.version, info.state) == (version, EngineState.CURRENT)
    assert info.notes == (), "vLLM's own version is ours"


async def test_a_sample_carries_the_version_that_made_it(fleet: Fleet) -> None:
    await heal(fleet, fleet.actor(), seed=20)
    version = (await fleet.hello("actor")).version
    answer = await fleet.handle.generate.remote(rig.PROMPT, rig.sampling())
    assert answer["weight_versions"] == [{"version": str(version), "start": 0, "end": 16}]
    assert await fleet.handle.raw.remote("get_weight_version") == str(version)


async def test_two_replicas_take_one_update_each_at_its_own_ranks(fleet: Fleet) -> None:
    model = rig.tiny_model(30)
    async with broadcaster(fleet.actor(), fleet.http()) as wb:
        for _ in range(2):
            await wb.update_weights(ModuleSource(model), version=next(_versions))
        assert wb.current_engines() == ("actor", "server")
    assert await fleet.say("actor") == await fleet.say("server") == rig.greedy(model, rig.PROMPT)


async def test_weights_of_another_float_type_are_cast_and_the_note_says_so(fleet: Fleet) -> None:
    model = rig.tiny_model(31)
    async with broadcaster(fleet.actor()) as wb:
        source = StateDictSource({name: t.to(torch.bfloat16) for name, t in model.state_dict().items()})
        report = await wb.update_weights(source, version=next(_versions))
    assert any("casts bfloat16 to float32" in note for note in report.engines["actor"].notes)
    assert await fleet.say("actor") == rig.greedy(model.to(torch.bfloat16).to(torch.float32), rig.PROMPT)


# -------------------------------------------------------------------------- requests in flight


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_a_request_in_flight_over_an_update(fleet: Fleet, mode: PauseMode) -> None:
    old = await heal(fleet, fleet.actor(), seed=40)
    new = rig.tiny_model(41)
    num_tokens = 300 if mode is PauseMode.DRAIN else 1500
    running = fleet.handle.generate.remote(rig.PROMPT, rig.sampling(num_tokens))
    while await fleet.handle.seen.remote() < 5:
        await asyncio.sleep(0.01)
    before = (await fleet.hello("actor")).version
    async with broadcaster(fleet.actor(), pause_mode=mode) as wb:
        assert await fleet.handle.seen.remote() < num_tokens
        await wb.update_weights(ModuleSource(new), version=(version := next(_versions)))
    answer = await running
    tokens, spans = answer["token_ids"], [(s["version"], s["start"], s["end"]) for s in answer["weight_versions"]]
    if mode is PauseMode.ABORT:
        assert answer["finish_reason"] == "abort"
        assert 5 <= len(tokens) < num_tokens
        assert tokens == rig.greedy(old, rig.PROMPT, num_tokens)[: len(tokens)]
    elif mode is PauseMode.DRAIN:
        assert spans == [(str(before), 0, num_tokens)]
    else:
        assert answer["finish_reason"] == "length"
        split = spans[0][2]
        assert 5 <= split < num_tokens
        assert spans == [(str(before), 0, split), (str(version), split, num_tokens)]
        if mode is PauseMode.RECOMPUTE:  # nothing of the old weights is left in the cache
            seen = rig.PROMPT + tokens[:split]
            assert tokens[split : split + 32] == rig.greedy(new, seen, min(32, num_tokens - split))
    assert await fleet.say("actor") == rig.greedy(new, rig.PROMPT)


# --------------------------------------------------------------- refused before the first byte


def _spoiled(model: Any, how: str) -> dict[str, torch.Tensor]:
    state = dict(model.state_dict())
    q, norm = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"
    if how == "unknown":
        state["model.layers.1.self_attn.z_proj.weight"] = state[q].clone()
    elif how == "unknown bias":  # which vLLM's own load_weights skips in silence
        state["model.layers.1.self_attn.q_proj.bias"] = state[norm].clone()
    elif how == "missing":
        del state["model.layers.0.self_attn.v_proj.weight"]
    elif how == "missing norm":
        del state[norm]
    elif how == "too small":
        state[q] = state[q][:64].contiguous()
    elif how == "too large":  # of which vLLM's own loader takes the first rows in silence
        state[q] = torch.cat([state[q], state[q]])
    elif how == "vocabulary":
        state["lm_head.weight"] = state["lm_head.weight"][:-8].contiguous()
    else:
        raise ValueError(how)
    return state


SPOILED = {
    "unknown": ("unknown", "model.layers.1.self_attn.z_proj.weight"),
    "unknown bias": ("unknown", "model.layers.1.self_attn.q_proj.bias"),
    "missing": ("missing", "model.layers.0.self_attn.v_proj.weight"),
    "missing norm": ("missing", "model.norm.weight"),
    "too small": ("mismatched", "model.layers.1.self_attn.q_proj.weight"),
    "too large": ("mismatched", "model.layers.1.self_attn.q_proj.weight"),
    "vocabulary": ("mismatched", "lm_head.weight"),
}


@pytest.mark.parametrize("how", list(SPOILED))
async def test_a_manifest_that_does_not_fit_is_refused_by_name_before_a_byte(fleet: Fleet, how: str) -> None:
    before = await fleet.say("actor")
    events: list[UpdateEvent] = []
    kind, name = SPOILED[how]
    async with broadcaster(fleet.actor(), on_event=events.append) as wb:
        with pytest.raises(EngineRejected) as caught:
            await wb.update_weights(StateDictSource(_spoiled(rig.tiny_model(50), how)), version=next(_versions))
    told = {k: getattr(caught.value, k) for k in ("unknown", "missing", "mismatched")}
    assert [len(names) for names in told.values()].count(0) == 2, told
    assert told[kind][0].startswith(name)
    assert caught.value.engine == "actor"
    assert not {e.kind for e in events} & {"paused", "begun", "bucket_submitted"}
    assert await fleet.say("actor") == before
    assert not await fleet.handle.is_paused.remote()


async def test_buckets_in_another_order_than_the_manifest_are_refused(fleet: Fleet) -> None:
    update = _update(rig.tiny_model(0))
    shuffled = UpdateSpec(
        update_id=update.update_id,
        version=update.version,
        manifest=Manifest(params=update.manifest.params[::-1]),
        buckets=update.buckets,
        group="",
    )
    with pytest.raises(EngineFailed, match="order"):
        await fleet.actor().check(_call(), shuffled)


# --------------------------------------------------------------------------------- failures


def _call(timeout: float = 20.0, *, fence: int | None = None, source: str = "test") -> Call:
    return Call(source=source, fence=time.time_ns() // 1_000_000 if fence is None else fence, timeout=timeout)


def _update(model: Any, group: str = "") -> UpdateSpec:
    return update_of(ModuleSource(model).manifest(), bucket_bytes=BUCKET_BYTES, version=next(_versions), group=group)


async def _never_sent(engine: VLLMActor | VLLMServer, model: Any, *, limit: float) -> EngineFailed:
    """Announce a bucket and send nothing."""
    call = _call(limit)
    group = await joined([engine], _call(fence=call.fence), timeout=limit)
    update = _update(model, group.spec.name)
    await engine.check(call, update)
    await engine.pause(call, PauseMode.ABORT)
    await engine.begin(call, update)
    waiting = asyncio.create_task(engine.receive(call, update, update.buckets[0]))
    began = time.monotonic()
    await asyncio.sleep(0.3)
    info = await engine.hello(_call(5.0))  # inside the receive it answers
    assert info.state is EngineState.UPDATING
    assert not waiting.done()
    with pytest.raises(EngineFailed) as caught:
        await waiting
    assert time.monotonic() - began < limit + 5.0
    await engine.leave(call, group.spec.name)
    await group.aclose(5.0)
    return caught.value


@pytest.mark.parametrize("engine", ["actor", "server"])
async def test_a_broadcast_that_never_comes_ends_in_time_and_the_engine_serves_again(fleet: Fleet, engine: str) -> None:
    adapter = fleet.adapter(engine)
    error = await _never_sent(adapter, rig.tiny_model(60), limit=2.0)
    assert error.is_collective
    assert (error.engine, error.phase, error.bucket) == (engine, "receive", 0)
    await adapter.reset(_call())
    await adapter.resume(_call())  # nothing was loaded: it is whole
    assert len(await fleet.say(engine)) == 16
    model = await heal(fleet, adapter, seed=61)
    assert await fleet.say(engine) == rig.greedy(model, rig.PROMPT)
    await adapter.aclose()


async def test_an_abort_ends_a_receive_at_once(fleet: Fleet) -> None:
    engine, model, call = fleet.actor(), rig.tiny_model(62), _call(60.0)
    group = await joined([engine], call, timeout=60.0)
    update = _update(model, group.spec.name)
    await engine.check(call, update)
    await engine.pause(call, PauseMode.ABORT)
    await engine.begin(call, update)
    waiting = asyncio.create_task(engine.receive(call, update, update.buckets[0]))
    await asyncio.sleep(0.3)
    began = time.monotonic()
    await engine.abort(call, group.spec.name)
    with pytest.raises(EngineFailed):
        await waiting
    assert time.monotonic() - began < 5.0
    await group.aclose(5.0)
    await heal(fleet, engine, seed=63)


async def test_a_caller_with_a_lower_fence_is_refused(fleet: Fleet) -> None:
    engine = fleet.actor()
    await engine.reset(_call())
    for stale in (engine.reset(_call(fence=1)), engine.publish(_call(fence=1), 5)):
        with pytest.raises(StaleFence):
            await stale


TRAINER = """
import asyncio, sys, time
from async_wsync import VLLMServer, WeightBroadcaster
from async_wsync.sources import IterableSource
from tests.engines.vllm import rig

def tensors():
    for number, (name, tensor) in enumerate(rig.tiny_model(70).state_dict().items()):
        if number == 12:
            print("half way", flush=True)
            time.sleep(600)
        yield name, tensor

async def main():
    from async_wsync.sources import ModuleSource
    source = IterableSource(tensors(), manifest=ModuleSource(rig.tiny_model(70)).manifest())
    engine = VLLMServer(sys.argv[1], name="server")
    async with WeightBroadcaster([engine], lock=None, backend="gloo", progress=False, bucket_bytes=32768) as wb:
        await wb.update_weights(source, version=100_000)

asyncio.run(main())
"""


async def test_a_trainer_killed_in_an_update_is_survived_and_the_next_one_heals(fleet: Fleet) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, fleet.server.url],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    try:
        assert trainer.stdout is not None
        line = await asyncio.get_running_loop().run_in_executor(None, trainer.stdout.readline)
        assert line == b"half way\n"
        engine = fleet.http()
        until = time.monotonic() + 20
        while (await engine.hello(_call())).state is not EngineState.UPDATING and time.monotonic() < until:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait(10)
        assert trainer.stdout is not None
        trainer.stdout.close()
    assert trainer.returncode == -signal.SIGKILL
    until = time.monotonic() + 20
    while (state := (await engine.hello(_call())).state) is EngineState.UPDATING and time.monotonic() < until:
        await asyncio.sleep(0.05)
    assert state is EngineState.TORN, "some of the new weights are in"
    with pytest.raises(EngineFailed, match="torn"):
        await engine.resume(_call())
    model = await heal(fleet, engine, seed=71)
    assert await fleet.say("server") == rig.greedy(model, rig.PROMPT)
    await engine.aclose()


async def _with_tp(path: str) -> AsyncIterator[Any]:
    import ray

    handle = rig.start_actor(path, env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, tensor_parallel_size=2)
    ray.get(handle.ready.remote(), timeout=rig.SERVER_START_SECONDS)
    yield handle
    ray.kill(handle)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="vLLM binds each rank to a core of its own")
async def test_tensor_parallel_ranks_and_tied_weights(fleet: Fleet, tmp_path: Path) -> None:
    first = rig.tiny_model(80, family="qwen2", tied=True)
    async for handle in _with_tp(rig.save(first, tmp_path / "qwen2")):
        engine = VLLMActor(handle, num_ranks=2, name="tp2")

        async def say(handle: Any = handle) -> Any:
            return (await handle.generate.remote(rig.PROMPT, rig.sampling()))["token_ids"]

        assert await say() == rig.greedy(first, rig.PROMPT)
        with pytest.raises(EngineFailed, match="2 ranks"):
            await VLLMActor(handle, num_ranks=1).hello(_call())
        # A failure on both ranks, after which vLLM must not mistake old answers for new ones.
        error = await _never_sent(engine, first, limit=2.0)
        assert error.is_collective
        for seed in (81, 82):
            model = rig.tiny_model(seed, family="qwen2", tied=True)
            async with broadcaster(engine) as wb:
                await wb.update_weights(ModuleSource(model), version=next(_versions))
            assert await say() == rig.greedy(model, rig.PROMPT)
        spoiled = StateDictSource(_spoiled(model, "too large"))
        async with broadcaster(engine) as wb:
            with pytest.raises(EngineRejected, match=r"layers\.1\.self_attn\.q_proj\.weight"):
                await wb.update_weights(spoiled, version=next(_versions))
        assert await say() == rig.greedy(model, rig.PROMPT)


async def test_an_engine_killed_in_an_update_is_named_and_the_other_goes_on(fleet: Fleet) -> None:
    """Last: the actor's engine is gone afterwards."""
    actor, server = fleet.actor(), fleet.http()
    worker = (await fleet.hello("actor")).pid
    killed: list[int] = []

    def kill(event: UpdateEvent) -> None:
        if event.kind == "bucket_done" and event.bucket == 2:
            os.kill(worker, signal.SIGKILL)
            killed.append(worker)

    model = rig.tiny_model(90)
    async with broadcaster(actor, server, on_event=kill) as wb:
        with pytest.raises(UpdateFailed) as caught:
            await wb.update_weights(ModuleSource(model), version=next(_versions))
        assert killed
        actor_outcome = caught.value.outcomes["actor"]
        assert (actor_outcome.state, wb.engine_states["server"]) == (EngineState.LOST, EngineState.TORN)
        assert "actor" in str(actor_outcome.error)
        await wb.remove_engines(["actor"])
        await wb.update_weights(ModuleSource(model), version=next(_versions))
    assert await fleet.say("server") == rig.greedy(model, rig.PROMPT)


def test_the_adapters_say_what_they_are() -> None:
    server = VLLMServer("http://127.0.0.1:1", num_ranks=4)
    assert (server.num_ranks, server.wire_format, server.pipelined) == (4, WireFormat.PACKED, True)
    with pytest.raises(ValueError, match="http"):
        VLLMServer("127.0.0.1:8000")
    with pytest.raises(ValueError, match="num_ranks"):
        VLLMServer("http://127.0.0.1:1", num_ranks=0)


async def test_a_server_that_is_not_there_is_named() -> None:
    server = VLLMServer("http://127.0.0.1:9", name="ghost")
    async with aclosing(server):
        with pytest.raises(EngineDied, match="ghost"):
            await server.hello(_call(2.0))
