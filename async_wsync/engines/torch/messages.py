"""What a source and a `WeightReceiver` say to each other: one request type, one reply type.

Engines may be single-threaded actors, so no request blocks. A verb that takes longer is started and
answered "not done", and then asked for with `Poll` under the id of its request. A request that arrives
twice is not run twice: the second is answered as a poll.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from async_wsync.engines.failure import Failure
from async_wsync.types import Call, EngineState, GroupSpec, PauseMode

__all__ = [
    "Abort",
    "Begin",
    "Check",
    "Checksums",
    "ControlAddress",
    "End",
    "Flush",
    "Hello",
    "Join",
    "Leave",
    "Pause",
    "Poll",
    "Publish",
    "Receive",
    "Reply",
    "Request",
    "Reset",
    "Resume",
    "Verb",
]


@dataclass(frozen=True, slots=True)
class Verb:
    """What is asked. Subclasses hold the arguments."""


@dataclass(frozen=True, slots=True)
class Hello(Verb):
    """Who are you? Answered with an `EngineInfo`, under any fence.

    ``control``: the key under which the engine publishes where it takes control connections; "" for none.
    """

    control: str = ""


@dataclass(frozen=True, slots=True)
class Poll(Verb):
    """What became of the request with this id?"""

    request_id: str


@dataclass(frozen=True, slots=True)
class Join(Verb):
    """Become ``rank`` of the update group."""

    group: GroupSpec
    rank: int


@dataclass(frozen=True, slots=True)
class Leave(Verb):
    """Close the update group; unknown groups are left already."""

    group: str


@dataclass(frozen=True, slots=True)
class Check(Verb):
    """Would you take this update? ``update`` is packed by `pack_update`."""

    update: bytes


@dataclass(frozen=True, slots=True)
class Pause(Verb):
    mode: PauseMode


@dataclass(frozen=True, slots=True)
class Flush(Verb):
    """Drop the cache, or refuse for now."""


@dataclass(frozen=True, slots=True)
class Begin(Verb):
    """Open the update, or add this source's part to it. ``update`` is packed by `pack_update`."""

    update: bytes


@dataclass(frozen=True, slots=True)
class Receive(Verb):
    """Receive the bucket ``index`` of this source's part; done once it is in the parameters."""

    update_id: str
    index: int


@dataclass(frozen=True, slots=True)
class End(Verb):
    """Nothing more comes; refused if something is missing."""

    update_id: str


@dataclass(frozen=True, slots=True)
class Publish(Verb):
    """What the ended update left here is ``version``."""

    version: int


@dataclass(frozen=True, slots=True)
class Resume(Verb):
    """Generate again; refused by an engine that may hold a mix of versions."""


@dataclass(frozen=True, slots=True)
class Abort(Verb):
    """Break off what the group is doing; done once the receive thread has left the collective."""

    group: str


@dataclass(frozen=True, slots=True)
class Reset(Verb):
    """Close whatever update is open; the engine stays paused."""


@dataclass(frozen=True, slots=True)
class Checksums(Verb):
    """The digest of each tensor by name, as `pack_checksums` packs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """``id`` is minted by the caller. ``incarnation``: whom it means to speak to; None for whoever answers."""

    id: str
    call: Call
    verb: Verb
    incarnation: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlAddress:
    """Where one process of an engine takes control connections, and the secret that both ends must know."""

    host: str
    port: int
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """``done`` with a ``value`` or a ``failure``, or still running. The rest describes the engine right now.

    ``control``: where the engine takes control connections, in answers to a hello that asks for one.
    """

    incarnation: str
    done: bool
    value: Any = None
    failure: Failure | None = None
    state: EngineState = EngineState.STALE
    version: int | None = None
    control: ControlAddress | None = None
