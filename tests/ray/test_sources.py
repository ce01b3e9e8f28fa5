"""Sources of every kind against running engines: what they raise, what they reuse, and what arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from async_wsync import ModuleSource, TorchEngine, WeightBroadcaster, WeightSyncError
from tests.ray.fleet import BUCKET_BYTES, LIMITS, NAMES, Rig, a_model, a_source, heals

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
