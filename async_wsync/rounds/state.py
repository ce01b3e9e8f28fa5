"""Several sources, one update: who is there, who has sent, and whether it still holds. Pure.

    gathering -> opening -> sending -> closing -> done
         \\----------\\----------\\---------\\----> failed

All sources of a round move together. The first to join leads: it alone opens and closes the bracket. Whatever goes
wrong for one ends the round for all. ``now`` is a monotonic time in seconds.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

__all__ = ["SUCCESSION", "Phase", "RoundState", "View"]

SUCCESSION = 1.5
"""Seconds that a gathering round waits for the successor of a source whose process ended."""

_REMEMBERED = 8  # rounds, and versions that a source will not come for


class Phase(enum.StrEnum):
    GATHERING = "gathering"  # sources join
    OPENING = "opening"  # the leader pauses the engines and begins
    SENDING = "sending"  # every source sends its part
    CLOSING = "closing"  # the leader ends, publishes and resumes
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A round as one of its sources sees it. ``waiting_for``: the sources that the phase still lacks.

    ``opened``: sources may have sent, however it ended.
    """

    round_id: str
    version: int
    phase: Phase
    leader: str
    opened: bool = False
    waiting_for: tuple[str, ...] = ()
    failed_source: str = ""
    failure: str = ""


@dataclass(slots=True)
class _Round:
    round_id: str
    version: int
    engines: tuple[str, ...]
    began: float
    phase: Phase = Phase.GATHERING
    sources: dict[str, float] = field(default_factory=dict)  # name to when it was last heard
    clients: dict[str, str] = field(default_factory=dict)  # source to its process
    members: dict[str, str] = field(default_factory=dict)  # source to the one member that speaks for it
    versions: set[int] = field(default_factory=set)  # also those that were refused
    refused: set[str] = field(default_factory=set)  # sources that were told why they, or others, do not fit
    opened: bool = False
    sent: set[str] = field(default_factory=set)
    failed_source: str = ""
    failure: str = ""

    @property
    def over(self) -> bool:
        return self.phase in (Phase.DONE, Phase.FAILED)

    @property
    def leader(self) -> str:
        return next(iter(self.sources), "")


@dataclass(slots=True)
class _Absence:
    """Sources that will not come for a version, by their reasons, and who has been told."""

    reasons: dict[str, str] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)


