"""vLLM as a rollout engine: `VLLMServer` for a server, `VLLMActor` for a Ray actor around `AsyncLLM`.

vLLM must have been started with this library's weight transfer backend (``backend="async_wsync"``; installing
the package registers it) and, as a server, in development mode. See ``docs/engines.md``.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from async_wsync.engines import vllm_wire as wire
from async_wsync.engines.replies import looks_collective, short
from async_wsync.engines.vllm_control import ActorControl, Control, HttpControl
from async_wsync.errors import EngineBusy, EngineDied, EngineFailed, EngineTimeout
from async_wsync.runtime.object_refs import RemoteDied, RemoteRaised
from async_wsync.types import BucketSpec, Call, EngineInfo, EngineState, GroupSpec, PauseMode, UpdateSpec, WireFormat

__all__ = ["VLLMActor", "VLLMEngine", "VLLMServer"]

T = TypeVar("T")

_JOIN_DELAYS = (0.002, 0.005, 0.01, 0.02, 0.05)
_WORKER_WAIT = 0.02
"""Seconds that a worker may hold vLLM's thread to wait for a bucket: the engine is paused then, but must answer."""
_HEALTH_INTERVAL = 0.25
_PAUSES = {
    PauseMode.ABORT: ("abort", True),
    PauseMode.DRAIN: ("wait", True),
    PauseMode.RECOMPUTE: ("keep", True),
    PauseMode.KEEP: ("keep", False),
}
_FIELDS = {p: p for p in ("connect", "pause", "flush", "end", "resume")} | {"receive": "bucket"}


