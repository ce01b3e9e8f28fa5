"""vLLM as a rollout engine: `VLLMServer` for a server, `VLLMActor` for a Ray actor around `AsyncLLM`.

vLLM must have been started with this library's weight transfer backend (``backend="async_wsync"``; installing
the package registers it) and, as a server, in development mode. See ``docs/engines.md``.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from async_wsync import arguments
from async_wsync.engines.failure import Failure
from async_wsync.engines.http import JsonServer
from async_wsync.engines.rejection import Findings, base_missing
from async_wsync.engines.request_ids import new_request_id
from async_wsync.engines.update_codec import update_to_json
from async_wsync.engines.vllm import messages as wire
from async_wsync.engines.vllm.control import ActorControl, At, Control, HttpControl, hinted, unseen_replica
from async_wsync.errors import EngineBusy, EngineDied, EngineFailed, EngineTimeout
from async_wsync.phases import field_of, not_within
from async_wsync.runtime.object_refs import RemoteDied, RemoteRaised
from async_wsync.types import BucketSpec, Call, EngineInfo, EngineState, GroupSpec, PauseMode, UpdateSpec, WireFormat

__all__ = ["VLLMActor", "VLLMEngine", "VLLMServer"]

T = TypeVar("T")

_WORKER_WAIT = 0.05
"""Seconds that a worker may hold vLLM's thread to wait for one of ours. Between two calls that thread spins for a
second, which on a busy machine starves ours; so it is held most of the time, but an engine that waits must answer."""
_JOIN_PAUSES = (*(20 * (0.0,)), 0.25)
"""Seconds between two questions to an engine that joins: it may be serving, and others may keep it waiting."""
_HEALTH_INTERVAL = 0.25
_HEALTH_TIMEOUT = 2.0
_PAUSES = {
    PauseMode.ABORT: ("abort", True),
    PauseMode.DRAIN: ("wait", True),
    PauseMode.RECOMPUTE: ("keep", True),
    PauseMode.KEEP: ("keep", False),
}


class VLLMEngine:
    """One vLLM engine (all of its ranks) behind a `Control`; satisfies `RolloutEngine`."""

    wire_format = WireFormat.PACKED
    pipelined = True
    supports_fence = True

    def __init__(self, control: Control, *, name: str, num_ranks: int = 1) -> None:
        arguments.at_least("num_ranks", num_ranks, 1)
        arguments.text("name", name)
        self.name = name
        self.num_ranks = num_ranks
        self._control = control
        self._mode = PauseMode.ABORT
        self._posting = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}, {self.num_ranks} ranks>"

    # ------------------------------------------------------------------------ who it is

    async def hello(self, call: Call) -> EngineInfo:
        with self._named("hello", call) as at:
            ranks = await self._alive(self._control.num_ranks(at), at)
            if ranks != self.num_ranks:
                raise EngineFailed(
                    f"{self.name}: it has {ranks} ranks, and num_ranks={self.num_ranks} was given",
                    engine=self.name,
                    phase="hello",
                )
            replies = await self._ask("hello", call, at)
            version = await self._alive(self._control.get_version(at), at)
        first = replies[0].value
        versions = {(reply.value["version"], reply.value["update_id"]) for reply in replies}
        state = max((EngineState(reply.state) for reply in replies), key=_severity)
        if len(versions) > 1 and _severity(state) < _severity(EngineState.TORN):
            state = EngineState.TORN
        mine, update_id = versions.pop() if len(versions) == 1 else (None, None)
        notes = () if mine is None or version == str(mine) else (f"vLLM calls its weights {version!r}",)
        return EngineInfo(
            incarnation="-".join(reply.incarnation for reply in replies),
            version=mine,
            update_id=update_id,
            state=state,
            device=first["device"],
            host=first["host"],
            pid=first["pid"],
            notes=notes,
        )

    async def check(self, call: Call, update: UpdateSpec) -> tuple[str, ...]:
        with self._named("check", call) as at:
            replies = await self._ask("check", call, at, update=update_to_json(update))
            found = Findings.merge([Findings(**_tuples(reply.value)) for reply in replies])
            if found.bad:
                raise found.rejection(engine=self.name)
            if found.left_out and found.lacks:
                torn = any(EngineState(reply.state) is EngineState.TORN for reply in replies)
                why = "; ".join(found.lacks)
                raise base_missing(why, found.left_out, holds=None, torn=torn, engine=self.name)
        kept = (f"{len(found.left_out)} tensors keep their old values",) if found.left_out else ()
        return (*found.notes, *kept)

    async def checksums(self, call: Call) -> dict[str, str] | None:
        """None: vLLM's tensors are fused, sharded and repacked, so that no digest of one equals the source's."""
        return None

    # ------------------------------------------------------------------------ groups

    async def join(self, call: Call, group: GroupSpec, *, rank_offset: int) -> None:
        with self._named("connect", call) as at:
            request_id = new_request_id()
            request = wire.encode("join", call, id=request_id, group=group, rank_offset=rank_offset)
            await self._alive(self._control.init(request, at), at)
            await self._until_done(request_id, at, pauses=_JOIN_PAUSES)

    async def leave(self, call: Call, group: str) -> None:
        with self._named("leave", call) as at:
            await self._ask_long("leave", call, at, group=group)

    async def abort(self, call: Call, group: str) -> None:
        with self._named("abort", call) as at:
            await self._ask_long("abort", call, at, group=group)

    # ------------------------------------------------------------------------ the bracket

    async def pause(self, call: Call, mode: PauseMode) -> None:
        with self._named("pause", call) as at:
            words, clear_cache = _PAUSES[mode]
            self._mode = mode
            await self._alive(self._control.pause(words, clear_cache, at), at)

    async def flush(self, call: Call) -> None:
        if self._mode is PauseMode.KEEP:
            return  # the cache of the old weights is to be kept
        with self._named("flush", call) as at:
            running = self._mode is PauseMode.RECOMPUTE
            if not await self._alive(self._control.reset_cache(running, at), at):
                raise EngineBusy(
                    f"{self.name}: vLLM did not reset its prefix cache: requests still hold blocks",
                    engine=self.name,
                    phase="flush",
                )

    async def begin(self, call: Call, update: UpdateSpec) -> None:
        with self._named("begin", call) as at:
            if not await self._alive(self._control.is_paused(at), at):
                raise EngineFailed(
                    f"{self.name}: it is not paused, and would serve from layers that are half loaded",
                    engine=self.name,
                    phase="begin",
                )
            replies = await self._ask("begin", call, at, update=update_to_json(update))
            await self._make_vllm_calls(replies, at)
            await self._raise_close_failure(call, update, at)
        self._posting = asyncio.Lock()

    async def receive(self, call: Call, update: UpdateSpec, bucket: BucketSpec) -> None:
        with self._named("receive", call, bucket.index) as at:
            request_id = new_request_id()
            request = wire.encode("receive", call, id=request_id, update_id=update.update_id, index=bucket.index)
            # One at a time, so that buckets are asked for in order over any number of connections.
            async with self._posting:
                await self._alive(self._control.update(request, at), at)
            await self._until_done(request_id, at)

    async def end(self, call: Call, update: UpdateSpec) -> None:
        with self._named("end", call) as at:
            await self._ask("end", call, at, update_id=update.update_id)
            await self._alive(self._control.finish(at), at)
            replies = await self._raise_close_failure(call, update, at)
            if not all(reply.value["ended"] for reply in replies):
                raise EngineFailed(f"{self.name}: vLLM finished without the update", engine=self.name, phase="end")

    async def publish(self, call: Call, version: int) -> None:
        with self._named("publish", call) as at:
            await self._ask("publish", call, at, version=version)
            await self._alive(self._control.set_version(str(version), at), at)
            answer = await self._alive(self._control.get_version(at), at)
            if answer != str(version):
                raise EngineFailed(
                    f"{self.name}: vLLM says version {answer!r} after it was told {version}",
                    engine=self.name,
                    phase="publish",
                )

    async def resume(self, call: Call) -> None:
        with self._named("resume", call) as at:
            replies = await self._ask("status", call, at)
            bad = [r.state for r in replies if r.state in (EngineState.TORN, EngineState.UPDATING)]
            bad += [EngineState.UPDATING for r in replies if r.value["open"]]
            if bad:
                raise EngineFailed(
                    f"{self.name}: it is {bad[0]} and must not serve; a whole update that is published heals it",
                    engine=self.name,
                    phase="resume",
                )
            await self._alive(self._control.resume(at), at)

    async def reset(self, call: Call) -> None:
        with self._named("reset", call) as at:
            await self._make_vllm_calls(await self._ask("reset", call, at), at)

    async def aclose(self) -> None:
        await self._control.aclose()

    # ------------------------------------------------------------------------ asking

    async def _make_vllm_calls(self, replies: list[wire.Reply], at: At) -> None:
        """Make the calls to vLLM's own cycle that the backend says must follow."""
        for verb, make in (("finish", self._control.finish), ("start", self._control.start)):
            if any(reply.value.get(verb) for reply in replies):
                await self._alive(make(at), at)

    async def _raise_close_failure(self, call: Call, update: UpdateSpec, at: At) -> list[wire.Reply]:
        replies = await self._ask("status", call, at, update_id=update.update_id)
        for reply in replies:
            if reply.value["failure"] is not None:
                raise Failure.from_json(reply.value["failure"]).rebuild(engine=self.name, phase=at.phase)
        return replies

    async def load_seconds(self, call: Call) -> float:
        """How long vLLM's own loading took in the last update, on its slowest rank."""
        with self._named("status", call) as at:
            return max(float(reply.value["load_seconds"]) for reply in await self._ask("status", call, at))

    async def _ask(self, verb: str, call: Call, at: At, **fields: Any) -> list[wire.Reply]:
        """The answers of all ranks, or the failure of one."""
        return await self._replies(wire.encode(verb, call, **fields), at)

    async def _ask_long(self, verb: str, call: Call, at: At, **fields: Any) -> None:
        request_id = new_request_id()
        replies = await self._ask(verb, call, at, id=request_id, **fields)
        if not all(reply.done for reply in replies):
            await self._until_done(request_id, at)

    async def _replies(self, request: str, at: At) -> list[wire.Reply]:
        try:
            answers = await self._alive(self._control.ask(request, at), at)
        except RemoteRaised as error:
            answers = unseen_replica(error)
        if not answers:
            raise EngineFailed(f"{self.name}: {at.phase}: no rank answered", engine=self.name, phase=at.phase)
        replies = [wire.Reply.from_json(answer) for answer in answers]
        failures = sorted((r.failure for r in replies if r.failure is not None), key=lambda f: f.is_collective)
        if failures:
            raise failures[0].rebuild(engine=self.name, phase=at.phase, bucket=at.bucket)
        return replies

    async def _until_done(self, request_id: str, at: At, *, pauses: tuple[float, ...] = (0.0,)) -> None:
        """Ask until all ranks are done, or have been at it for a second longer than they should."""
        request = json.dumps({"verb": "poll", "request_id": request_id, "wait": _WORKER_WAIT})
        pause = iter(pauses)
        async with asyncio.timeout(at.timeout + 1.0):
            while True:
                replies = await self._replies(request, at)
                if all(reply.done for reply in replies):
                    return
                await asyncio.sleep(next(pause, pauses[-1]))

    async def _alive(self, answer: Coroutine[Any, Any, T], at: At) -> T:
        """Await a control call; an engine that died without answering is found out by asking for its health."""
        task = asyncio.ensure_future(answer)
        task.add_done_callback(_mark_retrieved)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=_HEALTH_INTERVAL)
                if done and not isinstance(task.exception(), RemoteRaised):
                    return task.result()
                try:
                    await self._control.health(At(timeout=_HEALTH_TIMEOUT, phase=at.phase, bucket=at.bucket))
                except (EngineTimeout, TimeoutError):
                    pass  # silence is no proof of death
                if done:
                    return task.result()
        finally:
            task.cancel()

    @contextmanager
    def _named(self, phase: str, call: Call, bucket: int | None = None) -> Iterator[At]:
        """Whatever goes wrong within is told as a failure of this engine in this phase."""
        facts: dict[str, Any] = {"engine": self.name, "phase": phase, "bucket": bucket}
        where = f"{self.name}: {phase}" if bucket is None else f"{self.name}: {phase} {bucket}"
        try:
            yield At(timeout=call.timeout, phase=phase, bucket=bucket)
        except RemoteDied as error:
            raise EngineDied(f"{where}: {error}", **facts) from error
        except RemoteRaised as error:
            raise EngineFailed(f"{where}: {hinted(error)}", **facts) from error
        except TimeoutError as error:
            if isinstance(error, EngineTimeout):
                raise
            message = f"{where}: no answer {not_within(call.timeout, phase)}"
            raise EngineTimeout(message, **facts, field=field_of(phase), seconds=call.timeout) from error


