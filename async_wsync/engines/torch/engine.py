"""`TorchEngine`: the source's adapter for a Ray actor that has a `WeightReceiver`."""

from __future__ import annotations

import asyncio
from typing import Any

from async_wsync import arguments
from async_wsync.engines.failure import Failure
from async_wsync.engines.replies import failure_in, short
from async_wsync.engines.request_ids import new_request_id
from async_wsync.engines.torch import messages as p
from async_wsync.engines.torch.actor_calls import ActorCalls
from async_wsync.engines.update_codec import packed_update, unpacked_checksums
from async_wsync.errors import EngineDied, EngineFailed, EngineReplaced, EngineTimeout
from async_wsync.phases import field_of, not_within
from async_wsync.runtime.object_refs import RemoteDied, RemoteRaised
from async_wsync.types import BucketSpec, Call, EngineInfo, GroupSpec, PauseMode, UpdateSpec, WireFormat

__all__ = ["TorchEngine"]

_POLL_FIRST = 0.002
_POLL_CAP = 0.05
_POLL_RECEIVING = 0.04
_POLL_HINTED_CAP = 0.008


class _PollInterval:
    """How long one call waits between its polls. A hint that it is about to be over makes it fast again."""

    def __init__(self, first: float = _POLL_FIRST) -> None:
        self._delay = first
        self._cap = _POLL_CAP
        self._hinted = asyncio.Event()

    def hint(self) -> None:
        self._delay, self._cap = _POLL_FIRST, _POLL_HINTED_CAP
        self._hinted.set()

    async def wait(self) -> None:
        delay, self._delay = self._delay, min(2 * self._delay, self._cap)
        try:
            async with asyncio.timeout(delay) as limit:
                await self._hinted.wait()
        except TimeoutError:
            assert limit.expired()
        self._hinted.clear()


