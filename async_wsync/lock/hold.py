"""Holding the lock: acquire, keep the lease alive, give it back. Safe against cancellation at every await.

Three rules carry it. The claim is minted before the first call, so that what was asked for can always be given back.
The release is submitted before anything is awaited, and confirmed behind `finish`. And the lease is counted from
before the call that won it was sent.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
import weakref
from collections.abc import Coroutine
from contextlib import closing
from types import TracebackType
from typing import Any

from async_wsync.errors import AcquireTimeout, LeaseLost, LockError, SelfDeadlock
from async_wsync.lock.claim import Again, ClaimView, Held, Retry
from async_wsync.lock.lease import LeaseRenewal
from async_wsync.lock.messages import pack_poll, unpack
from async_wsync.lock.state import Granted, Released, Waiting, Withdrawn
from async_wsync.lock.status_text import describe_wait
from async_wsync.lock.wake_up import WakeUpSocket
from async_wsync.runtime.actor_client import ActorClient
from async_wsync.runtime.cancellation import finish
from async_wsync.runtime.object_refs import RemoteDied

__all__ = ["Hold", "Holdings", "holdings", "undo"]

logger = logging.getLogger(__name__)

POLL_TIMEOUT = 5.0
STATUS_TIMEOUT = 1.0
#: The last poll before a deadline, and the only one of timeout=0, gets at least this long.
LAST_POLL = 0.5
#: A lock that never answered a poll is not waited for long when the wait is given up; it gets the message anyway.
UNHEARD_TIMEOUT = 1.0
#: Nor is one that a lost lease no longer needs.
LOST_TIMEOUT = 0.3


class Holdings:
    """Which locks each task of this process holds, under which label, to tell a task that waits for itself."""

    def __init__(self) -> None:
        self._held: weakref.WeakKeyDictionary[asyncio.Task[Any], dict[object, str]] = weakref.WeakKeyDictionary()

    def check(self, key: object, name: str) -> None:
        """Raise `SelfDeadlock` if the current task is a holder."""
        task = asyncio.current_task()
        assert task is not None
        labels = self._held.get(task, {})
        if key in labels:
            who = f"the task {task.get_name()!r}, as {labels[key]!r},"
            raise SelfDeadlock(f"{who} already holds lock {name!r} and would wait for itself")

    def add(self, task: asyncio.Task[Any], key: object, label: str) -> None:
        self._held.setdefault(task, {})[key] = label

    def discard(self, task: asyncio.Task[Any], key: object) -> None:
        self._held.get(task, {}).pop(key, None)


holdings = Holdings()
_fences_seen: dict[object, int] = {}  # the highest fence per lock that this process was ever granted


class Hold:
    """``async with lock.hold(label=...) as held``. One use only.

    ``fence`` goes with every engine call. `check` raises `LeaseLost` once the lease is over; the task that
    entered is also interrupted when that is noticed, and the ``async with`` raises `LeaseLost`.
    """

    def __init__(
        self,
        link: ActorClient,
        *,
        label: str,
        timeout: float,
        ttl: float | None,
        warn_interval: float,
        release_timeout: float,
    ) -> None:
        self.label = label
        self._link = link
        self._key = link.key
        self._timeout = timeout
        self._ttl = ttl
        self._warn_interval = warn_interval
        self._release_timeout = release_timeout
        self._view = ClaimView(_mint())
        self._task: asyncio.Task[Any] | None = None
        self._renewal: LeaseRenewal | None = None
        self._used = False
        self._polled = False
        self._heard = False
        self._exiting = False
        self._interrupted = False
        self._cancelling = 0
        self._lost: LeaseLost | None = None
        self._last_waiting: Any = None

    def __repr__(self) -> str:
        if self._lost is not None:
            state = "lost"
        elif self._renewal is None:
            state = "waiting" if self._polled else "new"
        else:
            left = self._view.lease_end - time.monotonic()
            state = "released" if self._exiting else f"held, fence {self.fence}, lease {left:.1f} s"
        return f"<Hold of {self._link.name!r} by {self.label!r}: {state}>"

    # ------------------------------------------------------------------------------ while held

    @property
    def fence(self) -> int:
        return self._view.fence

    @property
    def claim(self) -> str:
        return self._view.claim

    @property
    def lost(self) -> bool:
        """The lease is over, noticed or not."""
        return self._lost is not None or (not self._exiting and self._view.lapsed(time.monotonic()))

    def check(self) -> None:
        """Raise `LeaseLost` if the lease is over: for the last moment before something that cannot be undone."""
        if self.lost:
            raise self._lost or self._lease_lost("lease lapsed")

    def set_stage(self, stage: str) -> None:
        """What the holder is doing, for the lock's status. Call on the event loop's thread; sent within 0.1 s."""
        if self._renewal is not None:
            self._renewal.set_stage(stage)

    # ------------------------------------------------------------------------------ acquire

    async def __aenter__(self) -> Hold:
        if self._used:
            raise RuntimeError("a hold() is for one use; call lock.hold() again")
        self._used = True
        task = asyncio.current_task()
        assert task is not None
        holdings.check(self._key, self._link.name)
        self._cancelling = task.cancelling()
        try:
            await self._link.ready(max(self._timeout, POLL_TIMEOUT))
            with closing(WakeUpSocket(self._link.host)) as waker:
                await self._win(waker)
        except BaseException as error:
            if self._polled:
                # Submitted before the next await: whatever happens now, the lock will not stay with us.
                release = self._submit_release()
                await undo(self._confirm(release), error, name=f"withdrawing from lock {self._link.name}")
            raise
        self._task = task
        holdings.add(task, self._key, self.label)
        _fences_seen[self._key] = max(self.fence, _fences_seen.get(self._key, 0))
        self._renewal = LeaseRenewal(self._link, self._view, self._lose)
        return self

    async def _win(self, waker: WakeUpSocket) -> None:
        started = warned = time.monotonic()
        deadline = started + self._timeout
        while True:
            step = await self._poll(waker, max(LAST_POLL, deadline - time.monotonic()))
            if isinstance(step, Held):
                return
            if isinstance(step, Again):
                logger.warning("lock %r: queueing anew (%s)", self._link.name, step.reason)
                self._link.forget_identity()
                await self._link.ready(POLL_TIMEOUT)
                self._view = ClaimView(_mint())
                continue
            now = time.monotonic()
            if now + step.delay >= deadline:
                if now >= deadline or self._timeout == 0:
                    raise await self._timed_out(now - started)
                step = Retry(max(0.0, deadline - now))
            if now - warned >= self._warn_interval:
                warned = now
                logger.warning("%s", describe_wait(self._link.name, now - started, self._last_waiting))
            await waker.wait(step.delay)

    async def _poll(self, waker: WakeUpSocket, limit: float) -> Held | Retry | Again:
        view = self._view
        sent = time.monotonic()
        self._polled = True
        try:
            seen = _fences_seen.get(self._key, 0)
            poll = pack_poll(view.claim, self._link.who(self.label), self._ttl, seen, waker.address)
            *packed, known = await self._link.ask("acquire", poll, timeout=min(limit, POLL_TIMEOUT))
        except (TimeoutError, RemoteDied) as error:
            logger.debug("lock %r: no answer to a poll: %s", self._link.name, error)
            return Retry(view.on_trouble(random.random()))
        self._heard = True
        if not known:
            self._link.register()
        reply = unpack(packed)
        assert isinstance(reply, Granted | Waiting | Withdrawn)
        step = view.on_poll(reply, sent=sent, now=time.monotonic(), draw=random.random())
        if isinstance(step, Retry):
            self._last_waiting = reply
        return step

    async def _timed_out(self, waited: float) -> AcquireTimeout:
        status = None
        try:
            status = await self._link.ask("status", timeout=STATUS_TIMEOUT)
        except (TimeoutError, RemoteDied, LockError):
            pass
        text = describe_wait(self._link.name, waited, self._last_waiting)
        return AcquireTimeout(f"{text}; gave up after {self._timeout:g} s", status=status)

    # ------------------------------------------------------------------------------ a lost lease

    def _lose(self, reason: str) -> None:
        self._lost = self._lease_lost(reason)
        logger.warning("%s", self._lost)
        if self._task is not None and not self._exiting and not self._task.done():
            self._interrupted = True
            self._task.cancel(f"lost lock {self._link.name}")

    def _lease_lost(self, reason: str) -> LeaseLost:
        stage = self._renewal.stage if self._renewal is not None else None
        doing = f" during {stage!r}" if stage else ""
        return LeaseLost(
            f"lock {self._link.name!r}: {self.label or 'the holder'} lost its lease{doing}: {reason}",
            claim=self._view.claim,
        )

    # ------------------------------------------------------------------------------ release

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        assert self._renewal is not None
        lapsed = self.lost
        self._exiting = True
        release = self._submit_release()
        holdings.discard(self._task, self._key)
        self._renewal.stop()
        trouble: str | None = None
        try:
            trouble = await finish(self._confirm(release), name=f"releasing lock {self._link.name}")
        finally:
            if self._interrupted:
                self._task.uncancel()
        if trouble is not None and self._lost is None and (lapsed or trouble == Released.EXPIRED):
            self._lost = self._lease_lost("the lock server had already ended it")
        self._conclude(error, trouble)

    def _conclude(self, error: BaseException | None, trouble: str | None) -> None:
        """Precedence: the body's own error, then a lost lease; trouble with the release is only ever a note."""
        if self._lost is None:
            if error is not None and trouble is not None:
                error.add_note(f"releasing lock {self._link.name!r}: {trouble}")
            return
        if error is None:
            raise self._lost
        assert self._task is not None
        ours = self._interrupted and isinstance(error, asyncio.CancelledError)
        if ours and self._task.cancelling() <= self._cancelling:
            raise self._lost from None
        error.add_note(str(self._lost))

    def _submit_release(self) -> Any:
        return self._link.submit("release", self._view.claim)

    async def _confirm(self, release: Any) -> str | None:
        """Wait until the server has answered a release, sending it again where it may be lost. Returns what was odd."""
        if self._renewal is not None:
            await self._renewal.stopped()
        limit = self._release_timeout
        if self._lost is not None:
            limit = min(LOST_TIMEOUT, limit)
        elif not self._heard:
            limit = min(UNHEARD_TIMEOUT, limit)
        deadline = time.monotonic() + limit
        while True:
            left = deadline - time.monotonic()
            try:
                found = await self._link.answer(release, timeout=max(0.0, left))
            except LockError as error:
                return str(error)
            except RemoteDied as error:
                trouble, delay = str(error), self._view.on_trouble(random.random())
                if left > delay:
                    await asyncio.sleep(delay)
                    release = self._submit_release()
                    continue
            except TimeoutError:
                trouble = f"no answer within {limit:g} s"
            else:
                return None if found == Released.RELEASED or self._renewal is None else str(found)
            logger.warning("lock %r: release not confirmed: %s; the lease ends it", self._link.name, trouble)
            return trouble


def _mint() -> str:
    return uuid.uuid4().hex


async def undo(cleanup: Coroutine[Any, Any, object], error: BaseException, *, name: str) -> None:
    """Run ``cleanup`` to its end after ``error`` broke off an acquire; the caller raises ``error`` afterwards.

    A cancellation that comes meanwhile is raised from here, unless ``error`` is one itself.
    """
    try:
        await finish(cleanup, name=name)
    except asyncio.CancelledError as later:
        # A scope of anyio swallows its own cancellations, so that one of the task itself must be what comes out.
        if not isinstance(error, asyncio.CancelledError) or (_is_scopes(error) and not _is_scopes(later)):
            raise


def _is_scopes(error: BaseException) -> bool:
    return bool(error.args) and str(error.args[0]).startswith("Cancelled via cancel scope ")
