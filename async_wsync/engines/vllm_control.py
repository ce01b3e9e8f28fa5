"""How a source reaches vLLM's control plane: an actor's methods, or the HTTP routes of its development mode.

Failures are the neutral `RemoteDied` and `RemoteRaised`, and TimeoutError; `VLLMEngine` gives them a name.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from async_wsync.engines.replies import short
from async_wsync.runtime.object_refs import RemoteDied, RemoteRaised, await_ref

if TYPE_CHECKING:
    import httpx

__all__ = ["ActorControl", "Control", "HttpControl"]

_ATTRIBUTE = "weight_transfer_engine"  # where a worker of vLLM keeps our backend; see vllm_worker
_DEAD = ("EngineDeadError", "EngineCore encountered an issue", "Engine core proc", "engine is dead")


class Control(Protocol):
    """vLLM's control calls. All take ``timeout`` in seconds."""

    async def health(self, timeout: float) -> None:
        """`RemoteDied` if the engine is dead; silence or trouble is no proof."""
        ...

    async def ask(self, request: str, timeout: float) -> list[dict[str, Any]]:
        """Our backend's answers, one for each rank that vLLM lets answer."""
        ...

    async def num_ranks(self, timeout: float) -> int: ...
    async def pause(self, mode: str, clear_cache: bool, timeout: float) -> None: ...
    async def resume(self, timeout: float) -> None: ...
    async def is_paused(self, timeout: float) -> bool: ...
    async def reset_cache(self, running: bool, timeout: float) -> bool: ...
    async def init(self, request: str, timeout: float) -> None: ...
    async def start(self, timeout: float) -> None: ...
    async def update(self, request: str, timeout: float) -> None: ...
    async def finish(self, timeout: float) -> None: ...
    async def set_version(self, version: str, timeout: float) -> None: ...
    async def get_version(self, timeout: float) -> str: ...
    async def aclose(self) -> None: ...


def died_words(text: str) -> bool:
    return any(word in text for word in _DEAD)


