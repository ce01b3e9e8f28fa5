"""Daemon threads for work that blocks.

The interpreter waits for ordinary threads (and for the default executor's) when it exits, so that
one stuck collective would keep a finished script alive. Nothing waits for these.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from async_wsync.runtime.foreign_code import ordinary

__all__ = ["DaemonWorker", "pause", "run_bounded", "spawn", "start_daemon", "wait_done", "wait_for"]

T = TypeVar("T")


class _Call(Generic[T]):
    """One submitted call. Dropped before the thread waits again, so that it keeps no tensors alive."""

    __slots__ = ("args", "fn", "future")

    def __init__(self, fn: Callable[..., T], args: tuple[Any, ...]) -> None:
        self.fn = fn
        self.args = args
        self.future: Future[T] = Future()

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.fn(*self.args)
        except BaseException as error:  # the thread's outermost catch: the future carries it
            # Whoever awaits it must not take what ended the call here for the end of itself.
            self.future.set_exception(ordinary(error))
        else:
            self.future.set_result(result)


def _serve(calls: SimpleQueue[_Call[Any] | None]) -> None:
    # A plain function: a thread that held the worker would keep it from ever being collected.
    while (call := calls.get()) is not None:
        call.run()
        del call


class DaemonWorker:
    """One named daemon thread that runs callables one at a time, in the order of their submission.

    The thread starts with the first call and ends after `close` (or once the worker is garbage), when
    the calls submitted before have run. A call that never returns is abandoned together with its thread.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def __repr__(self) -> str:
        if self._closed:
            state = "closed"
        else:
            state = "running" if self._thread is not None and self._thread.is_alive() else "not started"
        return f"<DaemonWorker {self.name!r} {state}, {self._calls.qsize()} queued>"

    def __del__(self) -> None:
        self._calls.put(None)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def thread(self) -> threading.Thread | None:
        """The thread, once there is one."""
        return self._thread

    def submit(self, fn: Callable[..., T], *args: Any) -> Future[T]:
        """Queue ``fn(*args)``; whatever it raises, the future fails with an Exception. RuntimeError once closed."""
        call = _Call(fn, args)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"worker {self.name!r} is closed")
            self._calls.put(call)
            if self._thread is None:
                self._thread = start_daemon(_serve, self._calls, name=self.name)
        return call.future

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        """Run ``fn(*args)`` in the thread and await its result.

        Cancelling the await leaves the call queued or running: a call that blocks cannot be stopped,
        and one that frees something must not be skipped.
        """
        return await wait_for(self.submit(fn, *args))

    def close(self) -> None:
        """Take no more calls; the thread ends once those it has are done. Never waits; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._calls.put(None)


def start_daemon(fn: Callable[..., object], *args: Any, name: str) -> threading.Thread:
    """Start ``fn(*args)`` in a daemon thread of its own.

    Not while the interpreter ends: no other thread runs any more then, and starting one would wait for it for ever.
    """
    thread = threading.Thread(target=fn, args=args, name=name, daemon=True)
    if not sys.is_finalizing():
        thread.start()
    return thread


def pause(seconds: float) -> None:
    """Sleep, in a thread of one's own."""
    threading.Event().wait(seconds)


def spawn(fn: Callable[..., T], *args: Any, name: str) -> Future[T]:
    """Start ``fn(*args)`` in a daemon thread of its own; the future carries its outcome."""
    call = _Call(fn, args)
    start_daemon(call.run, name=name)
    return call.future


async def wait_for(future: Future[T]) -> T:
    """Await a thread's future. Unlike `asyncio.wrap_future`, cancelling the await never cancels the call."""
    await wait_done(future)
    return future.result()


async def wait_done(future: Future[Any]) -> None:
    """Wait until ``future`` has an outcome, whatever it is. Cancelling the wait leaves the future alone."""
    loop = asyncio.get_running_loop()
    # The waiter carries no outcome, so that the loop cannot report one as never retrieved.
    waiter: asyncio.Future[None] = loop.create_future()

    # Neither function refers to the future: it keeps its callbacks, and a cycle would keep its result alive.
    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    def landed(_: Future[Any]) -> None:
        try:
            loop.call_soon_threadsafe(wake)
        except RuntimeError:  # the loop is closed: nobody waits any more
            pass

    future.add_done_callback(landed)
    await waiter


def run_bounded(fn: Callable[[], T], *, seconds: float, name: str, on_expiry: Callable[[], object]) -> T:
    """Call ``fn`` in a daemon thread of its own and wait for it, blocking, at most ``seconds``.

    Then ``on_expiry`` is called, which should make ``fn`` return soon, and TimeoutError is raised. What ``fn`` returns
    after that is dropped in its own thread.
    """
    future = spawn(fn, name=name)
    try:
        return future.result(timeout=max(seconds, 0.0))
    except TimeoutError:
        if future.done():
            return future.result()  # it ended in this very moment, or with a TimeoutError of its own
        on_expiry()
        raise
