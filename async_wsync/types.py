"""Plain data and the seams between the parts. Nothing here does any work."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from async_wsync import arguments

__all__ = [
    "Base",
    "BucketSpec",
    "Call",
    "EngineInfo",
    "EngineOutcome",
    "EngineState",
    "GroupSpec",
    "Manifest",
    "ParamMeta",
    "PauseMode",
    "Requester",
    "Timeouts",
    "UpdateEvent",
    "UpdateSpec",
    "WireFormat",
]


#: Seconds by which a member's limit lies above the source's for the same wait. Where both were of one length, healthy
#: members that waited for a silent one gave up first, and were blamed.
MEMBER_MARGIN = 5.0


class EngineState(enum.StrEnum):
    """What an engine's weights are, as far as one broadcaster knows."""

    STALE = "stale"  # whole, but not the version we last published
    UPDATING = "updating"  # inside a bracket; may hold a mix
    CURRENT = "current"  # whole, and on a published version
    TORN = "torn"  # may hold a mix, or a whole version nobody published
    LOST = "lost"  # dead, replaced, or silent: out until it is replaced or answers a reset


class PauseMode(enum.StrEnum):
    """What happens to running requests while weights change."""

    ABORT = "abort"  # requests end now, with what they have
    DRAIN = "drain"  # requests finish first
    RECOMPUTE = "recompute"  # requests stay, their cache is dropped and computed again
    KEEP = "keep"  # requests and cache stay; the cache is of the old weights


class WireFormat(enum.StrEnum):
    """How a bucket's bytes lie on the wire."""

    PACKED = "packed"  # ours: small tensors in one aligned flat buffer, large ones from their own storage
    FLATTENED = "flattened_bucket"  # SGLang's: one flat buffer without padding
    PER_TENSOR = "per_tensor"  # one broadcast a tensor, in order


class ParamMeta(NamedTuple):
    """One named tensor as it travels. ``dtype`` is torch's name without the ``torch.`` ("bfloat16").

    A tuple, as a model may have thousands: made, compared and hashed several times as fast as a dataclass.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The ordered tensors of an update.

    ``aliases`` maps further names to a name in ``params`` that shares its storage (tied weights):
    they are not sent, and the engine fills them from their original. ``tied`` does the same for names
    that are in ``params`` themselves: sent in full, and equal to their original.
    """

    params: tuple[ParamMeta, ...]
    aliases: tuple[tuple[str, str], ...] = ()
    tied: tuple[tuple[str, str], ...] = ()

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for meta in self.params:
            digest.update(f"{meta.name}\0{meta.dtype}\0{meta.shape}\n".encode())
        for alias, name in self.aliases:
            digest.update(f"{alias}\0={name}\n".encode())
        for again, name in self.tied:
            digest.update(f"{again}\0=={name}\n".encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Every limit, in seconds: finite, above 0, of a year at most. No wait in this library lacks one.

    ``drain`` bounds how long calls already sent may take to settle once an update has failed or was
    cancelled; ``idle`` how long the source may take to yield its next tensor; ``total`` a whole update.
    """

    connect: float = 60.0
    lock: float = 600.0
    pause: float = 60.0
    flush: float = 60.0
    begin: float = 30.0
    bucket: float = 60.0
    idle: float = 300.0
    end: float = 60.0
    resume: float = 30.0
    drain: float = 30.0
    close: float = 10.0
    total: float = 1800.0

    def __post_init__(self) -> None:
        for f in fields(self):
            arguments.seconds(f"Timeouts.{f.name}", getattr(self, f.name))

    def scaled(self, factor: float) -> Timeouts:
        """All limits times ``factor``: above 1 for slow links, below for tests."""
        arguments.factor("factor", factor)
        return replace(self, **{f.name: getattr(self, f.name) * factor for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """All a member needs to join an update group. The source is rank 0.

    ``epoch`` rises with every group that a source builds, and stands in ``name``: a group is never
    repaired, only replaced, and a stale source talks to a group that no longer exists.
    ``timeout`` bounds every collective, ``connect_timeout`` the rendezvous, both in seconds. The source, which knows
    who is missing, must come to its decision first: its own limit for a collective is below ``timeout``, and members
    wait for each other until ``join_timeout``.
    """

    name: str
    backend: str
    master_address: str
    master_port: int
    world_size: int
    epoch: int
    timeout: float
    connect_timeout: float

    @property
    def join_timeout(self) -> float:
        """Seconds that a member waits for the source and the others: clearly longer than ``connect_timeout``."""
        return self.connect_timeout + MEMBER_MARGIN


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSpec:
    """One bucket: these tensors, in this order, sent together."""

    index: int
    params: tuple[ParamMeta, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What an engine was brought to last: ``version``, and the update that brought it.

    Two sources may give the same version to different weights; an ``update_id`` is given once. None: any will do.
    """

    version: int
    update_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSpec:
    """What an update will send, agreed with every engine before the first byte.

    ``strict``: the manifest must name every tensor of the engine. Not strict: the update may be a part. ``base`` is
    what the engine must hold then, whole, so that it holds all of the new version afterwards; None where the source
    knows of nothing, so that only a manifest that covers the engine will do.
    """

    update_id: str
    version: int
    manifest: Manifest
    buckets: tuple[BucketSpec, ...]
    group: str
    strict: bool = True
    base: Base | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What travels with every engine call: who calls, under which fence, and for how long it will wait."""

    source: str
    fence: int
    timeout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """An engine's answer to hello. ``incarnation`` changes whenever its process does.

    ``version`` and ``update_id``: what was published last, None where nothing was or the engine can't tell.
    """

    incarnation: str
    version: int | None = None
    state: EngineState = EngineState.STALE
    device: str = "cpu"
    host: str = ""
    pid: int = 0
    notes: tuple[str, ...] = ()
    update_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutcome:
    """One engine at the end of an update. ``last_bucket``: highest acknowledged index, None for none."""

    engine: str
    state: EngineState
    version: int | None = None
    last_bucket: int | None = None
    error: str | None = None
    phase: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateEvent:
    """Something happened. ``kind`` is one of: update_started, connected, lock_acquired, paused, flushed, begun,
    bucket_submitted, bucket_done, ended, published, resumed, engine_torn, engine_lost, update_finished,
    update_failed. ``at`` is time.monotonic()."""

    kind: str
    version: int
    at: float
    engine: str | None = None
    bucket: int | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Requester:
    """Who asks for the lock. ``client`` names the process that will use the claim."""

    label: str = ""
    host: str = ""
    pid: int = 0
    actor_id: str = ""
    client: str = ""