class ActorControl:
    """Over the methods of `VLLMRolloutActor`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def _call(self, method: str, timeout: float, *args: Any) -> Any:
        ref = getattr(self._handle, method).remote(*args)
        async with asyncio.timeout(timeout):
            try:
                return await await_ref(ref, what=method)
            except RemoteRaised as error:
                if died_words(f"{error} {error.remote_traceback}"):
                    raise RemoteDied(f"{method}: vLLM's engine is dead: {short(error)}", what=method) from error
                raise

    async def health(self, timeout: float) -> None:
        try:
            await self._call("check_health", timeout)
        except (RemoteRaised, TimeoutError):
            pass

    async def ask(self, request: str, timeout: float) -> list[dict[str, Any]]:
        replies: list[dict[str, Any]] = await self._call("collective_rpc", timeout, _ATTRIBUTE, [request])
        return replies

    async def num_ranks(self, timeout: float) -> int:
        return int(await self._call("world_size", timeout))

    async def pause(self, mode: str, clear_cache: bool, timeout: float) -> None:
        await self._call("pause_generation", timeout, mode, clear_cache)

    async def resume(self, timeout: float) -> None:
        await self._call("resume_generation", timeout)

    async def is_paused(self, timeout: float) -> bool:
        return bool(await self._call("is_paused", timeout))

    async def reset_cache(self, running: bool, timeout: float) -> bool:
        return bool(await self._call("reset_prefix_cache", timeout, running))

    async def init(self, request: str, timeout: float) -> None:
        await self._call("init_weight_transfer_engine", timeout, {"request": request})

    async def start(self, timeout: float) -> None:
        await self._call("start_weight_update", timeout)

    async def update(self, request: str, timeout: float) -> None:
        await self._call("update_weights", timeout, {"request": request})

    async def finish(self, timeout: float) -> None:
        await self._call("finish_weight_update", timeout)

    async def set_version(self, version: str, timeout: float) -> None:
        await self._call("update_weight_version", timeout, version)

    async def get_version(self, timeout: float) -> str:
        return str(await self._call("get_weight_version", timeout))

    async def aclose(self) -> None:
        """The actor stays; it is not ours."""


class HttpControl:
    """Over a server that was started with ``VLLM_SERVER_DEV_MODE=1``."""

    def __init__(self, url: str, *, api_key: str | None = None, verify: Any = True) -> None:
        self._url = url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._verify = verify
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def _connected(self) -> httpx.AsyncClient:
        import httpx

        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:  # connections belong to the loop that opened them
            self._client = httpx.AsyncClient(base_url=self._url, headers=self._headers, verify=self._verify)
            self._loop = loop
        return self._client

    async def _call(self, method: str, path: str, timeout: float, **kwargs: Any) -> Any:
        import httpx

        try:
            response = await self._connected().request(method, path, timeout=timeout, **kwargs)
        except httpx.TimeoutException as error:
            raise TimeoutError(f"{path}: no answer within {timeout:g} s") from error
        except httpx.TransportError as error:
            why = short(error) if str(error) else type(error).__name__
            # A connection that is refused has nobody behind it; one that breaks may be a proxy's.
            certain = isinstance(error, httpx.ConnectError | httpx.RemoteProtocolError | httpx.ReadError)
            raise RemoteDied(f"{path}: the server is gone: {why}", what=path, certain=certain) from error
        if response.status_code >= 400:
            raise self._refused(path, response)
        return response.json() if response.content else None

    @staticmethod
    def _refused(path: str, response: httpx.Response) -> RemoteDied | RemoteRaised:
        text = response.text
        if died_words(text):
            return RemoteDied(f"{path}: vLLM's engine is dead: {short(text)}", what=path)
        hint = ""
        if response.status_code == 404:
            hint = " (start the server with VLLM_SERVER_DEV_MODE=1)"
        if response.status_code in (401, 403):
            hint = " (give its key as api_key)"
        return RemoteRaised(f"{path}: HTTP {response.status_code}{hint}: {short(text, 4000)}", what=path)

    async def health(self, timeout: float) -> None:
        try:
            await self._call("GET", "/health", timeout)
        except RemoteRaised as error:
            if "HTTP 503" in str(error):
                raise RemoteDied(f"vLLM's engine is dead: {error}") from error
        except TimeoutError:
            pass

    async def ask(self, request: str, timeout: float) -> list[dict[str, Any]]:
        body = {"method": _ATTRIBUTE, "args": [request]}
        answer = await self._call("POST", "/collective_rpc", timeout, json=body)
        replies: list[dict[str, Any]] = answer["results"]
        return replies

    async def num_ranks(self, timeout: float) -> int:
        return int((await self._call("GET", "/get_world_size", timeout))["world_size"])

    async def pause(self, mode: str, clear_cache: bool, timeout: float) -> None:
        params = {"mode": mode, "clear_cache": str(clear_cache).lower()}
        await self._call("POST", "/pause", timeout, params=params)

    async def resume(self, timeout: float) -> None:
        await self._call("POST", "/resume", timeout)

    async def is_paused(self, timeout: float) -> bool:
        return bool((await self._call("GET", "/is_paused", timeout))["is_paused"])

    async def reset_cache(self, running: bool, timeout: float) -> bool:
        params = {"reset_running_requests": str(running).lower()}
        return bool((await self._call("POST", "/reset_prefix_cache", timeout, params=params))["success"])

    async def init(self, request: str, timeout: float) -> None:
        body = {"init_info": {"request": request}}
        await self._call("POST", "/init_weight_transfer_engine", timeout, json=body)

    async def start(self, timeout: float) -> None:
        await self._call("POST", "/start_weight_update", timeout)

    async def update(self, request: str, timeout: float) -> None:
        await self._call("POST", "/update_weights", timeout, json={"update_info": {"request": request}})

    async def finish(self, timeout: float) -> None:
        await self._call("POST", "/finish_weight_update", timeout)

    async def set_version(self, version: str, timeout: float) -> None:
        await self._call("POST", "/update_weight_version", timeout, json={"new_version": version})

    async def get_version(self, timeout: float) -> str:
        return str((await self._call("GET", "/weight_info", timeout))["weight_version"])

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()
