"""Calls to an SGLang server over HTTP."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from async_wsync.engines.http import JsonServer
from async_wsync.engines.replies import Answer
from async_wsync.engines.sglang.transport import Process
from async_wsync.types import Call

__all__ = ["HttpTransport"]

_READS = frozenset({"model_info", "server_info"})  # the routes that are asked with GET
_HINTS = {401: "set api_key", 403: "set api_key", 404: "is this the right kind of server?"}


class HttpTransport:
    """A `Transport` to the server at ``url``."""

    def __init__(self, url: str, *, name: str, api_key: str | None, verify: ssl.SSLContext | bool) -> None:
        self.name = name
        self._server = JsonServer(url, name=name, api_key=api_key, verify=verify)

    def has(self, method: str) -> bool:
        return True

    async def ask(
        self, method: str, body: dict[str, Any] | None, call: Call, *, phase: str, bucket: int | None = None
    ) -> Answer:
        verb = "GET" if method in _READS else "POST"
        answer = await self._server.ask(verb, f"/{method}", body, timeout=call.timeout, phase=phase, bucket=bucket)
        if (hint := _HINTS.get(answer.status)) is not None:
            return replace(answer, failure=f"{answer.failure} ({hint})")
        return answer

    async def model(self, call: Call, *, phase: str) -> Mapping[str, Any]:
        return await self._read("model_info", call, phase=phase)

    async def process(self, call: Call) -> Process:
        facts = await self._read("server_info", call, phase="hello")
        started = (facts.get("random_seed"), str(facts.get("startup_time")), facts.get("port"), facts.get("version"))
        return Process(
            # SGLang has no id for its process; its seed and its start-up times are as good as one.
            incarnation=hashlib.blake2b(repr(started).encode(), digest_size=8).hexdigest(),
            facts=facts,
            device=str(facts.get("device", "cuda")),
            host=self._server.url,
        )

    async def _read(self, route: str, call: Call, *, phase: str) -> dict[str, Any]:
        answer = (await self.ask(route, None, call, phase=phase)).raise_failure()
        if not answer.data or not isinstance(answer.data, dict):
            raise answer.failed("the answer is no JSON object with facts; is this an SGLang server?")
        return answer.data

    async def aclose(self) -> None:
        await self._server.aclose()
