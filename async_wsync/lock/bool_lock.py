"""`PolledLock`: cancel-safe use of the bool-lock actors that slime, miles and ROLL have.

Those have ``acquire() -> bool`` and ``release()`` and know nothing of owners. So this cannot be promised: that the
lock is freed when its holder dies; that it is not freed by somebody else; turns (whoever polls at the right moment
wins); fences that rise across hosts whose clocks differ; any knowledge of who holds it. `lock.adopt` offers the same
two methods in front of a lock that can.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from async_wsync import arguments
from async_wsync.errors import AcquireTimeout, LockError, LockUnavailable
from async_wsync.lock.hold import holdings, undo
from async_wsync.runtime.cancellation import finish
from async_wsync.runtime.object_refs import RemoteDied, RemoteRaised, await_ref, submit
from async_wsync.runtime.threads import start_daemon

__all__ = ["PolledLock"]

logger = logging.getLogger(__name__)

_fence_guard = threading.Lock()
_last_fence = 0


class PolledLock:
    """``handle``: an actor with ``acquire() -> bool`` and ``release()``. Satisfies `types.UpdateLock`.

    Polls are ``interval`` seconds apart at first, twice as far after each refusal up to ``max_interval``, jittered.
    """

    def __init__(
        self,
        handle: Any,
        *,
        interval: float = 0.01,
        max_interval: float = 0.1,
        acquire_timeout: float = 600.0,
        warn_interval: float = 30.0,
        release_timeout: float = 5.0,
    ) -> None:
        limits = {
            "interval": interval,
            "max_interval": max_interval,
            "acquire_timeout": acquire_timeout,
            "warn_interval": warn_interval,
            "release_timeout": release_timeout,
        }
        for key, value in limits.items():
            arguments.seconds(key, value)
        if interval > max_interval:
            raise ValueError(f"0 < interval <= max_interval must hold, got {interval!r} and {max_interval!r}")
        for verb in ("acquire", "release"):
            if not hasattr(handle, verb):
                raise ValueError(f"{handle!r} is no lock actor: it has no method {verb}")
        self.handle = handle
        self.key: object = ("polled", str(handle))  # the same for all locks of this process over one actor
        self.interval = interval
        self.max_interval = max_interval
        self.acquire_timeout = acquire_timeout
        self.warn_interval = warn_interval
        self.release_timeout = release_timeout

    def __repr__(self) -> str:
        return f"<PolledLock over {self.handle!r}>"

    def hold(self, *, label: str, timeout: float | None = None) -> PolledHold:
        """As `BroadcastLock.hold`. Raises `AcquireTimeout`, `SelfDeadlock`, `LockUnavailable`."""
        limit = self.acquire_timeout if timeout is None else timeout
        arguments.seconds("timeout", limit, zero=True)
        arguments.kind("label", label, str)
        return PolledHold(self, label=label, timeout=limit)

    def refuse_holder(self) -> None:
        """As `BroadcastLock.refuse_holder`."""
        holdings.check(self.key, "polled lock")


class PolledHold:
    """One holding of a `PolledLock`. ``fence`` is the wall clock in milliseconds, rising within this process."""

    def __init__(self, lock: PolledLock, *, label: str, timeout: float) -> None:
        self.label = label
        self.fence = 0
        self.stage = ""
        self._lock = lock
        self._timeout = timeout
        self._task: asyncio.Task[Any] | None = None
        self._pending: Any = None  # the poll whose outcome we do not know yet

    def set_stage(self, stage: str) -> None:
        self.stage = stage  # there is nobody to tell

    async def __aenter__(self) -> PolledHold:
        task = asyncio.current_task()
        assert task is not None
        self._lock.refuse_holder()
        try:
            await self._win()
        except BaseException as error:
            if self._pending is not None:
                # Somebody who gave up by the clock does not wait for the answer that did not come.
                limit = 0.0 if isinstance(error, AcquireTimeout) else self._lock.release_timeout
                await undo(self._give_back(self._pending, limit), error, name="withdrawing from a polled lock")
            raise
        self._task = task
        holdings.add(task, self._lock.key, self.label)
        self.fence = _next_fence()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        release = submit(self._lock.handle.release)
        holdings.discard(self._task, self._lock.key)
        trouble = await finish(self._confirm(release), name="releasing a polled lock")
        if error is not None and trouble is not None:
            error.add_note(f"releasing {self._lock!r}: {trouble}")

    async def _win(self) -> None:
        lock = self._lock
        started = warned = time.monotonic()
        deadline = started + self._timeout
        delay, refused = lock.interval, False
        while True:
            self._pending = submit(lock.handle.acquire)
            try:
                async with asyncio.timeout(max(0.5, deadline - time.monotonic())):
                    granted = await await_ref(self._pending, what="the polled lock")
            except TimeoutError:
                break
            except RemoteDied as error:
                if error.certain:
                    self._pending = None
                raise LockUnavailable(f"the polled lock is gone: {error}") from error
            except RemoteRaised as error:
                self._pending = None
                raise LockError(f"the polled lock's acquire() failed: {error}") from error.cause
            if granted:
                return  # still pending, should we be cancelled before the body begins
            self._pending, refused = None, True
            now = time.monotonic()
            if now >= deadline:
                break
            if now - warned >= lock.warn_interval:
                warned = now
                logger.warning("polled lock: %s waits for %.0f s; it does not say for whom", self.label, now - started)
            await asyncio.sleep(min(delay * (0.5 + 0.5 * random.random()), deadline - now))
            delay = min(delay * 2, lock.max_interval)
        why = "it was held all the time" if refused else "its actor has never answered: it is not scheduled, or stuck"
        raise AcquireTimeout(f"polled lock not acquired by {self.label!r} within {self._timeout:g} s: {why}")

    async def _give_back(self, poll: Any, limit: float) -> None:
        """Release what an unanswered poll may have won, however late it answers. Never before it has answered: the
        lock may be somebody else's, and these actors free it for whoever asks."""
        try:
            async with asyncio.timeout(limit):
                granted = await await_ref(poll, what="the polled lock")
        except TimeoutError:
            poll.future().add_done_callback(self._release_late)
            return
        except (RemoteDied, RemoteRaised) as error:
            logger.warning("polled lock: a withdrawn poll failed, so that it cannot have been granted: %s", error)
            return
        if granted:
            await self._confirm(submit(self._lock.handle.release))

    def _release_late(self, poll: Future[Any]) -> None:
        if not poll.cancelled() and poll.exception() is None and poll.result():
            # Not in Ray's callback thread, which must not call Ray.
            start_daemon(submit, self._lock.handle.release, name="wsync-late-release")

    async def _confirm(self, release: Any) -> str | None:
        try:
            async with asyncio.timeout(self._lock.release_timeout):
                await await_ref(release, what="the polled lock")
        except (TimeoutError, RemoteDied, RemoteRaised) as error:
            trouble = str(error) or f"no answer within {self._lock.release_timeout:g} s"
            logger.warning("polled lock: release not confirmed: %s", trouble)
            return trouble
        return None


def _next_fence() -> int:
    global _last_fence
    with _fence_guard:
        _last_fence = max(_last_fence + 1, time.time_ns() // 1_000_000)
        return _last_fence
