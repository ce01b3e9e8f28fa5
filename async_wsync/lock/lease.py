"""The heartbeat of a held lock: renews the lease, carries the stage, and says when the lease is lost."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

from async_wsync.errors import LockError
from async_wsync.lock.claim import ClaimView
from async_wsync.lock.messages import unpack
from async_wsync.lock.state import LeaseOver, Renewed
from async_wsync.runtime.actor_client import ActorClient
from async_wsync.runtime.object_refs import RemoteDied

__all__ = ["LeaseRenewal"]

logger = logging.getLogger(__name__)

#: A new stage is sent at once, but no sooner than this after the grant or the last heartbeat, seconds.
STAGE_INTERVAL = 0.1


class LeaseRenewal:
    """Beats every third of the lease. ``on_lost(reason)`` is called once, from the loop, when the lease is over.

    The task starts with the first beat that is due, so that a short hold costs only a timer.
    """

    def __init__(self, link: ActorClient, view: ClaimView, on_lost: Callable[[str], None]) -> None:
        self.stage: str | None = None
        self._link = link
        self._view = view
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._nudge = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stage_from = self._loop.time() + STAGE_INTERVAL
        self._timer = self._loop.call_later(view.beat_delay(time.monotonic()), self._start)

    def set_stage(self, stage: str) -> None:
        self.stage = stage
        self._nudge.set()
        if self._task is None and not self._timer.cancelled() and self._timer.when() > self._stage_from:
            self._timer.cancel()
            self._timer = self._loop.call_at(self._stage_from, self._start)

    def stop(self) -> None:
        """No more beats. Call `stopped` to see the last one off."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    async def stopped(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])

    def _start(self) -> None:
        self._nudge.clear()
        self._task = self._loop.create_task(self._run(), name=f"heartbeat of lock {self._link.name}")

    async def _run(self) -> None:
        reason = None
        while reason is None:
            try:
                reason = await self._beat()
            except Exception as error:
                logger.exception("lock %r: the heartbeat failed", self._link.name)
                reason = f"the heartbeat failed: {error!r}"
            if reason is None:
                await self._until_due()
        self._on_lost(reason)

    async def _until_due(self) -> None:
        await asyncio.sleep(min(STAGE_INTERVAL, self._view.beat_delay(time.monotonic())))
        try:
            async with asyncio.timeout(self._view.beat_delay(time.monotonic())):
                await self._nudge.wait()
        except TimeoutError:
            pass
        self._nudge.clear()

    async def _beat(self) -> str | None:
        """One heartbeat, tried again until the lease is over; returns why it is, None if it goes on."""
        view = self._view
        trouble = "no heartbeat got through"
        while not view.lapsed(sent := time.monotonic()):
            limit = min(view.lease_end - sent, view.ttl / 3)
            try:
                *packed, known = await self._link.ask(
                    "heartbeat", view.claim, self._link.client, self.stage, view.fence, timeout=limit
                )
            except LockError as error:
                return str(error)  # nobody is left to keep others out
            except (TimeoutError, RemoteDied) as error:
                trouble = str(error) or "no answer"
                await asyncio.sleep(min(limit, view.on_trouble(random.random(), cap=view.ttl / 10)))
                continue
            if not known:
                self._link.register()
            reply = unpack(packed)
            assert isinstance(reply, Renewed | LeaseOver)
            return view.on_beat(reply, sent=sent, now=time.monotonic())
        return f"lease lapsed: {trouble}"
