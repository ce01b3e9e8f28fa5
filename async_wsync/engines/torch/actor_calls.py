"""The two ways to an actor's `WeightReceiver`: its control connection, and Ray's queue of the actor's calls.

In the queue a request may wait behind generations. Ray has the last word on whether the actor is alive, and on which
process it is: a connection that breaks, or that an answer from the queue contradicts, is dropped.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from async_wsync.engines.torch import messages as p
from async_wsync.engines.torch.control import ControlConnection, ControlLost
from async_wsync.runtime.object_refs import await_ref, submit

__all__ = ["ActorCalls"]

T = TypeVar("T")

# Seconds without an answer to a hello, after which it goes the other way too.
_QUEUE_HEAD_START = 0.25
_CONTROL_HEAD_START = 1.0
_LOOK_UP_CAP = 2.0


class ActorCalls:
    """Requests to ``method`` of the actor ``handle``; see `TorchEngine`."""

    def __init__(self, handle: Any, method: str, *, control_connection: bool) -> None:
        self._remote = getattr(handle, method)
        self.control_key = _control_key(handle, method) if control_connection else ""
        self._control = ControlConnection(self.control_key)
        self._process: str | None = None  # the incarnation that answered last
        self._queued: Future[Any] | None = None  # our last call in the queue; it ends when the actor does

    def close(self) -> None:
        """Hang up; idempotent. The next hello connects again."""
        self._control.close()

    async def ask(self, request: p.Request, *, what: str) -> Any:
        """What the engine answered, or the `Failure` of its entry point. Raises `RemoteDied` and `RemoteRaised`.

        Submitted before the first suspension, so that the requests of cancelled callers arrive in order.
        """
        self._check_queued()
        if isinstance(request.verb, p.Hello):
            return await self._first_answer(request, what)
        if self._control.usable:
            try:
                return await self._control.ask(request)
            except ControlLost:
                pass  # it may have arrived, and is not run twice under its id
        return await await_ref(submit(self._remote, request), what=what)

    async def _first_answer(self, hello: p.Request, what: str) -> Any:
        """The answer of whichever way is faster: a queue may be long, and a connection be cut without a word."""
        control: asyncio.Task[Any] | None = None
        queued: asyncio.Task[Any] | None = None
        try:
            if self._control.usable:
                if self._queued is None:
                    self._queue(p.Request(id="", call=hello.call, verb=p.Poll("")))
                control = _start(self._control.ask(hello))
                await asyncio.wait({control}, timeout=_CONTROL_HEAD_START)
                if _answered(control):
                    return self._noted(control.result())
            queued = _start(await_ref(self._queue(hello), what=what))
            for tries in itertools.count():
                if control is None or control.done():
                    await asyncio.wait({queued}, timeout=min(_QUEUE_HEAD_START * 2**tries, _LOOK_UP_CAP))
                    control = _start(self._look_up_and_ask(hello))
                await asyncio.wait({queued, control}, return_when=asyncio.FIRST_COMPLETED)
                if _answered(control):
                    return self._noted(control.result())
                if queued.done():
                    break
            self._control.close()
            reply = self._noted(queued.result())
            if isinstance(reply, p.Reply):
                self._control.use(reply.control)
            return reply
        finally:
            for task in (control, queued):
                if task is not None:
                    task.cancel()

    def _noted(self, reply: Any) -> Any:
        if isinstance(reply, p.Reply):
            self._process = reply.incarnation
        return reply

    async def _look_up_and_ask(self, hello: p.Request) -> Any:
        """For an engine whose queue is so long that it could not yet tell us where it listens."""
        if self.control_key:
            await self._control.look_up()
        return await self._control.ask(hello)

    def _queue(self, request: p.Request) -> Any:
        ref = submit(self._remote, request)
        self._queued = ref.future()
        return ref

    def _check_queued(self) -> None:
        """Drop a connection to a process that is dead, or no longer the actor's, as the queue has found out."""
        queued = self._queued
        if queued is None or not queued.done():
            return
        self._queued = None
        reply = None if queued.cancelled() or queued.exception() is not None else queued.result()
        if not isinstance(reply, p.Reply) or reply.incarnation != self._process:
            self._control.close()


def _start(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(lambda done: None if done.cancelled() else (done.exception(), None)[1])
    return task


def _answered(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _control_key(handle: Any, method: str) -> str:
    """The actor's id and the method; "" for what is no actor handle."""
    actor_id = getattr(handle, "_actor_id", None)
    return "" if actor_id is None else f"{actor_id.hex()}/{method}"
