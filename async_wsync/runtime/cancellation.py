"""`finish`: the one way to run something to its end whatever happens to the caller.

Why not ``asyncio.shield``: it returns at the first cancellation and leaves its inner task behind.
Why not an anyio shield alone: a native ``task.cancel()`` goes through it. Why not a loop around either:
under a cancelled anyio scope every await fails at once, and the loop spins. So: a task of its own, an
anyio shield around the wait, a loop around native cancellations, and a deadline.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

import anyio

from async_wsync.runtime.foreign_code import contained

__all__ = ["finish", "settle"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds that a task which ran out of time gets to clean up before it is left to itself.
CANCEL_GRACE = 0.25

# anyio imports this when its first scope is made: for us in the middle of the first cancellation, on the loop, where
# it was measured to take 90 ms.
importlib.import_module("anyio._backends._asyncio")

# The loop holds tasks only weakly; one that outlives its caller must not be collected half-way.
_abandoned: set[asyncio.Future[Any]] = set()


async def finish(
    coro: Awaitable[T] | Coroutine[Any, Any, T],
    *,
    timeout: float | None = None,
    name: str = "",
    on_cancel: Callable[[], None] | None = None,
) -> T:
    """Run ``coro`` as its own task to its end, through any cancellation of the caller, and return its result.

    A caller that was cancelled meanwhile gets CancelledError afterwards, raised once; ``task.cancelling()``
    is left as the cancellers set it. An error of ``coro`` is then logged, and is the CancelledError's cause.
    ``on_cancel`` is called once, at the first cancellation. After ``timeout`` seconds the task is cancelled
    and TimeoutError raised (CancelledError, with a note, if the caller was cancelled too).
    """
    inner = _as_task(coro, name)
    what = name or _name_of(inner)
    cancels = await _drain([inner], timeout=timeout, on_cancel=on_cancel)
    timed_out = not inner.done()
    if timed_out:
        inner.cancel(f"{what} ran out of time")
        cancels += await _drain([inner], timeout=CANCEL_GRACE)
        _abandon(inner, what)
    if cancels:
        _add_notes(cancels[0], inner, what, timeout if timed_out else None)
        _raise_cancelled(cancels)
    if timed_out:
        # It may have succeeded after all in its last moments; then its result stands.
        if inner.done() and not inner.cancelled() and inner.exception() is None:
            return inner.result()
        late = inner.exception() if inner.done() and not inner.cancelled() else None
        raise TimeoutError(f"{what} did not finish within {timeout:g} s") from late
    with contained(awaits=True):  # it may have been cancelled from within, which is not our caller's cancellation
        return inner.result()


async def settle(
    tasks: Iterable[asyncio.Future[T]],
    *,
    timeout: float | None,
    on_cancel: Callable[[], None] | None = None,
) -> tuple[set[asyncio.Future[T]], set[asyncio.Future[T]]]:
    """Wait until all are done or ``timeout`` seconds have passed; returns (done, pending).

    Cancels nothing and raises none of their errors, which count as retrieved from here on. As with `finish`, a
    cancellation of the caller is raised only after the wait.
    """
    futures = list(tasks)
    for future in futures:
        future.add_done_callback(_retrieve)
    cancels = await _drain(futures, timeout=timeout, on_cancel=on_cancel)
    for future in futures:
        if not future.done():
            _abandon(future, "")
    if cancels:
        _raise_cancelled(cancels)
    return {f for f in futures if f.done()}, {f for f in futures if not f.done()}


async def _drain(
    futures: list[asyncio.Future[Any]],
    *,
    timeout: float | None,
    on_cancel: Callable[[], None] | None = None,
) -> list[asyncio.CancelledError]:
    """Wait for all of ``futures``; returns the cancellations that hit the caller meanwhile."""
    cancels: list[asyncio.CancelledError] = []
    deadline = None if timeout is None else time.monotonic() + timeout
    # Not shielded at first, so that the cancellation of an anyio scope is noticed, as a native one always is.
    try:
        await _wait(futures, deadline)
        return cancels
    except asyncio.CancelledError as cancel:
        cancels.append(cancel)
    if on_cancel is not None:
        _call(on_cancel)
    over = False
    with anyio.CancelScope(shield=True):
        while not over:
            try:
                await _wait(futures, deadline)
                over = True
            except asyncio.CancelledError as cancel:
                cancels.append(cancel)
    return cancels


async def _wait(futures: list[asyncio.Future[Any]], deadline: float | None) -> None:
    waiting = [future for future in futures if not future.done()]
    if waiting:
        await asyncio.wait(waiting, timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))


def _as_task(coro: Awaitable[T], name: str) -> asyncio.Future[T]:
    if isinstance(coro, asyncio.Future):
        return coro
    if asyncio.iscoroutine(coro):
        return asyncio.create_task(coro, name=name or None)

    async def run() -> T:
        return await coro

    return asyncio.create_task(run(), name=name or None)


def _name_of(future: asyncio.Future[Any]) -> str:
    return future.get_name() if isinstance(future, asyncio.Task) else "the wait"


def _call(on_cancel: Callable[[], None]) -> None:
    try:
        on_cancel()
    except Exception:
        logger.exception("on_cancel failed")


def _raise_cancelled(cancels: list[asyncio.CancelledError]) -> None:
    """Raise one cancellation for all: a native one if there was any, since an anyio scope swallows its own kind."""
    cancel = next((c for c in cancels if not _is_anyio(c)), cancels[0])
    if cancel is not cancels[0]:
        cancel.__cause__ = cancels[0].__cause__
        for note in getattr(cancels[0], "__notes__", ()):
            cancel.add_note(note)
    try:
        raise cancel
    finally:
        # The traceback holds this frame and its callers': without this, a cycle keeps their tensors until the next gc.
        cancels.clear()
        del cancel


def _is_anyio(cancel: asyncio.CancelledError) -> bool:
    # anyio itself tells its cancellations apart by this message.
    return bool(cancel.args) and str(cancel.args[0]).startswith("Cancelled via cancel scope ")


def _add_notes(cancel: asyncio.CancelledError, inner: asyncio.Future[Any], what: str, timeout: float | None) -> None:
    """What the cancelled caller will not see otherwise: that ``inner`` ran out of time, or failed."""
    if timeout is not None:
        cancel.add_note(f"{what} did not finish within {timeout:g} s")
        logger.warning("%s did not finish within %g s while its caller was being cancelled", what, timeout)
    if inner.done() and not inner.cancelled() and (error := inner.exception()) is not None:
        cancel.add_note(f"{what} failed: {error!r}")
        cancel.__cause__ = error
        logger.warning("%s failed while its caller was being cancelled", what, exc_info=error)


def _abandon(future: asyncio.Future[Any], what: str) -> None:
    """Keep a future that nobody awaits any more alive to its end, and its outcome off the loop's complaints."""
    if future.done():
        return
    if what:
        logger.warning("%s ignored its cancellation and was left to itself", what)
    _abandoned.add(future)
    future.add_done_callback(_abandoned.discard)
    future.add_done_callback(_retrieve)


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
