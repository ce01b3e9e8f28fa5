"""What a source and our backend inside vLLM say to each other: JSON text, one object each way.

vLLM's control plane passes strings and plain containers between processes, over HTTP as well, and unpickling what
came over HTTP would hand the server to whoever can reach it. A request is ``{"verb", "id", "call", ...}``; a reply
``{"done", "value", "failure", ...}`` as `Reply` says.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from async_wsync.engines.rejection import Findings
from async_wsync.engines.replies import looks_collective
from async_wsync.errors import EngineBusy, EngineFailed, EngineRejected, StaleCall, declared_facts
from async_wsync.types import Base, BucketSpec, Call, GroupSpec, Manifest, ParamMeta, UpdateSpec

__all__ = [
    "UNSEEN_REPLICA",
    "Findings",
    "Reply",
    "decode_call",
    "decode_group",
    "decode_update",
    "encode",
    "encode_update",
    "failure_of",
    "rebuild",
]

UNSEEN_REPLICA = "async_wsync-reply:"
"""Before the answer of a data parallel replica that has to travel as an exception."""


def encode(verb: str, call: Call, **fields: Any) -> str:
    """A request as text. ``fields`` are plain values, or a `GroupSpec`."""
    plain = {k: asdict(v) if isinstance(v, GroupSpec) else v for k, v in fields.items()}
    return json.dumps({"verb": verb, "call": asdict(call), **plain})


def decode_call(request: Mapping[str, Any]) -> Call:
    return Call(**request["call"])


def decode_group(fields: Mapping[str, Any]) -> GroupSpec:
    return GroupSpec(**fields)


def encode_update(update: UpdateSpec) -> dict[str, Any]:
    """As columns; a bucket refers to the tensors of the manifest by position. ValueError if it has another one."""
    params = update.manifest.params
    position = {meta.name: i for i, meta in enumerate(params)}
    buckets = []
    for bucket in update.buckets:
        places = [position.get(meta.name, -1) for meta in bucket.params]
        if any(place < 0 or params[place] != meta for place, meta in zip(places, bucket.params, strict=True)):
            raise ValueError(f"bucket {bucket.index} has a tensor that the manifest has not")
        buckets.append({"index": bucket.index, "nbytes": bucket.nbytes, "params": places})
    return {
        "update_id": update.update_id,
        "version": update.version,
        "group": update.group,
        "strict": update.strict,
        "base": None if update.base is None else asdict(update.base),
        "names": [m.name for m in params],
        "dtypes": [m.dtype for m in params],
        "shapes": [list(m.shape) for m in params],
        "aliases": [list(pair) for pair in update.manifest.aliases],
        "tied": [list(pair) for pair in update.manifest.tied],
        "buckets": buckets,
    }


def decode_update(fields: Mapping[str, Any]) -> UpdateSpec:
    columns = zip(fields["names"], fields["dtypes"], fields["shapes"], strict=True)
    params = tuple(ParamMeta(name=n, dtype=d, shape=tuple(s)) for n, d, s in columns)
    aliases = tuple((alias, name) for alias, name in fields["aliases"])
    tied = tuple((again, name) for again, name in fields["tied"])
    buckets = tuple(
        BucketSpec(index=b["index"], nbytes=b["nbytes"], params=tuple(params[i] for i in b["params"]))
        for b in fields["buckets"]
    )
    return UpdateSpec(
        update_id=fields["update_id"],
        version=fields["version"],
        group=fields["group"],
        strict=fields["strict"],
        base=None if fields["base"] is None else Base(**fields["base"]),
        manifest=Manifest(params=params, aliases=aliases, tied=tied),
        buckets=buckets,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One rank's answer: ``done`` with a ``value`` or a ``failure``, or still at it."""

    done: bool = True
    value: Any = None
    failure: Mapping[str, Any] | None = None
    state: str = ""
    incarnation: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Reply:
        return cls(**fields)


# -------------------------------------------------------------------------------- errors

_KINDS: dict[str, type[EngineFailed]] = {
    "EngineBusy": EngineBusy,
    "EngineRejected": EngineRejected,
    "StaleFence": StaleCall,
}


def failure_of(error: BaseException) -> dict[str, Any]:
    """An exception as plain values."""
    facts = {k: v for k, v in vars(error).items() if isinstance(v, str | int | float | tuple) and k[:1] != "_"}
    return {
        "kind": type(error).__name__,
        "text": str(error),
        "facts": facts,
        "is_collective": looks_collective(error) and not isinstance(error, EngineRejected),
        "trace": "".join(traceback.format_exception(error)),
    }


def rebuild(failure: Mapping[str, Any], *, engine: str, phase: str, bucket: int | None = None) -> EngineFailed:
    """The error to raise at the source. The traceback inside vLLM is a note on it."""
    kind = failure["kind"]
    cls = _KINDS.get(kind, EngineFailed)
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in failure["facts"].items()}
    facts = {name: value for name, value in given.items() if name in declared_facts(cls)}
    where = phase if bucket is None else f"{phase} {bucket}"
    what = failure["text"] if cls is not EngineFailed else f"{kind}: {failure['text']}"
    facts |= {"engine": engine, "phase": phase, "bucket": bucket, "is_collective": failure["is_collective"]}
    error = cls(f"{engine}: {where}: {what}", **facts)
    error.add_note(f"Traceback inside vLLM:\n{failure['trace']}")
    return error