class VLLMEngine:
    """One vLLM engine (all of its ranks) behind a `Control`; satisfies `RolloutEngine`."""

    wire_format = WireFormat.PACKED
    pipelined = True
    supports_fence = True

    def __init__(self, control: Control, *, name: str, num_ranks: int = 1) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks must be at least 1, got {num_ranks!r}")
        self.name = name
        self.num_ranks = num_ranks
        self._control = control
        self._mode = PauseMode.ABORT
        self._posting = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}, {self.num_ranks} ranks>"

    # ------------------------------------------------------------------------ who it is

    async def hello(self, call: Call) -> EngineInfo:
        with self._named("hello", call):
            ranks = await self._alive(self._control.num_ranks(call.timeout))
            if ranks != self.num_ranks:
                raise EngineFailed(
                    f"{self.name}: it has {ranks} ranks, and num_ranks={self.num_ranks} was given",
                    engine=self.name,
                    phase="hello",
                )
            replies = await self._ask("hello", call)
            version = await self._alive(self._control.get_version(call.timeout))
        first = replies[0].value
        versions = {reply.value["version"] for reply in replies}
        state = max((EngineState(reply.state) for reply in replies), key=_gravity)
        if len(versions) > 1 and _gravity(state) < _gravity(EngineState.TORN):
            state = EngineState.TORN
        mine = versions.pop() if len(versions) == 1 else None
        notes = () if mine is None or version == str(mine) else (f"vLLM calls its weights {version!r}",)
        return EngineInfo(
            incarnation="-".join(reply.incarnation for reply in replies),
            version=mine,
            state=state,
            device=first["device"],
            host=first["host"],
            pid=first["pid"],
            notes=notes,
        )

    async def check(self, call: Call, update: UpdateSpec) -> tuple[str, ...]:
        with self._named("check", call):
            replies = await self._ask("check", call, update=wire.encode_update(update))
            found = wire.Findings.merge([wire.Findings(**_tuples(reply.value)) for reply in replies])
            if found.bad:
                error = found.rejection()
                raise type(error)(f"{self.name}: {error}", **error.__dict__, engine=self.name, phase="check")
        return found.notes

    async def checksums(self, call: Call) -> dict[str, str] | None:
        """None: vLLM's tensors are fused, sharded and repacked, so that no digest of one equals the source's."""
        return None

    # ------------------------------------------------------------------------ groups

    async def join(self, call: Call, group: GroupSpec, *, rank_offset: int) -> None:
        with self._named("connect", call):
            ticket = uuid.uuid4().hex
            request = wire.encode("join", call, id=ticket, group=group, rank_offset=rank_offset)
            await self._alive(self._control.init(request, call.timeout))
            # It may be serving meanwhile, so nothing may hold its thread.
            await self._until_done(ticket, call, "connect", worker_wait=0.0)

    async def leave(self, call: Call, group: str) -> None:
        with self._named("leave", call):
            await self._ask_long("leave", call, group=group)

    async def abort(self, call: Call, group: str) -> None:
        with self._named("abort", call):
            await self._ask_long("abort", call, group=group)

    # ------------------------------------------------------------------------ the bracket

    async def pause(self, call: Call, mode: PauseMode) -> None:
        with self._named("pause", call):
            words, clear_cache = _PAUSES[mode]
            self._mode = mode
            await self._alive(self._control.pause(words, clear_cache, call.timeout))

    async def flush(self, call: Call) -> None:
        if self._mode is PauseMode.KEEP:
            return  # the cache of the old weights is to be kept
        with self._named("flush", call):
            running = self._mode is PauseMode.RECOMPUTE
            if not await self._alive(self._control.reset_cache(running, call.timeout)):
                raise EngineBusy(
                    f"{self.name}: vLLM did not reset its prefix cache: requests still hold blocks",
                    engine=self.name,
                    phase="flush",
                )

    async def begin(self, call: Call, update: UpdateSpec) -> None:
        with self._named("begin", call):
            if not await self._alive(self._control.is_paused(call.timeout)):
                raise EngineFailed(
                    f"{self.name}: it is not paused, and would serve from layers that are half loaded",
                    engine=self.name,
                    phase="begin",
                )
            replies = await self._ask("begin", call, update=wire.encode_update(update))
            await self._follow_vllm(replies, call)
            await self._raise_close_failure(call, update, "begin")
        self._posting = asyncio.Lock()

    async def receive(self, call: Call, update: UpdateSpec, bucket: BucketSpec) -> None:
        with self._named("receive", call, bucket.index):
            ticket = uuid.uuid4().hex
            request = wire.encode("receive", call, id=ticket, update_id=update.update_id, index=bucket.index)
            # One at a time, so that buckets are asked for in order over any number of connections.
            async with self._posting:
                await self._alive(self._control.update(request, call.timeout))
            await self._until_done(ticket, call, "receive", worker_wait=_WORKER_WAIT, bucket=bucket.index)

    async def end(self, call: Call, update: UpdateSpec) -> None:
        with self._named("end", call):
            await self._ask("end", call, update_id=update.update_id)
            await self._alive(self._control.finish(call.timeout))
            replies = await self._raise_close_failure(call, update, "end")
            if not all(reply.value["ended"] for reply in replies):
                raise EngineFailed(f"{self.name}: vLLM finished without the update", engine=self.name, phase="end")

    async def publish(self, call: Call, version: int) -> None:
        with self._named("publish", call):
            await self._ask("publish", call, version=version)
            await self._alive(self._control.set_version(str(version), call.timeout))
            answer = await self._alive(self._control.get_version(call.timeout))
            if answer != str(version):
                raise EngineFailed(
                    f"{self.name}: vLLM says version {answer!r} after it was told {version}",
                    engine=self.name,
                    phase="publish",
                )

    async def resume(self, call: Call) -> None:
        with self._named("resume", call):
            replies = await self._ask("status", call)
            bad = [r.state for r in replies if r.state in (EngineState.TORN, EngineState.UPDATING)]
            if bad:
                raise EngineFailed(
                    f"{self.name}: it is {bad[0]} and must not serve; a whole update that is published heals it",
                    engine=self.name,
                    phase="resume",
                )
            await self._alive(self._control.resume(call.timeout))

    async def reset(self, call: Call) -> None:
        with self._named("reset", call):
            await self._follow_vllm(await self._ask("reset", call), call)

    async def aclose(self) -> None:
        await self._control.aclose()

    # ------------------------------------------------------------------------ asking

    async def _follow_vllm(self, replies: list[wire.Reply], call: Call) -> None:
        """Make the calls to vLLM's own cycle that the backend says must follow."""
        for verb, make in (("finish", self._control.finish), ("start", self._control.start)):
            if any(reply.value.get(verb) for reply in replies):
                await self._alive(make(call.timeout))

    async def _raise_close_failure(self, call: Call, update: UpdateSpec, phase: str) -> list[wire.Reply]:
        replies = await self._ask("status", call, update_id=update.update_id)
        for reply in replies:
            if reply.value["failure"] is not None:
                raise wire.rebuild(reply.value["failure"], engine=self.name, phase=phase)
        return replies

    async def load_seconds(self, call: Call) -> float:
        """How long vLLM's own loading took in the last update, on its slowest rank."""
        with self._named("status", call):
            return max(float(reply.value["load_seconds"]) for reply in await self._ask("status", call))

    async def _ask(self, verb: str, call: Call, **fields: Any) -> list[wire.Reply]:
        """The answers of all ranks, or the failure of one."""
        return await self._replies(wire.encode(verb, call, **fields), call, verb)

    async def _ask_long(self, verb: str, call: Call, **fields: Any) -> None:
        ticket = uuid.uuid4().hex
        replies = await self._ask(verb, call, id=ticket, **fields)
        if not all(reply.done for reply in replies):
            await self._until_done(ticket, call, verb, worker_wait=_WORKER_WAIT)

    async def _replies(self, request: str, call: Call, phase: str, bucket: int | None = None) -> list[wire.Reply]:
        try:
            answers = await self._alive(self._control.ask(request, call.timeout))
        except RemoteRaised as error:
            answers = _unseen_replica(error)
        if not answers:
            raise EngineFailed(f"{self.name}: {phase}: no rank answered", engine=self.name, phase=phase)
        replies = [wire.Reply.of(answer) for answer in answers]
        failures = sorted((r.failure for r in replies if r.failure is not None), key=lambda f: bool(f["is_collective"]))
        if failures:
            raise wire.rebuild(failures[0], engine=self.name, phase=phase, bucket=bucket)
        return replies

    async def _until_done(
        self, ticket: str, call: Call, phase: str, *, worker_wait: float, bucket: int | None = None
    ) -> None:
        """Ask until all ranks are done. Bounded by the caller, or by ``call.timeout`` and a second here."""
        request = json.dumps({"verb": "poll", "ticket": ticket, "wait": worker_wait})
        delays = iter(_JOIN_DELAYS)
        async with asyncio.timeout(call.timeout + 1.0):
            while True:
                replies = await self._replies(request, call, phase, bucket)
                if all(reply.done for reply in replies):
                    return
                await asyncio.sleep(0.0 if worker_wait else next(delays, _JOIN_DELAYS[-1]))

    async def _alive(self, answer: Coroutine[Any, Any, T]) -> T:
        """Await a control call; an engine that died without answering is found out by asking for its health."""
        task = asyncio.ensure_future(answer)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=_HEALTH_INTERVAL)
                if done:
                    return task.result()
                await self._control.health(2.0)
        finally:
            if not task.done():
                task.cancel()
            task.add_done_callback(_mark_retrieved)

    @contextmanager
    def _named(self, phase: str, call: Call, bucket: int | None = None) -> Iterator[None]:
        """Whatever goes wrong within is told as a failure of this engine in this phase."""
        facts = {"engine": self.name, "phase": phase, "bucket": bucket}
        where = f"{self.name}: {phase}" if bucket is None else f"{self.name}: {phase} {bucket}"
        try:
            yield
        except EngineFailed:
            raise
        except RemoteDied as error:
            raise EngineDied(f"{where}: {error}", **facts) from error
        except RemoteRaised as error:
            facts["is_collective"] = looks_collective(error)
            raise EngineFailed(f"{where}: {_hinted(error)}", **facts) from error
        except TimeoutError as error:
            field = _FIELDS.get(phase, "begin")
            message = f"{where}: no answer within {call.timeout:g} s (Timeouts.{field})"
            raise EngineTimeout(message, **facts, field=field, seconds=call.timeout) from error


