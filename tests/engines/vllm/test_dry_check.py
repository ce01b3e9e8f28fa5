"""A check without the lock, as a dry run makes it, next to the updates of others. The real receiver, without vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from async_wsync import WeightBroadcaster
from async_wsync.engines.update_codec import update_to_json
from async_wsync.engines.vllm.engine import VLLMEngine
from async_wsync.engines.vllm.messages import encode
from async_wsync.errors import EngineRejected
from async_wsync.sources import StateDictSource
from async_wsync.types import Call, UpdateEvent
from tests.support import updates
from tests.support.vllm_double import Engine

ONLY_ASKS = Call(source="dry run", fence=0, timeout=10.0)


def tensors(fill: float) -> dict[str, torch.Tensor]:
    return {f"layers.{i}.weight": torch.full((32, 32), fill + i) for i in range(4)}


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(tensors(0.0))
    yield made
    made.close()


update_of = partial(updates.update_of, bucket_bytes=4096, version=9)


def broadcaster(engine: Engine, **options: Any) -> WeightBroadcaster:
    settings: dict[str, Any] = {"lock": None, "backend": "gloo", "progress": False, "bucket_bytes": 4096}
    adapter = VLLMEngine(engine, name="vllm")
    return WeightBroadcaster([adapter], master_address="127.0.0.1", **settings, **options)


async def test_it_is_answered_whatever_fence_was_seen_before(engine: Engine) -> None:
    async with broadcaster(engine) as wb:
        await wb.update_weights(StateDictSource(tensors(1.0)), version=1)
    adapter = VLLMEngine(engine, name="vllm")
    assert await adapter.check(ONLY_ASKS, update_of(tensors(2.0))) == ()
    with pytest.raises(EngineRejected, match="stranger"):
        await adapter.check(ONLY_ASKS, update_of({**tensors(2.0), "stranger": torch.zeros(3)}))


async def test_an_update_that_is_under_way_is_not_disturbed(engine: Engine) -> None:
    another = update_of({"stranger": torch.zeros(3)})
    answers: dict[str, dict[str, Any]] = {}

    def ask(event: UpdateEvent) -> None:
        if event.kind in ("paused", "bucket_done") and event.kind not in answers:
            request = encode("check", ONLY_ASKS, update=update_to_json(another))
            answers[event.kind] = engine.receivers[0].handle(request)

    async with broadcaster(engine, on_event=ask) as wb:
        await wb.update_weights(StateDictSource(tensors(1.0)), version=1)
    assert answers["paused"]["value"]["unused"] == ("stranger",), "after the update's own check, before its begin"
    assert answers["bucket_done"]["failure"]["kind"] == "EngineBusy"
    assert all(torch.equal(engine.loaders[0].tensors[name], tensor) for name, tensor in tensors(1.0).items())
    assert engine.loaders[0].kept == [True]
