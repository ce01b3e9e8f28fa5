"""Daemon workers: order, cancellation, and no thread that keeps the process alive."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from async_wsync.runtime.threads import DaemonWorker, run_bounded, spawn, wait_done, wait_for
from tests.support.waiting import until


async def test_calls_run_in_order_in_one_named_daemon_thread() -> None:
    worker, seen = DaemonWorker("the worker"), []

    def note(i: int) -> tuple[str, bool]:
        seen.append(i)
        return threading.current_thread().name, threading.current_thread().daemon

    futures = [worker.submit(note, i) for i in range(50)]
    assert {await wait_for(future) for future in futures} == {("the worker", True)}
    assert seen == list(range(50))
    worker.close()


async def test_the_error_of_a_call_is_the_awaiters() -> None:
    worker = DaemonWorker("worker")
    with pytest.raises(ZeroDivisionError):
        await worker.run(lambda: 1 // 0)
    assert await worker.run(lambda: "still works") == "still works"
    worker.close()


async def test_a_cancelled_await_leaves_the_call_running_and_those_behind_it() -> None:
    worker, gate, ran = DaemonWorker("worker"), threading.Event(), []
    first = asyncio.create_task(worker.run(lambda: ran.append(gate.wait(10))))
    second = asyncio.create_task(worker.run(lambda: ran.append("second")))
    await asyncio.sleep(0.02)
    first.cancel()
    second.cancel()
    await asyncio.wait([first, second])
    assert first.cancelled()
    assert second.cancelled()
    gate.set()
    await worker.run(lambda: None)
    assert ran == [True, "second"]
    worker.close()


async def test_close_lets_queued_calls_run_takes_no_more_and_ends_the_thread() -> None:
    worker, gate = DaemonWorker("worker"), threading.Event()
    blocked, queued = worker.submit(gate.wait, 10), worker.submit(lambda: "ran")
    worker.close()
    worker.close()
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit(lambda: None)
    assert not queued.done()
    gate.set()
    assert await wait_for(blocked) is True
    assert await wait_for(queued) == "ran"
    thread = worker.thread
    assert thread is not None
    await until(lambda: not thread.is_alive())


async def test_closing_a_worker_that_is_stuck_returns_at_once() -> None:
    worker, gate = DaemonWorker("stuck"), threading.Event()
    stuck = worker.submit(gate.wait, 60)
    started = time.monotonic()
    worker.close()
    assert time.monotonic() - started < 1.0
    assert not stuck.done()
    assert "closed" in repr(worker)
    gate.set()
    await wait_for(stuck)


async def test_a_forgotten_worker_ends_its_thread() -> None:
    worker = DaemonWorker("forgotten")
    await worker.run(lambda: None)
    thread = worker.thread
    assert thread is not None
    del worker
    gc.collect()
    await until(lambda: not thread.is_alive())


async def test_an_idle_worker_keeps_neither_arguments_nor_results_alive() -> None:
    class Tensorish:
        pass

    worker, thing = DaemonWorker("worker"), Tensorish()
    ref = weakref.ref(thing)
    assert await worker.run(lambda x: x, thing) is thing
    del thing
    await worker.run(lambda: None)
    await until(lambda: ref() is None)
    worker.close()


async def test_an_awaited_result_is_freed_without_a_gc() -> None:
    class Tensorish:
        pass

    worker = DaemonWorker("worker")
    gc.collect()
    gc.disable()
    try:
        ref = weakref.ref(await worker.run(Tensorish))
        await worker.run(lambda: None)
        await until(lambda: ref() is None)
    finally:
        gc.enable()
        worker.close()


async def test_wait_done_raises_nothing_of_the_future() -> None:
    future = spawn(lambda: 1 // 0, name="fails")
    await wait_done(future)
    assert isinstance(future.exception(), ZeroDivisionError)


def test_a_bounded_call_returns_raises_and_expires() -> None:
    assert run_bounded(lambda: 3, seconds=5, name="quick", on_expiry=lambda: None) == 3
    with pytest.raises(ZeroDivisionError):
        run_bounded(lambda: 1 // 0, seconds=5, name="fails", on_expiry=lambda: None)
    gate, ended = threading.Event(), threading.Event()

    def stuck() -> None:
        gate.wait(60)
        ended.set()

    with pytest.raises(TimeoutError):
        run_bounded(stuck, seconds=0.05, name="stuck", on_expiry=gate.set)
    assert ended.wait(10), "on_expiry is there to end the call"


def test_a_callback_for_a_loop_that_is_gone_is_dropped() -> None:
    gate, worker = threading.Event(), DaemonWorker("outlives its loop")

    async def leave() -> None:
        task = asyncio.create_task(worker.run(gate.wait, 10))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(leave())
    gate.set()
    assert worker.submit(lambda: "alive").result(10) == "alive"
    worker.close()


def test_a_stuck_thread_does_not_keep_the_process_alive() -> None:
    script = """
import asyncio, threading
from async_wsync.runtime.threads import DaemonWorker
async def main():
    worker = DaemonWorker("stuck")
    try:
        async with asyncio.timeout(0.1):
            await worker.run(threading.Event().wait)
    except TimeoutError:
        print("timed out", flush=True)
asyncio.run(main())
"""
    started = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stdout.strip()) == (0, "timed out"), run.stderr
    # On a busy machine dev mode also tells of slow callbacks; those lines are none of ours.
    assert not [line for line in run.stderr.splitlines() if not line.startswith("Executing <")], run.stderr
    assert time.monotonic() - started < 30
