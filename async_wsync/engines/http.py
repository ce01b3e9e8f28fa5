"""Bounded JSON calls to an engine's HTTP server, with httpx's errors turned into ours."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any

from async_wsync import arguments
from async_wsync.engines.replies import Answer, failure_in_http, short
from async_wsync.errors import EngineDied, EngineFailed, EngineTimeout
from async_wsync.phases import field_of, not_within

if TYPE_CHECKING:
    import httpx

__all__ = ["JsonServer"]

#: Servers close idle connections after 5 s (uvicorn's default). A request on one just closed would look like a death.
_IDLE_SECONDS = 2.0


class JsonServer:
    """One server at ``url``. ``name``: the engine's, for messages. ``verify``: as httpx takes it, for example an
    ``ssl.SSLContext`` with your own CA."""

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
        """Make one request, once, and return any answer, a failure too.

        Raises `EngineDied` if nobody listens or the connection breaks, `EngineTimeout` after ``timeout`` seconds, and
        `EngineFailed` for a URL that httpx can't use.
        """
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
        data = _decoded(response)
        status = response.status_code
        return Answer(method=path, status=status, data=data, failure=failure_in_http(status, data), **facts)

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
                trust_env=False,  # no proxy of the environment between trainer and engine
            )
        return self._client


def _decoded(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text