class RoundState:
    """One round after another, among ``num_sources`` sources.

    A source that is silent for ``silence`` seconds fails its round.
    """

    def __init__(self, *, num_sources: int, silence: float, prefix: str = "round") -> None:
        if num_sources < 1:
            raise ValueError(f"num_sources must be at least 1, got {num_sources}")
        self._num_sources = num_sources
        self._silence = silence
        self._prefix = prefix  # tells the rounds of one server from those of the next
        self._rounds: dict[str, _Round] = {}
        self._count = 0
        self._speaks: dict[str, str] = {}  # source to the process that spoke for it last
        self._dead: dict[str, tuple[float, str]] = {}  # sources whose process ended, until another speaks for them
        self._absences: dict[int, _Absence] = {}  # by version

    def join(
        self,
        source: str,
        client: str,
        *,
        version: int,
        engines: tuple[str, ...],
        now: float,
        member: str = "",
        num_sources: int | None = None,
    ) -> View:
        """Take part in the next update; repeatable. ``member`` tells apart two that call themselves ``source``.

        A source that does not fit those already there is answered by a round that failed, and so is everybody else:
        their own too, as long as nothing was sent, and whoever of that round comes only later.
        """
        if (absent := self._told_of_absence(source, version)) is not None:
            return absent
        current = self._current()
        if current is not None and self._comes_late(current, source, version):
            current.refused.add(source)
            return self._view(current)
        if current is None or current.over:
            self._count += 1
            current = _Round(f"{self._prefix}-{self._count}", version, engines, now, versions={version})
            self._rounds[current.round_id] = current
            self._forget()
        why = self._misfit(current, source, member, version, engines, num_sources)
        if why:
            return self._refuse(current, source, version, why)
        current.sources[source] = now
        current.clients[source] = client
        current.members[source] = member
        self._speaks[source] = client
        self._dead.pop(source, None)
        if len(current.sources) == self._num_sources and current.phase is Phase.GATHERING:
            current.phase = Phase.OPENING
        return self.view(current.round_id, source, now=now)

    def _misfit(
        self, current: _Round, source: str, member: str, version: int, engines: tuple[str, ...], num_sources: int | None
    ) -> str:
        """Why this source can't take part; empty where it can."""
        if num_sources is not None and num_sources != self._num_sources:
            return f"source {source!r} made the round for {num_sources} sources, but it exists for {self._num_sources}"
        known = source in current.sources
        if current.phase is not Phase.GATHERING and not (known and current.members[source] == member):
            return (
                f"source {source!r} comes to {current.round_id}, which already runs with {', '.join(current.sources)}: "
                f"more than {self._num_sources} sources, two of one name, or one that was replaced too early; "
                "try again once it is over"
            )
        if version != current.version:
            return f"source {source!r} brings version {version}, but {current.leader!r} version {current.version}"
        if sorted(engines) != sorted(current.engines):
            return f"source {source!r} sends to {sorted(engines)}, but {current.leader!r} to {sorted(current.engines)}"
        return ""

    def _refuse(self, current: _Round, source: str, version: int, why: str) -> View:
        if current.opened:
            # What it sends is complete without this source: its parts were checked together.
            return replace(self._view(current), phase=Phase.FAILED, failed_source=source, failure=why)
        self._fail(current, source, why)
        current.versions.add(version)
        current.refused.add(source)
        return self._view(current)

    def _comes_late(self, current: _Round, source: str, version: int) -> bool:
        """Whether this source belongs to a round that failed, before it came, because its sources do not fit."""
        told = current.refused | current.sources.keys()
        return (
            bool(current.refused)
            and source not in told
            and len(told) < self._num_sources
            and version in current.versions
        )

    def spoke(self, round_id: str, source: str, member: str) -> None:
        """``member`` speaks for ``source``. Where another one does too, some source is missing, so nobody goes on.

        Told only once both have spoken: a dead source's successor may come before its death is noticed.
        """
        current = self._rounds.get(round_id)
        if current is not None and not current.over and current.members.get(source, member) != member:
            self._fail(current, source, f"two sources call themselves {source!r}; each needs a name of its own")

    def leave(self, source: str, member: str, why: str) -> View | None:
        """``member`` leaves the round that it may have joined; that round, or None where it never did."""
        current = next((r for r in reversed(self._rounds.values()) if r.members.get(source) == member), None)
        if current is None:
            return None
        if not current.over:
            self._fail(current, source, why)
        return self._view(current)

    def absent(self, source: str, *, version: int, why: str) -> None:
        """``source`` failed before it could join, and will not come for ``version``; repeatable.

        The round that waits for it fails. Who joins for that version only later is answered so too, once, as long as
        ``source`` has not come after all.
        """
        current = self._current()
        told: set[str] = set()
        if current is not None and version in current.versions:
            known = current.refused.union(current.sources)
            if not current.over and (source in known or current.phase is not Phase.GATHERING):
                return  # another member speaks for it, or the round is complete without it
            if not current.over:
                self._fail(current, source, why)
            if source not in known:  # else they know of an earlier try only
                told = known
        absence = self._absences.setdefault(version, _Absence())
        absence.reasons.setdefault(source, why)
        absence.told |= told
        self._forget_absence(version)

    def _told_of_absence(self, source: str, version: int) -> View | None:
        """What a source that comes for ``version`` is to know first: that another will not."""
        absence = self._absences.get(version)
        if absence is None:
            return None
        absence.reasons.pop(source, None)
        news = absence.reasons and source not in absence.told
        absence.told.add(source)
        missing, why = next(iter(absence.reasons.items()), ("", ""))
        self._forget_absence(version)
        if not news:
            return None
        return View(round_id="", version=version, phase=Phase.FAILED, leader="", failed_source=missing, failure=why)

    def _forget_absence(self, version: int) -> None:
        """Once all know of it, or nobody is absent any more; and the oldest of too many."""
        absence = self._absences[version]
        if not absence.reasons or len(absence.told | absence.reasons.keys()) >= self._num_sources:
            del self._absences[version]
        while len(self._absences) > _REMEMBERED:
            del self._absences[next(iter(self._absences))]

    def view(self, round_id: str, source: str, *, now: float) -> View:
        """How the round stands; asking also says that ``source`` is alive."""
        current = self._rounds.get(round_id)
        if current is None:
            return View(
                round_id=round_id,
                version=0,
                phase=Phase.FAILED,
                leader="",
                opened=True,
                failure="the round is not known here: its actor was restarted, or it is long over",
            )
        if source in current.sources:
            current.sources[source] = now
        self._notice_silence(current, now)
        return self._view(current)

    def _view(self, current: _Round) -> View:
        return View(
            round_id=current.round_id,
            version=current.version,
            phase=current.phase,
            leader=current.leader,
            opened=current.opened,
            waiting_for=self._waiting_for(current),
            failed_source=current.failed_source,
            failure=current.failure,
        )

    def opened(self, round_id: str, source: str, *, now: float) -> View:
        """The leader has begun the update on every engine."""
        self._step(round_id, source, Phase.OPENING, Phase.SENDING)
        return self.view(round_id, source, now=now)

    def sent(self, round_id: str, source: str, *, now: float) -> View:
        """``source`` has delivered its part; repeatable."""
        current = self._rounds.get(round_id)
        if current is not None and current.phase is Phase.SENDING and source in current.sources:
            current.sent.add(source)
            if len(current.sent) == self._num_sources:
                current.phase = Phase.CLOSING
        return self.view(round_id, source, now=now)

    def closed(self, round_id: str, source: str, *, now: float) -> View:
        """The leader has published the version."""
        self._step(round_id, source, Phase.CLOSING, Phase.DONE)
        return self.view(round_id, source, now=now)

    def fail(self, round_id: str, source: str, why: str, *, now: float) -> View:
        """``source`` can't go on, so nobody does. The first reason stays; a round that is over is not changed."""
        current = self._rounds.get(round_id)
        if current is not None and not current.over:
            self._fail(current, source, why)
        return self.view(round_id, source, now=now)

    def died(self, client: str, why: str, *, now: float) -> None:
        """A process is gone. The round it was in fails; one that gathers later waits for its successor only briefly."""
        for current in self._rounds.values():
            for source in [name for name, process in current.clients.items() if process == client]:
                if self._speaks[source] == client:
                    self._dead[source] = (now, why)
                if not current.over:
                    self._fail(current, source, why)

    def status(self, *, now: float) -> dict[str, object]:
        current = self._current()
        if current is None:
            return {"num_sources": self._num_sources, "round": None}
        return {
            "num_sources": self._num_sources,
            "round": current.round_id,
            "version": current.version,
            "phase": str(current.phase),
            "leader": current.leader,
            "sources": {name: round(now - heard, 3) for name, heard in current.sources.items()},
            "waiting_for": list(self._waiting_for(current)),
            "failure": current.failure,
        }

    # ------------------------------------------------------------------------

    def _current(self) -> _Round | None:
        return next(reversed(self._rounds.values()), None) if self._rounds else None

    def _step(self, round_id: str, source: str, before: Phase, after: Phase) -> None:
        current = self._rounds.get(round_id)
        if current is not None and source == current.leader and current.phase is before:
            current.phase = after
            current.opened = True

    def _fail(self, current: _Round, source: str, why: str) -> None:
        current.phase = Phase.FAILED
        current.failed_source, current.failure = source, why

    def _notice_silence(self, current: _Round, now: float) -> None:
        if current.over:
            return
        for source, (when, why) in self._dead.items():
            waited = now - max(when, current.began)
            if current.phase is Phase.GATHERING and source not in current.sources and waited > SUCCESSION:
                self._fail(current, source, f"{why}, and nobody has taken its place")
                return
        for source, heard in current.sources.items():
            if now - heard > self._silence:
                self._fail(current, source, f"nothing heard of it for {now - heard:.1f} s")
                return

    def _waiting_for(self, current: _Round) -> tuple[str, ...]:
        match current.phase:
            case Phase.GATHERING:
                return (f"{self._num_sources - len(current.sources)} more sources",)
            case Phase.OPENING | Phase.CLOSING:
                return (current.leader,)
            case Phase.SENDING:
                return tuple(name for name in current.sources if name not in current.sent)
            case _:
                return ()

    def _forget(self) -> None:
        while len(self._rounds) > _REMEMBERED:
            del self._rounds[next(iter(self._rounds))]
