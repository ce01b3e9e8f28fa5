"""The engine actors of slime, miles and relatives: Ray actors in front of an SGLang server each.

Their methods follow SGLang's calls, with differences between projects and versions: methods that older ones lack
(begin, end, version), keywords that they do not take. What a handle has is found out when it is called; Ray checks a
call's arguments before it sends anything.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from async_wsync.engines.replies import failure_in, looks_collective, short
from async_wsync.engines.sglang import messages as wire
from async_wsync.engines.sglang.checkpoint_index import read_index
from async_wsync.engines.sglang.messages import Selector
from async_wsync.engines.sglang.names import Findings, against_index, check_base
from async_wsync.errors import EngineBusy, EngineDied, EngineFailed, EngineRejected, EngineTimeout
from async_wsync.phases import field_of, not_within
from async_wsync.runtime.object_refs import RemoteDied, RemoteRaised, await_ref, submit
from async_wsync.runtime.threads import DaemonWorker
from async_wsync.transfer.tensors import torch_dtype
from async_wsync.types import BucketSpec, Call, EngineInfo, EngineState, GroupSpec, PauseMode, UpdateSpec, WireFormat

__all__ = ["SGLangActor"]

_UNKNOWN = "unknown"


class SGLangActor:
    """One such actor, as a `RolloutEngine`.

    ``num_ranks``: GPUs of the engine behind it. ``wire_format``: PER_TENSOR, which all of them read; FLATTENED for
    those whose ``update_weights_from_distributed`` takes ``load_format``. ``checkpoint``: the directory its model was
    started from; with it, names and shapes are checked before the first byte.
    """

    pipelined = False
    supports_fence = False
    pause_modes = frozenset(wire.PAUSE_WORDS)

    def __init__(
        self,
        handle: Any,
        *,
        num_ranks: int = 1,
        name: str | None = None,
        wire_format: WireFormat = WireFormat.PER_TENSOR,
        selector: Selector = "all",
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> None:
        wire.check_options(num_ranks=num_ranks, name=name, wire_format=wire_format, selector=selector)
        if not hasattr(handle, "update_weights_from_distributed"):
            raise ValueError(f"{handle!r} has no method update_weights_from_distributed")
        self._handle = handle
        self._name = name or repr(handle)
        self._num_ranks = num_ranks
        self._wire_format = wire_format
        self._selector: Selector = selector
        self._checkpoint = checkpoint
        self._pause_mode: PauseMode | None = None
        self._files = DaemonWorker("sglang-checkpoint")

    def __repr__(self) -> str:
        return f"<SGLangActor {self._name} {self._num_ranks} ranks, {self._wire_format.value}>"

    @property
    def name(self) -> str:
        return self._name

    @property
    def num_ranks(self) -> int:
        return self._num_ranks

    @property
    def wire_format(self) -> WireFormat:
        return self._wire_format

    # ------------------------------------------------------------------ before an update

    async def hello(self, call: Call) -> EngineInfo:
        version = await self._tell("get_weight_version", {}, call, "hello") if self._has("get_weight_version") else None
        return EngineInfo(
            incarnation=await self._incarnation(call),
            version=wire.version_number(version),
            state=EngineState.STALE,
        )

    async def _incarnation(self, call: Call) -> str:
        """The actor's process: a restarted one has neither the group nor the weights, and the same handle."""
        try:
            return str(await self._tell("__ray_call__", {}, call, "hello", args=(_process,)))
        except EngineDied:
            raise
        except EngineFailed:
            return _UNKNOWN  # its worker can't import this package; restarts go unnoticed then

    async def check(self, call: Call, update: UpdateSpec) -> tuple[str, ...]:
        found = await self._look(update)
        if found.bad:
            raise found.rejection(engine=self._name)
        if not update.strict and found.left_out != []:
            check_base(update, found.left_out, holds=await self._held(call, update), engine=self._name)
        return tuple(found.notes)

    async def _look(self, update: UpdateSpec) -> Findings:
        if self._checkpoint is None:
            return Findings(notes=["names and shapes were not checked: no checkpoint= was given"])
        index = await self._files.run(read_index, self._checkpoint)
        if index is None:
            words = f"names and shapes were not checked: no safetensors checkpoint at {self._checkpoint}"
            return Findings(notes=[words])
        return against_index(update, index)

    async def _held(self, call: Call, update: UpdateSpec) -> int | None:
        """The version it says; one that can't say is believed as long as its process is known to be the same."""
        if self._has("get_weight_version"):
            return wire.version_number(await self._tell("get_weight_version", {}, call, "check"))
        known = await self._incarnation(call) != _UNKNOWN
        return update.base.version if known and update.base is not None else None

    # ------------------------------------------------------------------------- the group

    async def join(self, call: Call, group: GroupSpec, *, rank_offset: int) -> None:
        await self._tell("init_weights_update_group", wire.init_group(group, rank_offset), call, "connect")

    async def leave(self, call: Call, group: str) -> None:
        await self._tell(
            "destroy_weights_update_group", wire.destroy_group(group), call, "leave", fine=("does not exist",)
        )

    # ------------------------------------------------------------------------ the bracket

    async def pause(self, call: Call, mode: PauseMode) -> None:
        if (why := wire.no_pause(mode)) is not None:
            raise EngineRejected(f"{self._name}: {why}", engine=self._name, phase="pause")
        # Those without a mode abort what runs: the only mode for which it may be left out.
        optional = ("mode",) if mode is PauseMode.ABORT else ()
        self._pause_mode = mode
        await self._tell("pause_generation", wire.pause(mode), call, "pause", optional=optional)

    async def flush(self, call: Call) -> None:
        if self._pause_mode is PauseMode.KEEP:
            return  # the requests that stay are made of that cache; SGLang would refuse
        try:
            await self._tell("flush_cache", {}, call, "flush")
        except (EngineDied, EngineTimeout):
            raise
        except EngineFailed as refused:
            raise EngineBusy(str(refused), engine=self._name, phase="flush") from refused

    async def begin(self, call: Call, update: UpdateSpec) -> None:
        if self._has("begin_weight_update"):
            await self._tell("begin_weight_update", wire.begin(self._selector), call, "begin")

    async def receive(self, call: Call, update: UpdateSpec, bucket: BucketSpec) -> None:
        body = wire.announce(bucket, update.group, wire=self._wire_format, selector=self._selector)
        del body["abort_all_requests"]  # no actor has it
        body["dtypes"] = [torch_dtype(name) for name in body["dtypes"]]
        optional = ["flush_cache"]
        if self._selector == "all":
            optional.append("selector")
        if not self._has("update_weight_version") and bucket.index == update.buckets[-1].index:
            # The only way to give it a version is with a bucket; the last one is the least early.
            body["weight_version"] = str(update.version)
            optional.append("weight_version")
        await self._tell(
            "update_weights_from_distributed",
            body,
            call,
            "receive",
            bucket=bucket.index,
            optional=optional,
            none_ok=False,
        )

    async def end(self, call: Call, update: UpdateSpec) -> None:
        if self._has("end_weight_update"):
            await self._tell("end_weight_update", {}, call, "end")

    async def publish(self, call: Call, version: int) -> None:
        if self._has("update_weight_version"):
            await self._tell("update_weight_version", {"weight_version": str(version)}, call, "publish")
        if self._has("get_weight_version"):
            answered = await self._tell("get_weight_version", {}, call, "publish")
            if str(answered) != str(version):
                raise EngineFailed(
                    f"{self._name}: took version {version} and says {answered!r}", engine=self._name, phase="publish"
                )

    async def resume(self, call: Call) -> None:
        await self._tell("continue_generation", {}, call, "resume")
        self._pause_mode = None

    async def abort(self, call: Call, group: str) -> None:
        """Nothing to send: a blocked scheduler reads no calls. The source leaving the group is what frees it."""

    async def reset(self, call: Call) -> None:
        if self._has("end_weight_update"):
            await self._tell(
                "end_weight_update", {}, call, "reset", fine=("no weight-update session", "400 Client Error")
            )

    async def checksums(self, call: Call) -> dict[str, str] | None:
        return None

    async def aclose(self) -> None:
        self._files.close()
        self._files = DaemonWorker("sglang-checkpoint")  # an adapter may be used again; its thread starts when needed

    # --------------------------------------------------------------------------- helpers

    def _has(self, method: str) -> bool:
        return hasattr(self._handle, method)

    async def _tell(
        self,
        method: str,
        arguments: dict[str, Any],
        call: Call,
        phase: str,
        *,
        args: tuple[Any, ...] = (),
        bucket: int | None = None,
        optional: tuple[str, ...] | list[str] = (),
        none_ok: bool = True,
        fine: tuple[str, ...] = (),
    ) -> Any:
        """Call ``method`` once and return its answer. ``fine``: failures with these words count as successes.

        Raises `EngineDied`, `EngineTimeout`, or `EngineFailed` for what it raised or answered.
        """
        facts: dict[str, Any] = {"engine": self._name, "phase": phase, "bucket": bucket}
        ref = self._submit(method, args, arguments, optional, facts)
        failure: str | None
        cause: BaseException | None = None
        try:
            async with asyncio.timeout(call.timeout):
                answer = await await_ref(ref, what=f"{self._name}.{method}")
            # Versions are plain answers; any of them may look like a failure.
            failure = None if method == "get_weight_version" else failure_in(answer, none_is_failure=not none_ok)
        except TimeoutError as error:
            raise EngineTimeout(
                f"{self._name}: no answer to {method} {not_within(call.timeout, phase)}",
                field=field_of(phase),
                seconds=call.timeout,
                **facts,
            ) from error
        except RemoteDied as error:
            raise EngineDied(f"{self._name} died: {short(error)}", **facts) from error
        except RemoteRaised as error:
            answer, cause = None, error.cause or error
            failure = f"{type(cause).__name__}: {short(cause)}"
        if failure is None or any(words in failure for words in fine):
            return answer
        raise EngineFailed(
            f"{self._name}: {method} failed: {failure}",
            is_collective=phase == "receive" and looks_collective(failure),
            **facts,
        ) from cause

    def _submit(
        self, method: str, args: tuple[Any, ...], arguments: dict[str, Any], optional: Any, facts: dict[str, Any]
    ) -> Any:
        remote = getattr(self._handle, method, None)
        if remote is None:
            raise EngineRejected(f"{self._name} has no method {method}", **facts)
        try:
            return submit(remote, *args, **arguments)
        except TypeError as error:
            # Nothing was sent. Leave out what an older actor does not take, one by one.
            unknown = next((name for name in optional if name in arguments and f"'{name}'" in str(error)), None)
            if unknown is None:
                refused = EngineFailed if facts["phase"] == "receive" else EngineRejected  # nothing was touched
                raise refused(f"{self._name}: {method} can't be called: {error}", **facts) from error
            return self._submit(method, args, {k: v for k, v in arguments.items() if k != unknown}, optional, facts)


def _process(actor: Any) -> str:
    """Runs in the actor: its process, told from any later one with the same id."""
    pid = os.getpid()
    try:
        with open(f"/proc/{pid}/stat") as stat:
            started = stat.read().rsplit(")", 1)[1].split()[19]  # field 22, starttime
    except (OSError, IndexError):
        started = ""
    return f"{pid}-{started}"