class VLLMServer(VLLMEngine):
    """A vLLM server at ``url``, started with ``VLLM_SERVER_DEV_MODE=1`` and our weight transfer backend.

    ``num_ranks``: tensor x pipeline x data parallel size. ``api_key`` as the server's; ``verify`` as httpx takes it
    (False, a CA bundle's path, or an SSL context). Needs httpx (extra ``http``).
    """

    def __init__(
        self, url: str, *, num_ranks: int = 1, name: str | None = None, api_key: str | None = None, verify: Any = True
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url must start with http:// or https://, got {url!r}")
        control = HttpControl(url, api_key=api_key, verify=verify)
        super().__init__(control, name=name or url, num_ranks=num_ranks)


class VLLMActor(VLLMEngine):
    """A Ray actor with the methods of `VLLMRolloutActor`."""

    def __init__(self, handle: Any, *, num_ranks: int = 1, name: str | None = None) -> None:
        super().__init__(ActorControl(handle), name=name or _actor_name(handle), num_ranks=num_ranks)


def _actor_name(handle: Any) -> str:
    actor_id = getattr(handle, "_actor_id", None)
    return f"vllm-{actor_id.hex()[:8]}" if actor_id is not None else "vllm"


def _gravity(state: EngineState) -> int:
    order = (EngineState.CURRENT, EngineState.STALE, EngineState.UPDATING, EngineState.TORN, EngineState.LOST)
    return order.index(state)


def _tuples(fields: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(values) for name, values in fields.items()}


def _unseen_replica(error: RemoteRaised) -> list[dict[str, Any]]:
    """The answer of a data parallel replica that vLLM shows only as an exception, or the exception."""
    text = str(error.cause or error)
    at = text.find(wire.UNSEEN_REPLICA)
    if at < 0:
        raise error
    try:
        reply, _ = json.JSONDecoder().raw_decode(text[at + len(wire.UNSEEN_REPLICA) :])
    except ValueError:
        raise error from None
    return [reply]


def _hinted(error: RemoteRaised) -> str:
    text = short(error, 1000)
    if "object is not callable" in text or "Weight transfer not configured" in text or "is not implemented" in text:
        return f'{text} (start vLLM with --weight-transfer-config \'{{"backend": "async_wsync"}}\')'
    return text


def _mark_retrieved(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()
