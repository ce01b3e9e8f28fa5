"""What a source and our backend inside vLLM say to each other: JSON text, one object each way.

vLLM's control plane passes strings and plain containers between processes, over HTTP as well, and unpickling what
came over HTTP would hand the server to whoever can reach it. A request is ``{"verb", "id", "call", ...}``; a reply
``{"done", "value", "failure", ...}`` as `Reply` says.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from async_wsync.engines.failure import Failure
from async_wsync.types import Call, GroupSpec

__all__ = [
    "UNSEEN_REPLICA",
    "Reply",
    "encode",
]

UNSEEN_REPLICA = "async_wsync-reply:"
"""Before the answer of a data parallel replica that has to travel as an exception."""


def encode(verb: str, call: Call, **fields: Any) -> str:
    """A request as text. ``fields`` are plain values, or a `GroupSpec`."""
    plain = {k: asdict(v) if isinstance(v, GroupSpec) else v for k, v in fields.items()}
    return json.dumps({"verb": verb, "call": asdict(call), **plain})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One rank's answer: ``done`` with a ``value`` or a ``failure``, or still under way."""

    done: bool = True
    value: Any = None
    failure: Failure | None = None
    state: str = ""
    incarnation: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return fields | {"failure": None if self.failure is None else self.failure.to_json()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Reply:
        failure = fields["failure"]
        return cls(**{**fields, "failure": None if failure is None else Failure.from_json(failure)})
