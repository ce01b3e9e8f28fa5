"""SGLang as a rollout engine, reached over HTTP (`SGLangServer`) or through a Ray actor (`SGLangActor`).

SGLang takes a weight update in steps: join a torch process group, pause, begin, then one announcement for each bucket
while the trainer broadcasts it, end, version, continue. It accepts many mistakes with 200 and counts the new version;
each guard here stands against one of them. Tried with 0.5.23; versions before 0.5.16 have no begin and end, and get
none.

An SGLang scheduler that waits for a broadcast reads no calls, its own continue and end included. It comes free when the
trainer leaves the update group (`UpdateGroup.abort`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from async_wsync import arguments
from async_wsync.engines.rejection import Findings
from async_wsync.engines.sglang import messages as wire
from async_wsync.engines.sglang.checkpoint_index import read_index
from async_wsync.engines.sglang.messages import Selector
from async_wsync.engines.sglang.names import against_index, by_probing, check_base, not_checked
from async_wsync.engines.sglang.transport import UNKNOWN, Transport
from async_wsync.errors import EngineBusy, EngineFailed, EngineRejected
from async_wsync.runtime.threads import DaemonWorker
from async_wsync.types import BucketSpec, Call, EngineInfo, EngineState, GroupSpec, PauseMode, UpdateSpec, WireFormat

__all__ = ["SGLangEngine"]


class SGLangEngine:
    """One SGLang engine behind a `Transport`; satisfies `RolloutEngine`.

    Args:
        transport: the way to the engine.
        num_ranks: its tensor parallel size.
        wire_format: FLATTENED (one buffer a bucket, SGLang's ``flattened_bucket``) or PER_TENSOR.
        selector: which of its models take the weights, if it has a draft model.
        checkpoint: a directory as the engine was started from, to check names and shapes by.
        check_names: False for models whose names at the engine differ from their checkpoint's.
    """

    pipelined = False
    supports_fence = False
    pause_modes = frozenset(wire.PAUSE_WORDS)

    def __init__(
        self,
        transport: Transport,
        *,
        num_ranks: int,
        wire_format: WireFormat,
        selector: Selector,
        checkpoint: str | os.PathLike[str] | None,
        check_names: bool = True,
    ) -> None:
        arguments.at_least("num_ranks", num_ranks, 1)
        arguments.one_of("selector", selector, get_args(Selector))
        arguments.kind("wire_format", wire_format, WireFormat)
        arguments.flag("check_names", check_names)
        if wire_format is WireFormat.PACKED:
            raise ValueError("SGLang reads flattened_bucket or per_tensor, not packed")
        self.name = transport.name
        self.num_ranks = num_ranks
        self.wire_format = wire_format
        self._transport = transport
        self._ask = transport.ask
        self._selector: Selector = selector
        self._checkpoint = os.path.abspath(checkpoint) if checkpoint is not None else None
        self._check_names = check_names
        self._files = DaemonWorker("sglang-checkpoint")
        self._has_sessions: bool | None = None  # begin and end; unknown until begin was tried
        self._pause_mode: PauseMode | None = None
        self._checked: dict[tuple[str, bool, str], Findings] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.num_ranks} ranks, {self.wire_format.value}>"

    # ------------------------------------------------------------------ before an update

    async def hello(self, call: Call) -> EngineInfo:
        model = await self._transport.model(call, phase="hello")
        process = await self._transport.process(call)
        if process.facts:
            self._fits_the_group(process.facts)
        return EngineInfo(
            incarnation=process.incarnation,
            version=wire.version_number(model.get("weight_version")),
            state=EngineState.STALE,  # a session that a dead source left open does not show
            device=process.device,
            host=process.host,
        )

    def _fits_the_group(self, facts: Mapping[str, Any]) -> None:
        """A wrong number of ranks would make everybody wait in the rendezvous until its limit."""
        ranks = int(facts.get("tp_size") or 1)
        if int(facts.get("dp_size") or 1) != 1 or int(facts.get("pp_size") or 1) != 1:
            raise self._refused(
                "SGLang takes broadcast weights only with dp_size=1 and pp_size=1: give each replica its own server",
                phase="hello",
            )
        if ranks != self.num_ranks:
            raise self._refused(
                f"it runs with tp_size={ranks}, and num_ranks={self.num_ranks} was given", phase="hello"
            )
        if self._selector == "draft" and not facts.get("speculative_algorithm"):
            raise self._refused(
                "selector='draft', and it has no draft model: it would take the weights and drop them", phase="hello"
            )

    async def check(self, call: Call, update: UpdateSpec) -> tuple[str, ...]:
        found = await self._find(call, update)
        if found.bad:
            raise found.rejection(engine=self.name)
        if not update.strict and found.left_out != ():
            check_base(update, found.left_out, holds=await self._held(call, update), engine=self.name)
        return found.notes

    async def _find(self, call: Call, update: UpdateSpec) -> Findings:
        if not self._check_names:
            return not_checked("names and shapes were not checked (check_names=False)")
        path = self._checkpoint
        if path is None and self._transport.has("model_info"):
            path = str((await self._transport.model(call, phase="check")).get("model_path", ""))
        key = (update.manifest.fingerprint(), update.strict, path or "")
        if key not in self._checked:
            self._checked = {key: await self._look(call, update, path or "")}
        return self._checked[key]

    async def _look(self, call: Call, update: UpdateSpec, path: str) -> Findings:
        # A relative path is one of the engine's own folder, and might name another here.
        index = await self._files.run(read_index, path) if os.path.isabs(path) else None
        if index is not None:
            return against_index(update, index)
        if not self._transport.has("get_weights_by_name"):
            why = f"there is no safetensors checkpoint at {path}" if path else "no checkpoint= was given"
            return not_checked(f"names and shapes were not checked: {why}")

        async def probe(name: str) -> Any:
            answer = await self._ask("get_weights_by_name", wire.sample(name, 1), call, phase="check")
            return answer.data if answer.failure is None else None

        return await by_probing(update.manifest, probe)

    async def _held(self, call: Call, update: UpdateSpec) -> int | None:
        """The version it says; one that can't say is believed as long as its process is known to be the same."""
        if model := await self._transport.model(call, phase="check"):
            return wire.version_number(model.get("weight_version"))
        known = (await self._transport.process(call)).incarnation != UNKNOWN
        return update.base.version if known and update.base is not None else None

    # ------------------------------------------------------------------------- the group

    async def join(self, call: Call, group: GroupSpec, *, rank_offset: int) -> None:
        body = wire.init_group(group, rank_offset)
        answer = await self._ask("init_weights_update_group", body, call, phase="connect")
        if answer.says("already been created"):
            # Left behind by a source that died. A group without its source can only be in the way.
            await self.leave(call, group.name)
            answer = await self._ask("init_weights_update_group", body, call, phase="connect")
        answer.raise_failure()

    async def leave(self, call: Call, group: str) -> None:
        answer = await self._ask("destroy_weights_update_group", wire.destroy_group(group), call, phase="leave")
        if not answer.says("does not exist"):
            answer.raise_failure()

    # ------------------------------------------------------------------------ the bracket

    async def pause(self, call: Call, mode: PauseMode) -> None:
        if (why := wire.no_pause(mode)) is not None:
            raise self._refused(why, phase="pause")
        self._pause_mode = mode
        (await self._ask("pause_generation", wire.pause(mode), call, phase="pause")).raise_failure()

    async def flush(self, call: Call) -> None:
        if self._pause_mode is PauseMode.KEEP:
            return  # the requests that stay need that cache; SGLang would refuse
        answer = await self._ask("flush_cache", None, call, phase="flush")
        if answer.unknown_call or answer.status in (401, 403):
            answer.raise_failure()  # it would answer the same the next time
        if answer.failure is not None:
            raise EngineBusy(f"{self.name}: {answer.failure}", engine=self.name, phase="flush") from answer.error

    async def begin(self, call: Call, update: UpdateSpec) -> None:
        answer = await self._ask("begin_weight_update", wire.begin(self._selector), call, phase="begin")
        self._has_sessions = not answer.unknown_call
        if self._has_sessions:
            answer.raise_failure()

    async def receive(self, call: Call, update: UpdateSpec, bucket: BucketSpec) -> None:
        body = wire.announce(bucket, update.group, wire=self.wire_format, selector=self._selector)
        if not self._transport.has("update_weight_version") and bucket.index == update.buckets[-1].index:
            # It can be given a version only with a bucket; the last one is the least early.
            body["weight_version"] = str(update.version)
        answer = await self._ask("update_weights_from_distributed", body, call, phase="receive", bucket=bucket.index)
        if answer.raise_failure().data in (None, ""):
            raise answer.failed("it answered None")

    async def end(self, call: Call, update: UpdateSpec) -> None:
        if self._has_sessions is not False:
            (await self._ask("end_weight_update", {}, call, phase="end")).raise_failure()

    async def publish(self, call: Call, version: int) -> None:
        if self._transport.has("update_weight_version"):
            body = wire.set_version(version)
            (await self._ask("update_weight_version", body, call, phase="publish")).raise_failure()
        model = await self._transport.model(call, phase="publish")
        says = model.get("weight_version")
        if model and str(says) != str(version):
            raise EngineFailed(
                f"{self.name}: it was given version {version} and says {says!r}", engine=self.name, phase="publish"
            )

    async def resume(self, call: Call) -> None:
        (await self._ask("continue_generation", {}, call, phase="resume")).raise_failure()
        self._pause_mode = None

    async def abort(self, call: Call, group: str) -> None:
        """Send nothing: a scheduler that waits for a broadcast reads no calls. It comes free when the source leaves."""

    async def reset(self, call: Call) -> None:
        if self._has_sessions is False:
            return
        answer = await self._ask("end_weight_update", {}, call, phase="reset")
        # requests, with which actors call their servers, does not tell the words of a refusal.
        if not answer.unknown_call and not answer.says("no weight-update session", "400 Client Error"):
            answer.raise_failure()

    # ---------------------------------------------------------------------------- proofs

    async def checksums(self, call: Call) -> dict[str, str] | None:
        """None: SGLang hashes its own, fused tensors its own way. See `own_checksums` and `sample`."""
        return None

    async def own_checksums(self, call: Call) -> dict[str, str] | None:
        """SGLang's hash of each of its tensors, under its own names: equal on engines that hold equal weights.

        With several ranks the names are prefixed "rank 0: ". None if the engine has no such call.
        """
        answer = await self._ask("weights_checker", wire.checksum(), call, phase="verify")
        if answer.unknown_call:
            return None
        ranks = answer.raise_failure().data.get("ranks") or []
        return {
            f"rank {i}: {name}" if len(ranks) > 1 else name: digest
            for i, rank in enumerate(ranks)
            for name, digest in rank["checksums"].items()
        }

    async def sample(self, call: Call, names: Sequence[str], *, rows: int = 1) -> dict[str, Any]:
        """The first ``rows`` rows of each tensor, as nested lists; a name that it can't give is left out."""
        answers = {
            name: await self._ask("get_weights_by_name", wire.sample(name, rows), call, phase="verify")
            for name in names
        }
        return {name: answer.data for name, answer in answers.items() if answer.failure is None}

    async def aclose(self) -> None:
        self._files.close()
        self._files = DaemonWorker("sglang-checkpoint")  # an adapter may be used again; its thread starts when needed
        await self._transport.aclose()

    # --------------------------------------------------------------------------- helpers

    def _refused(self, why: str, *, phase: str) -> EngineRejected:
        return EngineRejected(f"{self.name}: {why}", engine=self.name, phase=phase)
