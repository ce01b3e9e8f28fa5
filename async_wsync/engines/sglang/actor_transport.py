"""Calls to the methods of a Ray actor in front of an SGLang server, as slime, miles and relatives have them.

The methods follow SGLang's routes, with differences between projects and versions: some lack methods (begin, end,
version), some lack keywords. A lacking keyword shows when it is given: Ray checks a call's arguments before it sends
anything.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

from async_wsync.engines.replies import Answer, failure_in, short
from async_wsync.engines.sglang.transport import UNKNOWN, Process
from async_wsync.errors import EngineDied, EngineFailed, EngineRejected, EngineTimeout
from async_wsync.phases import field_of, not_within
from async_wsync.runtime.object_refs import RemoteDied, RemoteRaised, await_ref, submit
from async_wsync.transfer.tensors import torch_dtype
from async_wsync.types import Call

__all__ = ["ActorTransport"]

_ANY = object()
#: Keywords that an older actor may lack, and the value at which it does the same without.
_MAY_BE_LEFT_OUT: Mapping[str, Mapping[str, object]] = {
    "pause_generation": {"mode": "abort"},
    "update_weights_from_distributed": {"flush_cache": False, "selector": "all", "weight_version": _ANY},
}
#: SGLang's calls that no actor has; a method of such a name would take other arguments.
_NEVER = frozenset({"model_info", "server_info", "get_weights_by_name", "weights_checker"})


class ActorTransport:
    """A `Transport` to the actor of ``handle``."""

    def __init__(self, handle: Any, *, name: str) -> None:
        self.name = name
        self._handle = handle

    def has(self, method: str) -> bool:
        return method not in _NEVER and hasattr(self._handle, method)

    async def ask(
        self, method: str, body: dict[str, Any] | None, call: Call, *, phase: str, bucket: int | None = None
    ) -> Answer:
        return await self._call(method, (), _arguments(method, body or {}), call, phase=phase, bucket=bucket)

    async def _call(
        self,
        method: str,
        args: tuple[Any, ...],
        keywords: Mapping[str, Any],
        call: Call,
        *,
        phase: str,
        bucket: int | None = None,
    ) -> Answer:
        facts: dict[str, Any] = {"engine": self.name, "phase": phase, "bucket": bucket}
        if not self.has(method):
            return Answer(method=method, status=Answer.NO_METHOD, failure=f"it has no method {method}", **facts)
        ref = self._submit(method, args, keywords, facts)
        try:
            async with asyncio.timeout(call.timeout):
                data = await await_ref(ref, what=f"{self.name}.{method}")
        except TimeoutError as error:
            raise EngineTimeout(
                f"{self.name}: no answer to {method} {not_within(call.timeout, phase)}",
                field=field_of(phase),
                seconds=call.timeout,
                **facts,
            ) from error
        except RemoteDied as error:
            raise EngineDied(f"{self.name} died: {short(error)}", **facts) from error
        except RemoteRaised as error:
            cause = error.cause or error
            failure = f"{type(cause).__name__}: {short(cause)}"
            return Answer(method=method, status=Answer.RAISED, failure=failure, error=cause, **facts)
        return Answer(method=method, data=data, failure=failure_in(data, none_is_failure=False), **facts)

    def _submit(self, method: str, args: tuple[Any, ...], keywords: Mapping[str, Any], facts: dict[str, Any]) -> Any:
        optional = _MAY_BE_LEFT_OUT.get(method, {})
        while True:
            try:
                return submit(getattr(self._handle, method), *args, **keywords)
            except TypeError as error:
                # Nothing was sent. Leave out what an older actor does not take, one by one.
                unknown = next((name for name in keywords if name in optional and f"'{name}'" in str(error)), "")
                if not unknown or optional[unknown] not in (keywords[unknown], _ANY):
                    kind = EngineFailed if facts["bucket"] is not None else EngineRejected
                    raise kind(f"{self.name}: {method} can't be called: {error}", **facts) from error
                keywords = {name: value for name, value in keywords.items() if name != unknown}

    async def model(self, call: Call, *, phase: str) -> Mapping[str, Any]:
        if not self.has("get_weight_version"):
            return {}
        answer = await self.ask("get_weight_version", None, call, phase=phase)
        return {"weight_version": answer.raise_failure().data}

    async def process(self, call: Call) -> Process:
        """A restarted actor has neither the group nor the weights, and the same handle: its process tells.

        The incarnation is unknown, and restarts go unnoticed, if the actor's process can't import this package.
        """
        answer = await self._call("__ray_call__", (_process_and_start,), {}, call, phase="hello")
        return Process(incarnation=UNKNOWN if answer.failure is not None else str(answer.data))

    async def aclose(self) -> None:
        """The actor stays; it is not ours."""


def _arguments(method: str, body: dict[str, Any]) -> Mapping[str, Any]:
    """The keywords for what SGLang's route takes as JSON."""
    if method == "update_weights_from_distributed":
        keywords = {name: value for name, value in body.items() if name != "abort_all_requests"}
        return keywords | {"dtypes": [torch_dtype(name) for name in body["dtypes"]]}
    if method == "update_weight_version":
        return {"weight_version": body["new_version"]}
    return body


def _process_and_start(actor: Any) -> str:
    """Runs in the actor. Its process, and when that started: a later one may have the same id."""
    pid = os.getpid()
    try:
        with open(f"/proc/{pid}/stat") as stat:
            started = stat.read().rsplit(")", 1)[1].split()[19]  # field 22, starttime
    except (OSError, IndexError):
        started = ""
    return f"{pid}-{started}"
