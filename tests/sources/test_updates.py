"""Sources of every kind against running engines: what they raise, what they reuse, and what arrives."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import ray
import torch
from torch import nn

from async_wsync import BroadcastLock, IterableSource, ModuleSource, TorchEngine, WeightBroadcaster, WeightSyncError
from async_wsync.rounds.round import UpdateRound
from async_wsync.testing import Fault, start_engine
from async_wsync.transfer.checksum import model_digests
from tests.support.fleet import BUCKET_BYTES, LIMITS, NAMES, Rig, a_model, a_source, call, heals

# ------------------------------------------------------------------ what a source or an adapter raises


class RaisingSource(ModuleSource):
    """A module that raises ``error`` at one place."""

    def __init__(self, place: str, error: type[BaseException]) -> None:
        super().__init__(a_model(3))
        self.fired = 0
        self._place = place
        self._error = error

    def _maybe(self, place: str) -> None:
        if place == self._place:
            self.fired += 1
            raise self._error

    def manifest(self) -> Any:
        self._maybe("manifest")
        return super().manifest()

    def tensors(self) -> Iterator[Any]:
        for count, item in enumerate(super().tensors()):
            if count == 2:
                self._maybe("third tensor")
            yield item


def reasons(error: BaseException | None) -> list[type[BaseException]]:
    """The types of an error and of all its causes."""
    return [] if error is None else [type(error), *reasons(error.__cause__)]


async def fails_in_a_task_group(update: Any) -> BaseException:
    with pytest.raises(ExceptionGroup) as group:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(update)
    (failure,) = group.value.exceptions
    return failure


@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit])
@pytest.mark.parametrize("place", ["manifest", "third tensor"])
async def test_a_source_that_raises_a_cancellation_or_an_exit_fails_the_update(
    rig: Rig, place: str, error: type[BaseException]
) -> None:
    async with rig.broadcaster() as broadcaster:
        source = RaisingSource(place, error)
        failure = await fails_in_a_task_group(broadcaster.update_weights(source, version=rig.next_version()))
        assert source.fired == 1
        assert isinstance(failure, WeightSyncError)
        assert error in reasons(failure)
        await heals(rig, broadcaster)


class RaisingEngine(TorchEngine):
    """An adapter that raises ``error`` instead of making one call."""

    verb, error, fired = "", Exception, 0

    async def _ask(self, call: Any, verb: Any, **options: Any) -> Any:
        if type(verb).__name__.lower() == self.verb:
            self.fired += 1
            raise self.error
        return await super()._ask(call, verb, **options)


@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit])
@pytest.mark.parametrize("verb", ["hello", "check", "receive"])
async def test_an_adapter_that_raises_a_cancellation_or_an_exit_is_named_in_the_failure(
    rig: Rig, verb: str, error: type[BaseException]
) -> None:
    engines = [RaisingEngine(rig.handles[name], name=name) for name in NAMES]
    options: dict[str, Any] = {"lock": None, "backend": "gloo", "timeouts": LIMITS, "progress": False}
    async with WeightBroadcaster(engines, bucket_bytes=BUCKET_BYTES, **options) as broadcaster:
        engines[1].verb, engines[1].error = verb, error
        failure = await fails_in_a_task_group(broadcaster.update_weights(a_source(4), version=rig.next_version()))
        assert engines[1].fired >= 1
        assert isinstance(failure, WeightSyncError)
        assert error in reasons(failure)
        assert "e1" in str(failure)
        engines[1].verb = ""
        for name in NAMES:
            if broadcaster.engine_states[name] == "lost":
                await broadcaster.replace_engine(name, TorchEngine(rig.handles[name], name=name))
        await heals(rig, broadcaster)


async def test_hooks_that_raise_a_cancellation_or_an_exit_fail_no_update(rig: Rig) -> None:
    for error in (asyncio.CancelledError, SystemExit, GeneratorExit):
        fired: list[object] = []

        def hook(seen: object, error: type[BaseException] = error, fired: list[object] = fired) -> None:
            fired.append(seen)
            raise error

        async with rig.broadcaster(on_event=hook, progress=hook) as broadcaster:
            await broadcaster.update_weights(a_source(5), version=rig.next_version())
        assert len(fired) > 10


# ------------------------------------------------------------------ sources that reuse their memory


class Refill:
    """Makes generators of a model's tensors, each copied into the one buffer, which is spoilt when they end."""

    def __init__(self, model: nn.Module, *, layers: tuple[str, ...] = ("0", "1", "2", "3", "4")) -> None:
        state = {name: t for name, t in model.state_dict().items() if name.split(".")[0] in layers}
        self.manifest = IterableSource(list(state.items())).manifest()
        self.walks = 0
        self._state = state
        self._buffer = torch.zeros(max(t.numel() for t in state.values()))

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.walks += 1
        for name, tensor in self._state.items():
            yield name, self._buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)
        self._buffer.fill_(float("nan"))


