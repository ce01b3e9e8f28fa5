"""What one broadcaster knows of each engine, and which changes of it make sense.

Pure: no clock, no I/O. The rule that matters is that an engine which may hold a mix of old and
new weights (``torn``) has only one way back to ``current``: through a whole update.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from async_wsync.types import Base, EngineInfo, EngineOutcome, EngineState

__all__ = ["EngineRecord", "Roster"]

_S = EngineState
_MOVES: dict[EngineState, frozenset[EngineState]] = {
    _S.STALE: frozenset({_S.UPDATING, _S.LOST, _S.TORN}),
    _S.CURRENT: frozenset({_S.UPDATING, _S.STALE, _S.LOST, _S.TORN}),
    _S.UPDATING: frozenset({_S.CURRENT, _S.STALE, _S.TORN, _S.LOST}),
    _S.TORN: frozenset({_S.UPDATING, _S.LOST, _S.STALE}),
    _S.LOST: frozenset({_S.STALE, _S.TORN}),
}


@dataclass(slots=True)
class EngineRecord:
    """One engine. ``touched``: a byte of the running update may have reached it.

    ``left_out``: the running update goes on without it, which has "dropped" it for a failure, or left it "behind", as
    it lacks what a partial update builds on.
    """

    name: str
    state: EngineState = EngineState.STALE
    version: int | None = None
    update_id: str | None = None  # of the update that brought it there, where that was one of ours
    incarnation: str | None = None
    last_bucket: int | None = None
    paused: bool = False
    touched: bool = False
    needs_reset: bool = True
    left_out: Literal["dropped", "behind"] | None = None
    error: str | None = None
    phase: str | None = None
    notes: list[str] = field(default_factory=list)
    _before: EngineState = EngineState.STALE

    def move(self, to: EngineState) -> None:
        assert to is self.state or to in _MOVES[self.state], f"{self.name}: {self.state} -> {to}"
        self.state = to

    def answered_hello(self, info: EngineInfo) -> bool:
        """Take in a hello; True where this is another incarnation than the one we knew.

        What an engine says of itself can only lower our opinion of it: it may be torn by another
        source, but it is current only where we, or it, published a version.
        """
        replaced = self.incarnation is not None and self.incarnation != info.incarnation
        first = self.incarnation is None
        self.incarnation = info.incarnation
        if replaced or first or self.state is _S.LOST:
            self.state = _S.TORN if info.state in (_S.TORN, _S.UPDATING) else _S.STALE
            self.version = info.version if self.state is _S.STALE else None
            self.update_id = None
            self.paused = False if replaced else self.paused
            self.needs_reset = True
        elif info.state is _S.TORN or self._was_brought_elsewhere(info):
            self.doubt(torn=info.state is _S.TORN, holds=info.version)
        elif self.state is _S.STALE and info.version is not None:
            self.version = info.version
        return replaced

    def _was_brought_elsewhere(self, info: EngineInfo) -> bool:
        """Another source published here since we did. None tells nothing: not every engine knows."""
        if self.state is not _S.CURRENT:
            return False
        return info.version not in (None, self.version) or info.update_id not in (None, self.update_id)

    def doubt(self, *, torn: bool, holds: int | None) -> None:
        """The engine says that it is torn, or not on the version we brought it to but on ``holds``."""
        if not self.whole:
            return
        self.move(_S.TORN if torn else _S.STALE)
        self.version, self.update_id = None if torn else holds, None

    def begin(self) -> None:
        self._before = self.state
        self.touched = False
        self.last_bucket = self.error = self.phase = None
        self.move(_S.UPDATING)

    def publish(self, version: int, update_id: str) -> None:
        self.move(_S.CURRENT)
        self.version, self.update_id = version, update_id

    def fail(self) -> None:
        """The update ended without this engine publishing it."""
        if self.state is not _S.UPDATING:
            return
        if self.touched:
            self.move(_S.TORN)
            self.version = self.update_id = None
        else:
            self.state = self._before

    def lose(self) -> None:
        if self.state is not _S.LOST:
            self.move(_S.LOST)
        self.version = self.update_id = None

    @property
    def whole(self) -> bool:
        """Holds one version, not a mix."""
        return self.state in (_S.CURRENT, _S.STALE)

    @property
    def base(self) -> Base | None:
        """What it holds, whole, by an update of ours."""
        if self.state is not _S.CURRENT or self.version is None:
            return None
        return Base(version=self.version, update_id=self.update_id)

    def outcome(self) -> EngineOutcome:
        return EngineOutcome(
            engine=self.name,
            state=self.state,
            version=self.version,
            last_bucket=self.last_bucket,
            error=self.error,
            phase=self.phase,
            notes=tuple(self.notes),
        )


class Roster:
    """The records of a fleet, by engine name."""

    def __init__(self) -> None:
        self._records: dict[str, EngineRecord] = {}

    def add(self, name: str) -> EngineRecord:
        assert name not in self._records, name
        self._records[name] = EngineRecord(name)
        return self._records[name]

    def remove(self, name: str) -> None:
        del self._records[name]

    def arrange(self, names: Iterable[str]) -> None:
        """Put the records into this order; it names all of them."""
        records = {name: self._records[name] for name in names}
        assert records.keys() == self._records.keys()
        self._records = records

    def __getitem__(self, name: str) -> EngineRecord:
        return self._records[name]

    def bases(self, version: int | None, names: Iterable[str], *, by_us: bool = True) -> dict[str, Base]:
        """Which of ``names`` hold ``version``: as we brought it to them, or as they say themselves."""
        if version is None:
            return {}
        held = {n: self._records[n] for n in names if self._records[n].version == version}
        if not by_us:
            return {n: Base(version=version, update_id=None) for n in held}
        return {n: base for n, record in held.items() if (base := record.base) is not None}

    def start_update(self) -> None:
        """No engine is left out of an update that begins."""
        for record in self._records.values():
            record.left_out = None

    def drop(self, names: Iterable[str]) -> None:
        """The running update goes on without these, which have failed."""
        for name in names:
            self._records[name].left_out = "dropped"

    def left_out(self, how: Literal["dropped", "behind"]) -> tuple[str, ...]:
        return tuple(name for name, record in self._records.items() if record.left_out == how)

    def is_lost(self, name: str) -> bool:
        return name in self._records and self._records[name].state is _S.LOST

    def states(self) -> dict[str, EngineState]:
        return {name: record.state for name, record in self._records.items()}

    def current(self) -> tuple[str, ...]:
        return tuple(name for name, record in self._records.items() if record.state is _S.CURRENT)

    def outcomes(self, names: Iterable[str] | None = None) -> dict[str, EngineOutcome]:
        return {n: self._records[n].outcome() for n in (self._records if names is None else names)}

    def published(self, version: int, targets: Iterable[str], *, update_id: str) -> None:
        """``targets`` are on ``version``; whoever was current before is stale now."""
        targets = set(targets)
        for name, record in self._records.items():
            if name in targets:
                record.publish(version, update_id)
            elif record.state is _S.CURRENT and record.version != version:
                record.move(_S.STALE)
