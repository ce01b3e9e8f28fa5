"""SGLang servers over HTTP.

SGLang takes a weight update in steps: join a torch process group, pause, begin, then one announcement for each bucket
while the trainer broadcasts it, end, version, continue. It accepts many mistakes with 200 and bumps its version; each
guard here stands against one of them. Tried with 0.5.23; versions before 0.5.16 have no begin and end, and get none.

A receive that never gets its broadcast blocks an SGLang scheduler, its own continue and end calls included. Nothing
that it can be sent helps: it comes free when the trainer leaves the update group (`UpdateGroup.abort`).
"""

from __future__ import annotations

import hashlib
import os
import ssl
from collections.abc import Mapping, Sequence
from typing import Any

from async_wsync import arguments
from async_wsync.engines.http import JsonServer
from async_wsync.engines.sglang import messages as wire
from async_wsync.engines.sglang.checkpoint_index import read_index
from async_wsync.engines.sglang.lora import LoRALoader
from async_wsync.engines.sglang.messages import Selector
from async_wsync.engines.sglang.names import Findings, against_index, by_probing, check_base
from async_wsync.errors import EngineBusy, EngineFailed, EngineRejected
from async_wsync.runtime.threads import DaemonWorker
from async_wsync.types import BucketSpec, Call, EngineInfo, EngineState, GroupSpec, PauseMode, UpdateSpec, WireFormat

__all__ = ["SGLangServer"]