@pytest.mark.parametrize("make", ["callable", "generator", "generator with a manifest"])
async def test_a_generator_that_refills_one_buffer_arrives_as_it_was_sent(rig: Rig, make: str) -> None:
    refill = Refill(a_model(11))
    manifest = refill.manifest if make == "generator with a manifest" else None
    source = IterableSource(refill if make == "callable" else refill(), manifest=manifest)
    async with rig.broadcaster(num_buffers=3) as broadcaster:
        await broadcaster.update_weights(source, version=rig.next_version(), verify="source")
    for name in NAMES:
        assert await rig.holds(name, a_model(11))
    assert refill.walks == (2 if make == "callable" else 1)


async def test_a_refilling_source_is_sent_again_to_the_engines_that_are_left(rig: Rig) -> None:
    refill = Refill(a_model(12))
    await rig.script("e2", Fault(do="raise_before", bucket=2))
    async with rig.broadcaster(on_engine_failure="drop") as broadcaster:
        source = IterableSource(refill, manifest=refill.manifest)
        report = await broadcaster.update_weights(source, version=rig.next_version(), verify="source")
        assert (report.rebuilds, report.dropped, refill.walks) == (1, ("e2",), 2)
        assert await rig.fired("e2")
        assert [await rig.holds(name, a_model(12)) for name in ("e0", "e1")] == [True, True]
        await heals(rig, broadcaster)


async def test_two_sources_of_a_round_may_both_refill_their_buffers(rig: Rig, lock: BroadcastLock) -> None:
    shared = UpdateRound.create(name=f"round-{uuid.uuid4().hex[:6]}", num_sources=2)
    parts = [Refill(a_model(13), layers=layers) for layers in (("0", "2", "4"), ("1", "3"))]
    async with rig.broadcaster(lock=lock, name="s0") as first, rig.broadcaster(lock=lock, name="s1") as second:
        version = rig.next_version()
        await asyncio.gather(
            *(
                broadcaster.update_weights(IterableSource(part), version=version, round=shared)
                for broadcaster, part in zip((first, second), parts, strict=True)
            )
        )
    for name in NAMES:
        assert await rig.holds(name, a_model(13))


def tensors_above_a_bucket(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(300, 300), nn.Linear(8, 8), nn.Linear(300, 400), nn.Linear(300, 300))


async def test_large_tensors_that_share_one_buffer_arrive_as_they_were_sent(ray_cluster: object) -> None:
    handle = start_engine(partial(tensors_above_a_bucket, 0))
    model = tensors_above_a_bucket(7)
    refill = Refill(model)
    try:
        async with WeightBroadcaster(
            [TorchEngine(handle)], lock=None, backend="gloo", bucket_bytes=64 * 1024, num_buffers=3, progress=False
        ) as broadcaster:
            source = IterableSource(refill, manifest=refill.manifest)
            await broadcaster.update_weights(source, version=1, verify="source")
        assert await call(handle.digests.remote()) == model_digests(model.state_dict())
    finally:
        ray.kill(handle)
