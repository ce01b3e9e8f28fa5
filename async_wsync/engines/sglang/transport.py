"""What `SGLangEngine` needs of HTTP and of Ray: one call, and the facts that each of them finds out in its own way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from async_wsync.engines.replies import Answer
from async_wsync.types import Call

__all__ = ["UNKNOWN", "Process", "Transport"]

#: The incarnation of a process that could not be told from another one.
UNKNOWN = "unknown"


class Process(NamedTuple):
    """The process behind an engine. ``facts``: what it says of its set-up, empty if it can't be asked."""

    incarnation: str
    facts: Mapping[str, Any] = {}
    device: str = "cpu"
    host: str = ""


class Transport(Protocol):
    """Calls have the names of SGLang's HTTP routes. ``name`` is the engine's, for messages."""

    name: str

    def has(self, method: str) -> bool:
        """False if the engine is known to lack this call. True is no promise: an HTTP server shows it by its 404."""
        ...

    async def ask(
        self, method: str, body: dict[str, Any] | None, call: Call, *, phase: str, bucket: int | None = None
    ) -> Answer:
        """Make one call, once. Returns any answer, a failure too.

        Raises `EngineDied`, `EngineTimeout` after ``call.timeout`` seconds, and `EngineRejected` (`EngineFailed` for a
        bucket) if the engine can't be called with these arguments: nothing was sent then.
        """
        ...

    async def model(self, call: Call, *, phase: str) -> Mapping[str, Any]:
        """What the engine says of its model: ``weight_version``, maybe ``model_path``. Empty if it can't say."""
        ...

    async def process(self, call: Call) -> Process: ...
    async def aclose(self) -> None: ...
