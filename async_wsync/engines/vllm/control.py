"""How a source reaches vLLM's control plane: an actor's methods, or the HTTP routes of its development mode.

Failures are `RemoteDied`, `RemoteRaised` and TimeoutError, which `VLLMEngine` gives a name, or named already.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any, Protocol

from async_wsync.engines.http import JsonServer
from async_wsync.engines.replies import says_vllm_is_dead, short
from async_wsync.engines.vllm.messages import UNSEEN_REPLICA
from async_wsync.runtime.object_refs import RemoteDied, RemoteRaised, await_ref, submit

__all__ = ["ActorControl", "At", "Control", "HttpControl", "hinted", "unseen_replica"]

_ATTRIBUTE = "weight_transfer_engine"  # where a worker of vLLM keeps our backend; see vllm_worker


@dataclass(frozen=True, slots=True, kw_only=True)
class At:
    """What a control call is made for, and for how many seconds at most."""

    timeout: float
    phase: str
    bucket: int | None = None


class Control(Protocol):
    """vLLM's control calls."""

    async def health(self, at: At) -> None:
        """`RemoteDied` if the engine is dead; silence or trouble is no proof."""
        ...

    async def ask(self, request: str, at: At) -> list[dict[str, Any]]:
        """Our backend's answers, one for each rank that vLLM lets answer."""
        ...

    async def num_ranks(self, at: At) -> int: ...
    async def pause(self, mode: str, clear_cache: bool, at: At) -> None: ...
    async def resume(self, at: At) -> None: ...
    async def is_paused(self, at: At) -> bool: ...
    async def reset_cache(self, running: bool, at: At) -> bool: ...
    async def init(self, request: str, at: At) -> None: ...
    async def start(self, at: At) -> None: ...
    async def update(self, request: str, at: At) -> None: ...
    async def finish(self, at: At) -> None: ...
    async def set_version(self, version: str, at: At) -> None: ...
    async def get_version(self, at: At) -> str: ...
    async def aclose(self) -> None: ...


def unseen_replica(error: RemoteRaised) -> list[dict[str, Any]]:
    """The answer of a data parallel replica that vLLM shows only as an exception; else the exception."""
    text = str(error.cause or error)
    at = text.find(UNSEEN_REPLICA)
    if at < 0:
        raise error
    try:
        reply, _ = json.JSONDecoder().raw_decode(text[at + len(UNSEEN_REPLICA) :])
    except ValueError:
        raise error from None
    return [reply]


def hinted(error: RemoteRaised) -> str:
    """The error in words, and what to do about it where we know."""
    text = short(error, 1000)
    if any(words in text for words in ("object is not callable", "Weight transfer not configured", "not implemented")):
        return f'{text} (start vLLM with --weight-transfer-config \'{{"backend": "async_wsync"}}\')'
    hints = {404: "start vLLM with VLLM_SERVER_DEV_MODE=1", 401: "set api_key", 403: "set api_key"}
    hint = hints.get(getattr(error, "status", 0))
    return f"{text} ({hint})" if hint else text