class TorchEngine:
    """A rollout engine that is a Ray actor with a `WeightReceiver`.

    ``handle``: the actor's handle; ``method``: the name of its method that forwards to
    `WeightReceiver.weight_sync`. ``name`` is for messages and must be unique among a broadcaster's engines.
    Requests are started and polled (2 ms, doubling to 50 ms), so that the actor needs no second thread.
    ``control_connection``: ask beside Ray's queue once the engine has said where; the engine then listens on a port of
    its node's address. With False every request takes its turn among the actor's calls.
    """

    num_ranks = 1
    wire_format = WireFormat.PACKED
    pipelined = True
    supports_fence = True

    def __init__(
        self,
        handle: Any,
        *,
        name: str | None = None,
        method: str = "weight_sync",
        control_connection: bool = True,
    ) -> None:
        arguments.text("name", name, none=True)
        arguments.text("method", method)
        if not hasattr(handle, method):
            raise ValueError(f"{handle!r} has no method {method!r}: TorchEngine takes the handle of a Ray actor")
        arguments.flag("control_connection", control_connection)
        self._handle = handle
        self.name = _default_name(handle) if name is None else name
        self._incarnation: str | None = None
        self._receiving: set[_PollInterval] = set()
        self._calls = ActorCalls(handle, method, control_connection=control_connection)

    def __repr__(self) -> str:
        return f"<TorchEngine {self.name!r} incarnation {(self._incarnation or 'unknown')[:8]}>"

    @property
    def handle(self) -> Any:
        """The actor's handle."""
        return self._handle

    async def hello(self, call: Call) -> EngineInfo:
        """Whoever answers is from now on whom the other calls are meant for."""
        info = await self._ask(call, p.Hello(self._calls.control_key), to_anyone=True)
        if not isinstance(info, EngineInfo):
            raise EngineFailed(f"{self.name}: hello: it answered {short(info)}", engine=self.name, phase="hello")
        self._incarnation = info.incarnation
        return info

    async def join(self, call: Call, group: GroupSpec, *, rank_offset: int) -> None:
        await self._ask(call, p.Join(group, rank_offset))

    async def leave(self, call: Call, group: str) -> None:
        await self._ask(call, p.Leave(group))

    async def check(self, call: Call, update: UpdateSpec) -> tuple[str, ...]:
        return tuple(await self._ask(call, p.Check(await packed_update(update))))

    async def pause(self, call: Call, mode: PauseMode) -> None:
        await self._ask(call, p.Pause(mode))

    async def flush(self, call: Call) -> None:
        await self._ask(call, p.Flush())

    async def begin(self, call: Call, update: UpdateSpec) -> None:
        await self._ask(call, p.Begin(await packed_update(update)))

    async def receive(self, call: Call, update: UpdateSpec, bucket: BucketSpec) -> None:
        # Rarely: each poll takes a moment of both processes from the broadcast, and its end is hinted at.
        poll_interval = _PollInterval(_POLL_RECEIVING)
        self._receiving.add(poll_interval)
        try:
            await self._ask(
                call, p.Receive(update.update_id, bucket.index), bucket=bucket.index, poll_interval=poll_interval
            )
        finally:
            self._receiving.discard(poll_interval)

    def hint_collective_done(self) -> None:
        """The source's own end of a broadcast is over: the engine's is about to be, so look more often."""
        for poll_interval in self._receiving:
            poll_interval.hint()

    async def end(self, call: Call, update: UpdateSpec) -> None:
        await self._ask(call, p.End(update.update_id))

    async def publish(self, call: Call, version: int) -> None:
        await self._ask(call, p.Publish(version))

    async def resume(self, call: Call) -> None:
        await self._ask(call, p.Resume())

    async def abort(self, call: Call, group: str) -> None:
        await self._ask(call, p.Abort(group))

    async def reset(self, call: Call) -> None:
        await self._ask(call, p.Reset())

    async def checksums(self, call: Call) -> dict[str, str]:
        return await unpacked_checksums(await self._ask(call, p.Checksums()))

    async def aclose(self) -> None:
        """Idempotent; the actor is left alone."""
        self._calls.close()

    # ------------------------------------------------------------------------

    async def _ask(
        self,
        call: Call,
        verb: p.Verb,
        *,
        bucket: int | None = None,
        poll_interval: _PollInterval | None = None,
        to_anyone: bool = False,
    ) -> Any:
        """Start ``verb`` and poll until it has an outcome, for ``call.timeout`` seconds at most."""
        phase = phase_of(type(verb))
        incarnation = None if to_anyone else self._incarnation
        request = p.Request(id=new_request_id(), call=call, verb=verb, incarnation=incarnation)
        poll_interval = poll_interval or _PollInterval()
        try:
            async with asyncio.timeout(call.timeout) as limit:
                reply = await self._send(request, phase, bucket)
                while not reply.done:
                    await poll_interval.wait()
                    poll = p.Request(id="", call=call, verb=p.Poll(request.id), incarnation=incarnation)
                    reply = await self._send(poll, phase, bucket)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise self._late(phase, call.timeout, bucket) from error
        if reply.failure is not None:
            raise reply.failure.rebuild(engine=self.name, phase=phase, bucket=bucket)
        return reply.value

    async def _send(self, request: p.Request, phase: str, bucket: int | None) -> p.Reply:
        where = phase if bucket is None else f"{phase} {bucket}"
        facts = {"engine": self.name, "phase": phase, "bucket": bucket}
        try:
            # Submitted before the first await, so that a cancelled caller's requests still arrive in order.
            reply = await self._calls.ask(request, what=f"{phase} of {self.name}")
        except RemoteDied as error:
            raise EngineDied(f"{self.name}: {where}: {error}", **facts) from error
        except RemoteRaised as error:
            raise EngineFailed(f"{self.name}: {where}: {_named(error.cause)}", **facts) from (error.cause or error)
        if isinstance(reply, Failure):
            raise reply.rebuild(engine=self.name, phase=phase, bucket=bucket)
        if not isinstance(reply, p.Reply):
            said = failure_in(reply) or f"it answered {short(reply)}, which is no reply"
            raise EngineFailed(f"{self.name}: {where}: {said}", **facts)
        if request.incarnation is not None and reply.incarnation != request.incarnation:
            raise EngineReplaced(
                f"{self.name}: {where}: it was restarted, and has neither the group nor the weights it had", **facts
            )
        return reply

    def _late(self, phase: str, seconds: float, bucket: int | None) -> EngineTimeout:
        where = phase if bucket is None else f"{phase} {bucket}"
        return EngineTimeout(
            f"{self.name}: {where}: no answer {not_within(seconds, phase)}",
            engine=self.name,
            phase=phase,
            bucket=bucket,
            field=field_of(phase),
            seconds=seconds,
        )


def phase_of(verb: type[p.Verb]) -> str:
    """The phase that a verb is asked in."""
    name = verb.__name__.lower()
    return {"join": "connect", "checksums": "verify"}.get(name, name)


def _named(error: BaseException | None) -> str:
    return "it raised" if error is None else f"{type(error).__name__}: {error}"


def _default_name(handle: Any) -> str:
    actor_id = getattr(handle, "_actor_id", None)
    return f"engine-{actor_id.hex()[:8]}" if actor_id is not None else f"engine-{id(handle):x}"
