"""Bounded JSON calls to an engine's HTTP server, with httpx's errors turned into ours."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from async_wsync import arguments
from async_wsync.engines.replies import failure_in, looks_collective, short
from async_wsync.errors import EngineDied, EngineFailed, EngineTimeout
from async_wsync.phases import field_of, not_within

if TYPE_CHECKING:
    import httpx

__all__ = ["Answer", "JsonServer"]

#: Servers close idle connections after 5 s (uvicorn's default). One closed under our hands would look like a death.
_IDLE_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """``data`` is the decoded JSON body, or its text where it is none."""

    status: int
    data: Any

    @property
    def failure(self) -> str | None:
        """What failed, in words; None for a success. A 200 whose body says otherwise is a failure."""
        if self.status >= 400:
            return f"HTTP {self.status}: {short(_message(self.data))}"
        return failure_in(self.data) if isinstance(self.data, dict | list) else None


class JsonServer:
    """One server. ``verify``: as httpx takes it, e.g. an ``ssl.SSLContext`` with your own CA."""

    def __init__(
        self, url: str, *, name: str, api_key: str | None = None, verify: ssl.SSLContext | bool = True
    ) -> None:
        arguments.text("name", name)
        arguments.text("api_key", api_key, none=True)
        self.url = url
        self.name = name
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._verify = verify
        self._client: httpx.AsyncClient | None = None

    async def ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout: float,
        phase: str,
        bucket: int | None = None,
    ) -> Answer:
        """One request, sent once. Raises `EngineDied` where nobody listens or the connection breaks, `EngineTimeout`
        after ``timeout`` seconds; any answer, a refusal too, is returned."""
        import httpx

        facts: dict[str, Any] = {"engine": self.name, "phase": phase, "bucket": bucket}
        try:
            # httpx bounds each read and write; only this bounds the whole.
            async with asyncio.timeout(timeout):
                response = await self._connected().request(method, path, json=body)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise EngineTimeout(
                f"{self.name}: no answer to {path} {not_within(timeout, phase)}",
                field=field_of(phase),
                seconds=timeout,
                **facts,
            ) from error
        except httpx.ConnectError as error:
            raise EngineDied(f"{self.name}: no server answers at {self.url}: {short(error)}", **facts) from error
        except httpx.TransportError as error:
            raise EngineDied(
                f"{self.name}: the connection broke during {path}: {type(error).__name__} {short(error)}", **facts
            ) from error
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise EngineFailed(f"{self.name}: {self.url} is not a usable URL: {error}", **facts) from error
        return Answer(status=response.status_code, data=_decoded(response))

    async def must(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout: float,
        phase: str,
        bucket: int | None = None,
    ) -> Any:
        """Like `ask`, and raises `EngineFailed` for an answer that means failure. Returns the body."""
        answer = await self.ask(method, path, body, timeout=timeout, phase=phase, bucket=bucket)
        if (failure := answer.failure) is not None:
            raise self.failed(path, failure, answer.status, phase=phase, bucket=bucket)
        return answer.data

    def failed(
        self, path: str, failure: str, status: int = 0, *, phase: str, bucket: int | None = None
    ) -> EngineFailed:
        hint = {401: " (set api_key)", 403: " (set api_key)", 404: " (is this the right kind of server?)"}.get(
            status, ""
        )
        return EngineFailed(
            f"{self.name}: {path} failed: {failure}{hint}",
            engine=self.name,
            phase=phase,
            bucket=bucket,
            is_collective=phase == "receive" and looks_collective(failure),
        )

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _connected(self) -> httpx.AsyncClient:
        if self._client is None:
            import httpx

            limits = httpx.Limits(keepalive_expiry=_IDLE_SECONDS)
            self._client = httpx.AsyncClient(
                base_url=self.url,
                headers=self._headers,
                verify=self._verify,
                timeout=None,
                limits=limits,
                trust_env=False,  # a proxy of the environment's must not come between trainer and engine
            )
        return self._client


def _decoded(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text


def _message(data: Any) -> Any:
    if isinstance(data, dict):
        error = data.get("error")
        if isinstance(error, dict) and "message" in error:
            return error["message"]
        return data.get("message") or error or data.get("detail") or data
    return data