class ActorControl:
    """Over the methods of `VLLMRolloutActor`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def _call(self, method: str, at: At, *args: Any) -> Any:
        ref = submit(getattr(self._handle, method), *args)
        async with asyncio.timeout(at.timeout):
            try:
                return await await_ref(ref, what=method)
            except RemoteRaised as error:
                if says_vllm_is_dead(f"{error} {error.remote_traceback}"):
                    raise RemoteDied(f"{method}: vLLM's engine is dead: {short(error)}", what=method) from error
                raise

    async def health(self, at: At) -> None:
        try:
            await self._call("check_health", at)
        except (RemoteRaised, TimeoutError):
            pass

    async def ask(self, request: str, at: At) -> list[dict[str, Any]]:
        replies: list[dict[str, Any]] = await self._call("collective_rpc", at, _ATTRIBUTE, [request])
        return replies

    async def num_ranks(self, at: At) -> int:
        return int(await self._call("world_size", at))

    async def pause(self, mode: str, clear_cache: bool, at: At) -> None:
        await self._call("pause_generation", at, mode, clear_cache)

    async def resume(self, at: At) -> None:
        await self._call("resume_generation", at)

    async def is_paused(self, at: At) -> bool:
        return bool(await self._call("is_paused", at))

    async def reset_cache(self, running: bool, at: At) -> bool:
        return bool(await self._call("reset_prefix_cache", at, running))

    async def init(self, request: str, at: At) -> None:
        await self._call("init_weight_transfer_engine", at, {"request": request})

    async def start(self, at: At) -> None:
        await self._call("start_weight_update", at)

    async def update(self, request: str, at: At) -> None:
        await self._call("update_weights", at, {"request": request})

    async def finish(self, at: At) -> None:
        await self._call("finish_weight_update", at)

    async def set_version(self, version: str, at: At) -> None:
        await self._call("update_weight_version", at, version)

    async def get_version(self, at: At) -> str:
        return str(await self._call("get_weight_version", at))

    async def aclose(self) -> None:
        """The actor stays; it is not ours."""


class HttpControl:
    """Over a server that was started with ``VLLM_SERVER_DEV_MODE=1``."""

    def __init__(self, server: JsonServer) -> None:
        self._server = server

    async def _call(self, method: str, path: str, at: At, body: dict[str, Any] | None = None) -> Any:
        answer = await self._server.ask(method, path, body, timeout=at.timeout, phase=at.phase, bucket=at.bucket)
        if answer.status < 400:
            return answer.data
        failure = f"{path}: {answer.failure}"
        if says_vllm_is_dead(str(answer.data)):
            raise RemoteDied(f"vLLM's engine is dead: {failure}", what=path)
        # All of the text: the answer of another replica may be in it.
        raise RemoteRaised(failure, what=path, cause=RuntimeError(str(answer.data)), status=answer.status)

    async def health(self, at: At) -> None:
        answer = await self._server.ask("GET", "/health", timeout=at.timeout, phase=at.phase, bucket=at.bucket)
        if answer.status == 503:
            raise RemoteDied("vLLM's engine is dead: /health answered HTTP 503", what="/health")

    async def ask(self, request: str, at: At) -> list[dict[str, Any]]:
        answer = await self._call("POST", "/collective_rpc", at, {"method": _ATTRIBUTE, "args": [request]})
        replies: list[dict[str, Any]] = answer["results"]
        return replies

    async def num_ranks(self, at: At) -> int:
        return int((await self._call("GET", "/get_world_size", at))["world_size"])

    async def pause(self, mode: str, clear_cache: bool, at: At) -> None:
        await self._call("POST", f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}", at)

    async def resume(self, at: At) -> None:
        await self._call("POST", "/resume", at)

    async def is_paused(self, at: At) -> bool:
        return bool((await self._call("GET", "/is_paused", at))["is_paused"])

    async def reset_cache(self, running: bool, at: At) -> bool:
        path = f"/reset_prefix_cache?reset_running_requests={str(running).lower()}"
        return bool((await self._call("POST", path, at))["success"])

    async def init(self, request: str, at: At) -> None:
        await self._call("POST", "/init_weight_transfer_engine", at, {"init_info": {"request": request}})

    async def start(self, at: At) -> None:
        await self._call("POST", "/start_weight_update", at)

    async def update(self, request: str, at: At) -> None:
        await self._call("POST", "/update_weights", at, {"update_info": {"request": request}})

    async def finish(self, at: At) -> None:
        await self._call("POST", "/finish_weight_update", at)

    async def set_version(self, version: str, at: At) -> None:
        await self._call("POST", "/update_weight_version", at, {"new_version": version})

    async def get_version(self, at: At) -> str:
        return str((await self._call("GET", "/weight_info", at))["weight_version"])

    async def aclose(self) -> None:
        await self._server.aclose()
