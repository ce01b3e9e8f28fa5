"""What an engine's tensors hold: which version, and which of them may be a mix.

Pure state; `WeightReceiver` guards it with its lock. The rule that keeps torn weights from serving:
a tensor becomes *suspect* before the first byte of an update can reach it, and stops being suspect only when
a version is published that had all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from async_wsync.engines.rejection import base_missing
from async_wsync.errors import EngineFailed, EngineRejected
from async_wsync.types import Base, BucketSpec, EngineState, UpdateSpec

__all__ = ["Part", "Session", "WeightState"]

_SHOWN = 5


@dataclass(eq=False)
class Part:
    """What one source sends within an update."""

    source: str
    update: UpdateSpec
    arrived: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.buckets: dict[int, BucketSpec] = {b.index: b for b in self.update.buckets}

    @property
    def missing(self) -> list[int]:
        return sorted(self.buckets.keys() - self.arrived)

    def names(self) -> Iterable[str]:
        yield from (meta.name for meta in self.update.manifest.params)
        yield from (alias for alias, _ in self.update.manifest.aliases)


@dataclass(eq=False)
class Session:
    """One open update: a part for each source that takes part in it."""

    update_id: str
    version: int
    targets: Mapping[str, torch.Tensor]
    parts: dict[str, Part] = field(default_factory=dict)
    ended: bool = False

    def names(self) -> set[str]:
        """What all parts send together."""
        return {name for part in self.parts.values() for name in part.names()}


class WeightState:
    """The state of one engine's weights."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.update_id: str | None = None  # of the update that left ``version`` here
        self.session: Session | None = None
        self._published_fence: int | None = None
        self._suspects: set[str] = set()

    @property
    def state(self) -> EngineState:
        if self.session is not None and not self.session.ended:
            return EngineState.UPDATING
        if self._suspects:
            return EngineState.TORN
        return EngineState.STALE if self.version is None else EngineState.CURRENT

    def accepts_part(self, update_id: str, source: str) -> bool:
        """Whether a begin adds a part to the open session, rather than opening a new one."""
        s = self.session
        return s is not None and not s.ended and s.update_id == update_id and source not in s.parts

    def begin(self, update: UpdateSpec, source: str, targets: Mapping[str, torch.Tensor]) -> Part:
        if not self.accepts_part(update.update_id, source):
            self.session = Session(update_id=update.update_id, version=update.version, targets=targets)
        assert self.session is not None
        part = Part(source=source, update=update)
        self.session.parts[source] = part
        return part

    def part(self, update_id: str, source: str) -> tuple[Session, Part]:
        """The part of ``source`` in the open session; EngineFailed if there is none."""
        session = self._open(update_id)
        if source not in session.parts:
            raise EngineFailed(f"{source!r} has begun no part of update {update_id}")
        return session, session.parts[source]

    def _open(self, update_id: str) -> Session:
        session = self.session
        if session is None or session.update_id != update_id:
            now = "none is" if session is None else f"{session.update_id} is"
            raise EngineFailed(
                f"update {update_id} is not open here ({now}): it was broken off, or never begun", is_collective=True
            )
        return session

    def check_open(self, session: Session) -> None:
        """EngineFailed if ``session`` was broken off meanwhile."""
        if self.session is not session:
            raise EngineFailed(f"update {session.update_id} was broken off", is_collective=True)

    def suspect(self, names: Iterable[str]) -> None:
        """From now on, and until a version with all of them is published, ``names`` may hold a mix."""
        self._suspects.update(names)

    def break_off(self, session: Session | None = None) -> None:
        """Close the open session without an end (only if it is ``session``, where given)."""
        if session is None or self.session is session:
            self.session = None

    @property
    def suspects(self) -> frozenset[str]:
        return frozenset(self._suspects)

    def lacks(self, base: Base | None, covered: Iterable[str]) -> str:
        """Why an update of ``covered`` on ``base`` would not make these weights whole; empty where it would."""
        if unhealed := self._unhealed(covered):
            return f"it is torn, {', '.join(unhealed[:_SHOWN])} may hold a mix"
        if base is None:
            has = "no version" if self.version is None else f"version {self.version}"
            return f"it holds {has}, not one that this update builds on"
        if base.version == self.version:
            if base.update_id in (None, self.update_id):
                return ""
            return f"its version {base.version} came from another update than the one that this one builds on"
        return f"it holds version {self.version}, and the update builds on version {base.version}"

    def check_base(self, base: Base | None, covered: Iterable[str], left_out: Sequence[str]) -> None:
        """`BaseMissing` unless these weights are whole after an update on ``base`` that leaves ``left_out`` out."""
        if why := self.lacks(base, covered):
            raise base_missing(why, left_out, holds=self.version, torn=bool(self._suspects))

    def _unhealed(self, covered: Iterable[str]) -> list[str]:
        return sorted(self._suspects.difference(covered))

    def check_complete(self, update_id: str, covered: Callable[[set[str]], Iterable[str]] = set) -> Session:
        """The session, if all of its buckets are here and it heals every suspect; EngineFailed otherwise.

        ``covered``: the names that hold new values once the given ones have been sent.
        """
        session = self._open(update_id)
        for part in session.parts.values():
            if part.missing:
                raise EngineFailed(f"buckets {part.missing[:_SHOWN]} of {part.source!r} have not arrived")
        if unhealed := self._unhealed(covered(session.names())):
            raise EngineRejected(
                f"torn tensors are not part of this update, send all of the model: {unhealed[:_SHOWN]}",
                missing=tuple(unhealed),
            )
        return session

    def end(self, session: Session) -> None:
        self.check_open(session)
        session.ended = True

    def publish(self, version: int, fence: int) -> None:
        """The ended session becomes ``version``. Repeating the last publish is fine."""
        session = self.session
        if session is None and version == self.version and not self._suspects:
            return
        if session is None or not session.ended or session.version != version:
            raise EngineFailed(f"version {version} can't be published here: no update to it has ended")
        # A new holder of the lock may be a trainer that went back to an older checkpoint.
        if self.version is not None and version < self.version and fence == self._published_fence:
            raise EngineFailed(f"version {version} is older than {self.version}, which is published")
        self.version, self.update_id = version, session.update_id
        self._published_fence = fence
        self._suspects.clear()
        self.session = None