class VLLMServer(VLLMEngine):
    """A vLLM server at ``url``, started with ``VLLM_SERVER_DEV_MODE=1`` and our weight transfer backend.

    ``num_ranks``: tensor x pipeline x data parallel size. ``api_key`` as the server's; ``verify`` as httpx takes it
    (an SSL context with your own CA, say). Needs httpx (extra ``http``).
    """

    def __init__(
        self,
        url: str,
        *,
        num_ranks: int = 1,
        name: str | None = None,
        api_key: str | None = None,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        arguments.url("url", url)
        server = JsonServer(url.rstrip("/"), name=name or url, api_key=api_key, verify=verify)
        super().__init__(HttpControl(server), name=name or url, num_ranks=num_ranks)


class VLLMActor(VLLMEngine):
    """A Ray actor with the methods of `VLLMRolloutActor`."""

    def __init__(self, handle: Any, *, num_ranks: int = 1, name: str | None = None) -> None:
        super().__init__(ActorControl(handle), name=name or _actor_name(handle), num_ranks=num_ranks)


def _actor_name(handle: Any) -> str:
    actor_id = getattr(handle, "_actor_id", None)
    return f"vllm-{actor_id.hex()[:8]}" if actor_id is not None else "vllm"


def _severity(state: EngineState) -> int:
    order = (EngineState.CURRENT, EngineState.STALE, EngineState.UPDATING, EngineState.TORN, EngineState.LOST)
    return order.index(state)


def _tuples(fields: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(values) for name, values in fields.items()}


def _mark_retrieved(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()
