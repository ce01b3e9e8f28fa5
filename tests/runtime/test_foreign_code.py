"""What foreign code raises is a failure of its own, and never a cancellation, an exit or an end of ours."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import FrameType
from typing import Any

import anyio
import pytest
import torch

from async_wsync.errors import EngineFailed, LockError, SourceError
from async_wsync.progress import make_progress
from async_wsync.runtime.cancellation import finish
from async_wsync.runtime.engine_calls import EngineCalls, Interrupt, told
from async_wsync.runtime.foreign_code import ForeignExit, contained
from async_wsync.runtime.threads import DaemonWorker
from async_wsync.sources import IterableSource, StateDictSource
from async_wsync.sources.reader import SourceReader
from async_wsync.types import Manifest, ParamMeta
from async_wsync.update.locked_work import enter

EXITS = [asyncio.CancelledError, SystemExit, KeyboardInterrupt, GeneratorExit]
MANIFEST = Manifest(params=(ParamMeta(name="w", dtype="float32", shape=(2,)),))


class BadSource:
    """A source that raises ``exit`` at one place."""

    casts = False

    def __init__(self, place: str, error: type[BaseException]) -> None:
        self.fired = 0
        self._place = place
        self._error = error

    def _maybe(self, place: str) -> None:
        if place == self._place:
            self.fired += 1
            raise self._error("from the source")

    @property
    def device(self) -> torch.device:
        self._maybe("device")
        return torch.device("cpu")

    @property
    def collective(self) -> bool:
        self._maybe("collective")
        return False

    def manifest(self) -> Manifest:
        self._maybe("manifest")
        return MANIFEST

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._maybe("tensors")
        return self._walk()

    def _walk(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._maybe("first tensor")
        yield "w", torch.ones(2)
        self._maybe("end of the walk")


async def read_rows(source: Any) -> None:
    reader = SourceReader(source)
    try:
        await reader.first_rows(["w"])
    finally:
        await reader.aclose()


async def read_digests(source: Any) -> None:
    reader = SourceReader(source)
    try:
        await reader.manifest()
        await reader.digests()
    finally:
        await reader.aclose()


@pytest.mark.parametrize("error", EXITS)
@pytest.mark.parametrize("read", [read_digests, read_rows])
@pytest.mark.parametrize("place", ["manifest", "device", "collective", "tensors", "first tensor", "end of the walk"])
async def test_what_a_source_raises_is_a_source_error_that_a_task_group_sees(
    place: str, read: Any, error: type[BaseException]
) -> None:
    source = BadSource(place, error)
    with pytest.raises(ExceptionGroup) as group:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read(source))
    (failure,) = group.value.exceptions
    assert isinstance(failure, SourceError)
    assert type(failure.__cause__) is error
    assert source.fired == 1


@pytest.mark.parametrize("error", EXITS)
@pytest.mark.parametrize("hook", ["rename", "include"])
async def test_what_a_rename_function_raises_is_a_source_error_too(hook: str, error: type[BaseException]) -> None:
    def raises(name: str) -> Any:
        raise error(name)

    reader = SourceReader(StateDictSource({"w": torch.ones(2)}, **{hook: raises}))
    with pytest.raises(SourceError, match="could not tell its manifest") as caught:
        await reader.manifest()
    assert type(caught.value.__cause__) is error
    await reader.aclose()


@pytest.mark.parametrize("error", EXITS)
async def test_what_an_async_source_raises_in_its_own_loop_is_a_source_error(error: type[BaseException]) -> None:
    async def walk() -> Any:
        yield "w", torch.ones(2)
        raise error

    reader = SourceReader(IterableSource(walk))
    with pytest.raises(SourceError, match="could not tell its manifest"):
        await reader.manifest()
    await reader.aclose()


@pytest.mark.parametrize("error", EXITS)
async def test_what_a_threads_work_raises_is_an_exception_to_whoever_awaits_it(error: type[BaseException]) -> None:
    def work() -> None:
        raise error

    worker = DaemonWorker("worker")
    with pytest.raises(ForeignExit) as caught:
        await worker.run(work)
    assert type(caught.value.__cause__) is error
    assert await worker.run(lambda: "goes on") == "goes on"
    worker.close()


# -------------------------------------------------------------------------------- engines and hooks


def adapter_that(error: type[BaseException]) -> Callable[[], Any]:
    async def method() -> None:
        await asyncio.sleep(0)
        raise error("from the adapter")

    return method


@pytest.mark.parametrize("error", EXITS)
async def test_what_an_engines_adapter_raises_is_the_engines_failure(error: type[BaseException]) -> None:
    calls = EngineCalls(Interrupt())

    class Engine:
        name = "e0"

    sent = calls.start(Engine(), "check", adapter_that(error)())  # type: ignore[arg-type]
    with pytest.raises(EngineFailed, match="e0: check: ") as caught:
        await calls.first_failure([sent], limit=10, field="begin")
    assert caught.value.engine == "e0"
    assert type(caught.value.__cause__) is error


@pytest.mark.parametrize("error", [ValueError, *EXITS])
async def test_what_an_adapters_method_that_is_no_coroutine_raises_is_the_engines_failure(
    error: type[BaseException],
) -> None:
    def method(engine: Any) -> Any:
        raise error("from the adapter")

    class Engine:
        name = "e0"

    with pytest.raises(EngineFailed, match="e0: check: ") as caught:
        await EngineCalls(Interrupt()).everyone("check", [Engine()], method, limit=10, field="begin")  # type: ignore[list-item]
    assert (caught.value.engine, caught.value.phase) == ("e0", "check")
    assert type(caught.value.__cause__) is error


async def test_an_adapters_method_that_returns_nothing_to_await_is_the_engines_failure() -> None:
    def method(engine: Any) -> Any:
        return None

    class Engine:
        name = "e0"

    with pytest.raises(EngineFailed, match="e0: check: TypeError") as caught:
        await EngineCalls(Interrupt()).everyone("check", [Engine()], method, limit=10, field="begin")  # type: ignore[list-item]
    assert (caught.value.engine, caught.value.phase) == ("e0", "check")


async def test_a_future_that_somebody_else_cancelled_is_the_engines_failure_not_our_cancellation() -> None:
    async def method() -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    with pytest.raises(EngineFailed, match="cancelled from within"):
        await told("e0", "check", method())


async def test_a_cancelled_task_and_a_cancelled_scope_are_still_cancelled() -> None:
    task = asyncio.ensure_future(told("e0", "check", asyncio.sleep(60)))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    with anyio.move_on_after(0.01) as scope:
        await told("e0", "check", asyncio.sleep(60))
    assert scope.cancelled_caught
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await told("e0", "check", asyncio.sleep(60))


def test_a_call_that_is_closed_half_way_ends_quietly() -> None:
    loop = asyncio.new_event_loop()
    task = loop.create_task(told("e0", "check", asyncio.sleep(60)))
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    task.get_coro().close()  # type: ignore[union-attr]


async def test_an_inner_task_that_was_cancelled_from_within_is_no_cancellation_of_its_caller() -> None:
    async def inner() -> None:
        raise asyncio.CancelledError

    with pytest.raises(ForeignExit):
        await finish(inner(), name="the inner task")


@pytest.mark.parametrize("error", EXITS)
async def test_a_bar_that_raises_is_left_alone_whatever_it_raises(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    fired = []

    def bar(state: Any) -> None:
        fired.append(state.status)
        raise error

    progress = make_progress(bar)
    with caplog.at_level(logging.WARNING):
        progress.start(version=1, total_bytes=2, num_buckets=1)
        progress.advance(nbytes=2, bucket=0)
        progress.close(status="done")
    assert fired == ["running", "done"]
    assert "the progress bar raised" in caplog.text


# -------------------------------------------------------------------------------- locks


class BadLock:
    """A lock that raises ``error`` at one place."""

    def __init__(self, place: str, error: type[BaseException]) -> None:
        self.place, self.error = place, error
        self.fired = 0

    def _maybe(self, place: str) -> None:
        if place == self.place:
            self.fired += 1
            raise self.error("from the lock")

    def hold(self, *, label: str, timeout: float) -> Any:
        self._maybe("hold")
        return self._holding()

    @asynccontextmanager
    async def _holding(self) -> AsyncIterator[Any]:
        self._maybe("enter")
        yield "held"
        self._maybe("release")


@pytest.mark.parametrize("error", EXITS)
@pytest.mark.parametrize("place", ["hold", "enter", "release"])
async def test_what_a_lock_raises_is_a_lock_error_that_a_task_group_sees(
    place: str, error: type[BaseException]
) -> None:
    lock = BadLock(place, error)

    async def use() -> None:
        async with AsyncExitStack() as stack:
            await enter(stack, lock, label="l", timeout=1)

    with pytest.raises(ExceptionGroup) as group:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(use())
    (failure,) = group.value.exceptions
    assert isinstance(failure, LockError)
    assert type(failure.__cause__) is error
    assert lock.fired == 1


async def test_the_cancellation_of_who_holds_a_lock_goes_through_it() -> None:
    async def use() -> None:
        async with AsyncExitStack() as stack:
            await enter(stack, BadLock("", ValueError), label="l", timeout=1)
            await asyncio.sleep(60)

    task = asyncio.ensure_future(use())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


# -------------------------------------------------------------------------------- signals


def exits(number: int, frame: FrameType | None) -> None:
    sys.exit(77)


def exits_unnamed(*_: Any) -> None:
    sys.exit(77)


@pytest.mark.parametrize("handler", [exits, exits_unnamed, lambda *_: sys.exit(77)])
def test_the_exit_that_a_signal_asks_for_goes_through(handler: Any) -> None:
    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(SystemExit) as caught, contained():
            signal.raise_signal(signal.SIGTERM)
        assert caught.value.code == 77
        with pytest.raises(ForeignExit), contained():
            sys.exit(77)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ctrl_c_goes_through() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), contained():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_second_ctrl_c_goes_through_under_asyncios_own_handler() -> None:
    async def main() -> None:
        signal.raise_signal(signal.SIGINT)  # cancels this task
        with contained():
            signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second one got lost")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main())
    finally:
        signal.signal(signal.SIGINT, before)