class SGLangServer(LoRALoader):
    """One SGLang server, as a `RolloutEngine`.

    ``num_ranks``: its tensor parallel size. ``wire_format``: FLATTENED (one buffer a bucket, SGLang's
    ``flattened_bucket``), or PER_TENSOR for servers too old for it. ``selector``: which of its models take the
    weights, where it has a draft model. ``checkpoint``: a directory as the server was started from, to check names and
    shapes by, where the server's own can't be read from here. ``check_names=False`` leaves that check out, for models
    whose engine-side names differ from their checkpoint's.
    """

    pipelined = False
    supports_fence = False
    pause_modes = frozenset(wire.PAUSE_WORDS)

    def __init__(
        self,
        url: str,
        *,
        num_ranks: int = 1,
        name: str | None = None,
        api_key: str | None = None,
        verify: ssl.SSLContext | bool = True,
        wire_format: WireFormat = WireFormat.FLATTENED,
        selector: Selector = "all",
        checkpoint: str | os.PathLike[str] | None = None,
        check_names: bool = True,
    ) -> None:
        arguments.url("the URL of an SGLang server", url)
        arguments.flag("check_names", check_names)
        wire.check_options(num_ranks=num_ranks, name=name, wire_format=wire_format, selector=selector)
        self._name = name or url.rstrip("/")
        self._num_ranks = num_ranks
        self._wire_format = wire_format
        self._selector: Selector = selector
        self._checkpoint = os.path.abspath(checkpoint) if checkpoint is not None else None
        self._check_names = check_names
        self._server = JsonServer(url.rstrip("/"), name=self._name, api_key=api_key, verify=verify)
        self._files = DaemonWorker("sglang-checkpoint")
        self._has_sessions: bool | None = None  # begin / end; unknown until begin was tried
        self._pause_mode: PauseMode | None = None
        self._checked: dict[tuple[str, bool, str], Findings] = {}

    @classmethod
    async def discover(cls, url: str, *, timeout: float = 30.0, **options: Any) -> SGLangServer:
        """The server at ``url``, asked for its number of ranks. ``options`` as for the class."""
        engine = cls(url, **options)
        done = False
        try:
            facts = await engine._get("/server_info", Call(source="", fence=0, timeout=timeout), "hello")
            engine._num_ranks = int(facts.get("tp_size") or 1)
            done = True
        finally:
            if not done:
                await engine.aclose()
        return engine

    def __repr__(self) -> str:
        return f"<SGLangServer {self._name} {self._num_ranks} ranks, {self._wire_format.value}>"

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
        model = await self._get("/model_info", call, "hello")
        facts = await self._get("/server_info", call, "hello")
        self._fits_the_group(facts)
        started = (facts.get("random_seed"), str(facts.get("startup_time")), facts.get("port"), facts.get("version"))
        return EngineInfo(
            # SGLang has no id for its process; its seed and its start-up times are as good as one.
            incarnation=hashlib.blake2b(repr(started).encode(), digest_size=8).hexdigest(),
            version=wire.version_number(model.get("weight_version")),
            state=EngineState.STALE,  # a session that a dead source left open does not show
            device=str(facts.get("device", "cuda")),
            host=self._server.url,
        )

    def _fits_the_group(self, facts: Mapping[str, Any]) -> None:
        """A wrong number of ranks would make everybody wait in the rendezvous until its limit."""
        ranks = int(facts.get("tp_size") or 1)
        if int(facts.get("dp_size") or 1) != 1 or int(facts.get("pp_size") or 1) != 1:
            raise self._refused(
                "SGLang takes broadcast weights only with dp_size=1 and pp_size=1: give each replica its own server"
            )
        if ranks != self._num_ranks:
            raise self._refused(f"it runs with tp_size={ranks}, and num_ranks={self._num_ranks} was given")
        if self._selector == "draft" and not facts.get("speculative_algorithm"):
            raise self._refused("selector='draft', and it has no draft model: it would take the weights and drop them")

    async def check(self, call: Call, update: UpdateSpec) -> tuple[str, ...]:
        asks = not update.strict or (self._check_names and self._checkpoint is None)
        model = await self._get("/model_info", call, "check") if asks else {}
        found = Findings(notes=["names and shapes were not checked (check_names=False)"])
        if self._check_names:
            found = await self._find(call, update, self._checkpoint or str(model.get("model_path", "")))
        check_base(update, found.left_out, holds=wire.version_number(model.get("weight_version")), engine=self._name)
        return tuple(found.notes)

    async def _find(self, call: Call, update: UpdateSpec, path: str) -> Findings:
        key = (update.manifest.fingerprint(), update.strict, path)
        if key not in self._checked:
            found = await self._look(call, update, path)
            if found.bad:
                raise found.rejection(engine=self._name)
            self._checked = {key: found}
        return self._checked[key]

    async def _look(self, call: Call, update: UpdateSpec, path: str) -> Findings:
        # A relative path is one of the server's own folder, and might name another here.
        index = await self._files.run(read_index, path) if os.path.isabs(path) else None
        if index is not None:
            return against_index(update, index)

        async def probe(name: str) -> Any:
            answer = await self._server.ask(
                "POST", "/get_weights_by_name", wire.sample(name, 1), timeout=call.timeout, phase="check"
            )
            return answer.data if answer.failure is None else None

        return await by_probing(update.manifest, probe)

    # ------------------------------------------------------------------------- the group

    async def join(self, call: Call, group: GroupSpec, *, rank_offset: int) -> None:
        body = wire.init_group(group, rank_offset)
        answer = await self._server.ask(
            "POST", "/init_weights_update_group", body, timeout=call.timeout, phase="connect"
        )
        if answer.failure is not None and "already been created" in answer.failure:
            # Left behind by a source that died. A member of nothing can only be in the way.
            await self.leave(call, group.name)
            answer = await self._server.ask(
                "POST", "/init_weights_update_group", body, timeout=call.timeout, phase="connect"
            )
        if answer.failure is not None:
            raise self._server.failed("/init_weights_update_group", answer.failure, answer.status, phase="connect")

    async def leave(self, call: Call, group: str) -> None:
        path = "/destroy_weights_update_group"
        answer = await self._server.ask("POST", path, wire.destroy_group(group), timeout=call.timeout, phase="leave")
        if answer.failure is not None and "does not exist" not in answer.failure:
            raise self._server.failed(path, answer.failure, answer.status, phase="leave")

    # ------------------------------------------------------------------------ the bracket

    async def pause(self, call: Call, mode: PauseMode) -> None:
        if (why := wire.no_pause(mode)) is not None:
            raise self._refused(why, phase="pause")
        self._pause_mode = mode
        await self._post("/pause_generation", wire.pause(mode), call, "pause")

    async def flush(self, call: Call) -> None:
        if self._pause_mode is PauseMode.KEEP:
            return  # the requests that stay are made of that cache; SGLang would refuse
        answer = await self._server.ask("POST", "/flush_cache", timeout=call.timeout, phase="flush")
        if answer.failure is not None:
            raise EngineBusy(f"{self._name}: {answer.failure}", engine=self._name, phase="flush")

    async def begin(self, call: Call, update: UpdateSpec) -> None:
        answer = await self._server.ask(
            "POST", "/begin_weight_update", wire.begin(self._selector), timeout=call.timeout, phase="begin"
        )
        self._has_sessions = answer.status != 404
        if self._has_sessions and answer.failure is not None:
            raise self._server.failed("/begin_weight_update", answer.failure, answer.status, phase="begin")

    async def receive(self, call: Call, update: UpdateSpec, bucket: BucketSpec) -> None:
        body = wire.announce(bucket, update.group, wire=self._wire_format, selector=self._selector)
        path = "/update_weights_from_distributed"
        await self._server.must("POST", path, body, timeout=call.timeout, phase="receive", bucket=bucket.index)

    async def end(self, call: Call, update: UpdateSpec) -> None:
        if self._has_sessions is not False:
            await self._post("/end_weight_update", {}, call, "end")

    async def publish(self, call: Call, version: int) -> None:
        await self._post("/update_weight_version", wire.set_version(version), call, "publish")
        answered = (await self._get("/model_info", call, "publish")).get("weight_version")
        if str(answered) != str(version):
            raise EngineFailed(
                f"{self._name}: took version {version} and says {answered!r}", engine=self._name, phase="publish"
            )

    async def resume(self, call: Call) -> None:
        await self._post("/continue_generation", {}, call, "resume")
        self._pause_mode = None

    async def abort(self, call: Call, group: str) -> None:
        """Nothing to send: a blocked scheduler reads no calls. The source leaving the group is what frees it."""

    async def reset(self, call: Call) -> None:
        if self._has_sessions is False:
            return
        answer = await self._server.ask("POST", "/end_weight_update", {}, timeout=call.timeout, phase="reset")
        none_open = answer.status == 404 or "no weight-update session" in str(answer.failure)
        if answer.failure is not None and not none_open:
            raise self._server.failed("/end_weight_update", answer.failure, answer.status, phase="reset")

    # ---------------------------------------------------------------------------- proofs

    async def checksums(self, call: Call) -> dict[str, str] | None:
        """None: SGLang hashes its own, fused tensors its own way. See `own_checksums` and `sample`."""
        return None

    async def own_checksums(self, call: Call) -> dict[str, str] | None:
        """SGLang's hash of each of its tensors, under its own names: equal on engines that hold equal weights.

        With several ranks the names are prefixed "rank 0: ". None where the server has no such call.
        """
        answer = await self._server.ask(
            "POST", "/weights_checker", wire.checksum(), timeout=call.timeout, phase="verify"
        )
        if answer.status == 404:
            return None
        if answer.failure is not None:
            raise self._server.failed("/weights_checker", answer.failure, answer.status, phase="verify")
        ranks = answer.data.get("ranks") or []
        many = len(ranks) > 1
        return {
            f"rank {i}: {name}" if many else name: digest
            for i, rank in enumerate(ranks)
            for name, digest in rank["checksums"].items()
        }

    async def sample(self, call: Call, names: Sequence[str], *, rows: int = 1) -> dict[str, Any]:
        """The first ``rows`` rows of each tensor, as nested lists; a name that it can't give is left out."""
        found = {}
        for name in names:
            answer = await self._server.ask(
                "POST", "/get_weights_by_name", wire.sample(name, rows), timeout=call.timeout, phase="verify"
            )
            if answer.failure is None:
                found[name] = answer.data
        return found

    async def aclose(self) -> None:
        self._files.close()
        self._files = DaemonWorker("sglang-checkpoint")  # an adapter may be used again; its thread starts when needed
        await self._server.aclose()

    # --------------------------------------------------------------------------- helpers

    async def _get(self, path: str, call: Call, phase: str) -> dict[str, Any]:
        data = await self._server.must("GET", path, timeout=call.timeout, phase=phase)
        if not isinstance(data, dict):
            raise self._server.failed(path, "the answer is no JSON object; is this an SGLang server?", phase=phase)
        return data

    async def _post(self, path: str, body: dict[str, Any], call: Call, phase: str) -> None:
        await self._server.must("POST", path, body, timeout=call.timeout, phase=phase)

    def _refused(self, why: str, *, phase: str = "hello") -> EngineRejected:
        return EngineRejected(f"{self._name}: {why}", engine=self._name, phase=phase)
