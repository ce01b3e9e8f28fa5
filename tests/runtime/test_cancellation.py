"""`finish` and `settle`: everything runs to its end, and cancellation still means cancellation."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
import pytest

from async_wsync.runtime.cancellation import finish, settle


class Inner:
    """Something that must run to its end: records that it did, then succeeds or fails."""

    def __init__(self, *, fails: bool = False, steps: int = 6) -> None:
        self.fails = fails
        self.steps = steps
        self.ended = False
        self.interrupted = False
        self.started = asyncio.Event()

    async def __call__(self) -> str:
        self.started.set()
        try:
            for _ in range(self.steps):
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.interrupted = True
            raise
        self.ended = True
        if self.fails:
            raise KeyError("the inner failure")
        return "the result"


@pytest.fixture(autouse=True)
async def nothing_is_reported_by_the_loop() -> AsyncIterator[None]:
    """Field case A4: no exception is 'never retrieved', no task destroyed while pending."""
    reports: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
    yield
    gc.collect()
    await asyncio.sleep(0)
    assert not reports, reports


async def native_cancels(inner: Inner, count: int) -> BaseException | None:
    task = asyncio.create_task(finish(inner(), name="the inner task"))
    await inner.started.wait()
    for _ in range(count):
        task.cancel()
        await asyncio.sleep(0.005)
        assert not task.done(), "finish returned before its task had ended"
    await asyncio.wait([task])
    assert task.cancelling() == count, "finish must leave the count as the cancellers made it"
    try:
        await task
    except asyncio.CancelledError as cancel:
        return cancel
    raise AssertionError("the cancellation got lost")


async def under_a_cancelled_anyio_scope(inner: Inner, _: int) -> BaseException | None:
    seen: BaseException | None = None
    with anyio.CancelScope() as scope:
        asyncio.get_running_loop().call_later(0.01, scope.cancel)
        try:
            await finish(inner(), name="the inner task")
        except asyncio.CancelledError as cancel:
            seen = cancel
            raise
    assert scope.cancelled_caught
    return seen


async def under_an_expired_asyncio_timeout(inner: Inner, _: int) -> BaseException | None:
    seen: BaseException | None = None
    try:
        async with asyncio.timeout(0.01):
            try:
                await finish(inner(), name="the inner task")
            except asyncio.CancelledError as cancel:
                seen = cancel
                raise
    except TimeoutError:
        return seen
    raise AssertionError("the timeout did not show")


async def beside_a_failing_sibling(inner: Inner, _: int) -> BaseException | None:
    seen: BaseException | None = None

    async def ours() -> None:
        nonlocal seen
        try:
            await finish(inner(), name="the inner task")
        except asyncio.CancelledError as cancel:
            seen = cancel
            raise

    async def sibling() -> None:
        await inner.started.wait()
        raise ValueError("the sibling failed")

    async def family() -> None:
        # In a task of its own: CPython 3.11's TaskGroup leaves its parent's count at 1.
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ours())
            tasks.create_task(sibling())

    with pytest.raises(ExceptionGroup) as group:
        await asyncio.create_task(family())
    assert [type(error) for error in group.value.exceptions] == [ValueError]
    return seen


WAYS: list[tuple[Callable[[Inner, int], Awaitable[BaseException | None]], int]] = [
    (native_cancels, 1),
    (native_cancels, 2),
    (native_cancels, 3),
    (under_a_cancelled_anyio_scope, 0),
    (under_an_expired_asyncio_timeout, 0),
    (beside_a_failing_sibling, 0),
]


@pytest.mark.parametrize("fails", [False, True], ids=["inner-succeeds", "inner-fails"])
@pytest.mark.parametrize(("way", "count"), WAYS, ids=[f"{way.__name__}-{count}" for way, count in WAYS])
async def test_the_inner_task_ends_before_the_cancellation_is_raised(
    way: Callable[[Inner, int], Awaitable[BaseException | None]],
    count: int,
    fails: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    inner = Inner(fails=fails)
    own = asyncio.current_task()
    assert own is not None
    with caplog.at_level(logging.WARNING):
        seen = await way(inner, count)
    assert inner.ended
    assert not inner.interrupted
    assert own.cancelling() == 0
    await asyncio.sleep(0)  # a cancellation left behind would strike here
    if fails:
        assert isinstance(seen, asyncio.CancelledError)
        assert isinstance(seen.__cause__, KeyError), "the inner failure must not get lost"
        assert any("the inner failure" in note for note in seen.__notes__)
        assert "the inner task failed" in caplog.text


async def test_without_cancellation_the_outcome_is_the_inner_one() -> None:
    assert await finish(Inner()()) == "the result"
    with pytest.raises(KeyError, match="the inner failure"):
        await finish(Inner(fails=True)())


async def test_a_task_of_the_callers_can_be_finished_too() -> None:
    task = asyncio.create_task(Inner()())
    assert await finish(task) == "the result"
    assert await finish(task) == "the result"


async def test_a_native_cancel_is_not_swallowed_by_an_anyio_scope_that_was_cancelled_first() -> None:
    inner, after = Inner(), []

    async def body() -> None:
        with anyio.CancelScope() as scope:
            asyncio.get_running_loop().call_later(0.01, scope.cancel)
            await finish(inner())
        after.append("went on")

    task = asyncio.create_task(body())
    await asyncio.sleep(0.03)
    task.cancel()
    await asyncio.wait([task])
    assert inner.ended
    assert task.cancelled()
    assert not after


async def test_an_asyncio_timeout_inside_a_cancelled_task_stays_a_cancellation() -> None:
    inner = Inner()

    async def body() -> None:
        async with asyncio.timeout(0.01):
            await finish(inner())

    task = asyncio.create_task(body())
    await asyncio.sleep(0.03)
    task.cancel()
    await asyncio.wait([task])
    assert inner.ended
    assert task.cancelled()
    assert task.cancelling() == 1


async def test_a_cancel_that_comes_before_the_first_step_lets_the_inner_task_run() -> None:
    inner = Inner()

    async def body() -> None:
        own = asyncio.current_task()
        assert own is not None
        own.cancel()
        await finish(inner())

    task = asyncio.create_task(body())
    await asyncio.wait([task])
    assert task.cancelled()
    assert inner.ended


async def test_a_cancel_in_the_same_turn_as_the_inner_end_is_not_lost() -> None:
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def waits() -> None:
        await gate

    task = asyncio.create_task(finish(waits()))
    await asyncio.sleep(0.01)
    gate.set_result(None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the inner task has ended; finish is about to wake
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() or task.cancelling() == 1


async def test_on_cancel_is_called_once_at_the_first_cancellation() -> None:
    inner, calls = Inner(), []
    task = asyncio.create_task(finish(inner(), on_cancel=lambda: calls.append(inner.ended)))
    await inner.started.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.005)
    await asyncio.wait([task])
    assert calls == [False]


async def test_a_failing_on_cancel_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    inner = Inner()

    def breaks() -> None:
        raise RuntimeError("a bug in the callback")

    task = asyncio.create_task(finish(inner(), on_cancel=breaks))
    await inner.started.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert inner.ended
    assert "a bug in the callback" in caplog.text


async def test_a_task_that_runs_out_of_time_is_cancelled_and_named() -> None:
    inner = Inner(steps=1000)
    with pytest.raises(TimeoutError, match=r"the slow thing did not finish within 0.05 s"):
        await finish(inner(), timeout=0.05, name="the slow thing")
    assert inner.interrupted


async def test_a_cancelled_caller_of_a_task_that_runs_out_of_time_gets_the_cancellation() -> None:
    inner = Inner(steps=1000)
    task = asyncio.create_task(finish(inner(), timeout=0.1, name="the slow thing"))
    await inner.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as raised:
        await task
    assert inner.interrupted
    assert any("did not finish within 0.1 s" in note for note in raised.value.__notes__)


async def test_a_task_that_ignores_its_cancellation_is_left_behind_and_kept_alive(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended = asyncio.Event()

    async def stubborn() -> None:
        for _ in range(50):
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                pass
        ended.set()

    started = time.monotonic()
    with pytest.raises(TimeoutError):
        await finish(stubborn(), timeout=0.05, name="the stubborn one")
    assert time.monotonic() - started < 0.5
    assert "left to itself" in caplog.text
    gc.collect()
    await asyncio.wait_for(ended.wait(), 10)


async def test_what_the_inner_cleanup_raises_after_a_timeout_is_not_lost() -> None:
    async def slow() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            raise KeyError("cleanup broke")

    with pytest.raises(TimeoutError) as raised:
        await finish(slow(), timeout=0.02)
    assert isinstance(raised.value.__cause__, KeyError)


async def test_a_drain_under_a_cancelled_anyio_scope_does_not_spin() -> None:
    """Field case A3: one second of draining costs less than 50 ms of CPU."""
    with anyio.CancelScope() as scope:
        scope.cancel()
        before = time.thread_time()
        with pytest.raises(asyncio.CancelledError) as raised:
            await finish(asyncio.sleep(1.0))
        spent = time.thread_time() - before
        raise raised.value
    assert scope.cancelled_caught
    assert spent < 0.05, f"{spent * 1000:.0f} ms of CPU"


async def test_a_finished_update_keeps_nothing_alive_without_a_gc() -> None:
    class Tensorish:
        pass

    async def body(thing: Tensorish) -> None:
        await asyncio.sleep(0.03)

    async def cancelled_while_finishing() -> weakref.ref[Tensorish]:
        thing = Tensorish()
        task = asyncio.create_task(finish(body(thing)))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        return weakref.ref(thing)

    gc.collect()
    gc.disable()
    try:
        ref = await cancelled_while_finishing()
        await asyncio.sleep(0.01)
        assert ref() is None
    finally:
        gc.enable()


async def test_settle_tells_done_from_pending_and_raises_none_of_their_errors() -> None:
    good, bad = asyncio.create_task(Inner()()), asyncio.create_task(Inner(fails=True)())
    slow = asyncio.create_task(asyncio.sleep(30))
    done, pending = await settle([good, bad, slow], timeout=0.3)
    assert done == {good, bad}
    assert pending == {slow}
    assert not slow.cancelled()
    slow.cancel()
    await asyncio.wait([slow])


async def test_settle_waits_through_cancellations_and_then_raises_one() -> None:
    inners = [Inner(), Inner(fails=True)]
    tasks = [asyncio.create_task(inner()) for inner in inners]
    waiting = asyncio.create_task(settle(tasks, timeout=10))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert waiting.cancelling() == 2
    assert all(inner.ended for inner in inners)


async def test_settle_of_nothing_returns_at_once() -> None:
    assert await settle([], timeout=None) == (set(), set())


def test_ctrl_c_waits_for_the_inner_task() -> None:
    """asyncio.run turns SIGINT into a cancellation of the main task; the shielded part still completes."""
    script = """
import asyncio, os, signal
from async_wsync.runtime.cancellation import finish
async def inner():
    await asyncio.sleep(0.3)
    print("inner ended", flush=True)
async def main():
    asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGINT)
    await finish(inner())
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have their background jobs ignore it
try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    run = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", script], capture_output=True, text=True, timeout=60
    )
    assert run.stdout.split("\n")[:2] == ["inner ended", "interrupted"], run.stderr
    # On a busy machine dev mode also tells of slow callbacks; those lines are none of ours.
    assert not [line for line in run.stderr.splitlines() if not line.startswith("Executing <")], run.stderr
