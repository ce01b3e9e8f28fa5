"""What an update did, for people (`summary`), machines (`to_dict`) and trace viewers (`to_trace`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from async_wsync.phases import PHASES
from async_wsync.types import EngineOutcome

__all__ = ["BucketTiming", "PhaseSpan", "UpdateReport", "format_bytes", "format_seconds"]


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """One stretch of a phase: ``start`` on the clock of `UpdateReport.started_at`, both in seconds."""

    name: str
    start: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTiming:
    """When a bucket was packed, handed to the group and acknowledged by all engines.

    Seconds on one clock; `UpdateReport.started_at` is on the same.
    """

    index: int
    nbytes: int
    staged_at: float
    submitted_at: float
    done_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """A finished update. ``seconds`` covers all of it, ``phases`` the seconds spent in each phase of `phases.PHASES`.

    ``spans`` has each stretch of a phase with its start: one that was tried again has several.
    ``checksum`` is the digest all engines agreed on, None where none was asked for. ``rebuilds`` counts
    groups built anew within the update, ``dropped`` names the engines left behind by them. ``behind`` names those that
    do not hold the version which a partial update builds on: it left them as they were, for a `catch_up`.
    """

    version: int
    nbytes: int
    num_tensors: int
    num_buckets: int
    seconds: float
    phases: Mapping[str, float] = field(default_factory=dict)
    spans: tuple[PhaseSpan, ...] = ()
    engines: Mapping[str, EngineOutcome] = field(default_factory=dict)
    checksum: str | None = None
    notes: tuple[str, ...] = ()
    rebuilds: int = 0
    dropped: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    buckets: tuple[BucketTiming, ...] = ()
    started_at: float = 0.0

    @property
    def gbps(self) -> float:
        """Gigabytes (1e9) a second, from the first bucket to the last acknowledgement."""
        moving = self.phases.get("receive", 0.0) + self.phases.get("settle", 0.0) or self.seconds
        return self.nbytes / moving / 1e9 if moving > 0 else 0.0

    def summary(self) -> str:
        """A few lines: size and speed, where the time went, then a line an engine."""
        lines = [self._headline()]
        if spent := self._time_line():
            lines.append(f"  {spent}")
        lines.extend(f"  {_engine_line(outcome)}" for outcome in self.engines.values())
        if self.rebuilds or self.dropped:
            lines.append(f"  group rebuilt {self.rebuilds} x, left behind: {', '.join(self.dropped) or 'none'}")
        if self.checksum is not None:
            lines.append(f"  checksum {self.checksum}, equal on every engine")
        lines.extend(f"  note: {note}" for note in self.notes)
        return "\n".join(lines)

    def _headline(self) -> str:
        return (
            f"version {self.version}: {format_bytes(self.nbytes)} in {_count(self.num_tensors, 'tensor')}, "
            f"{_count(self.num_buckets, 'bucket')}, {format_seconds(self.seconds)}, {self.gbps:.2f} GB/s"
        )

    def _time_line(self) -> str:
        return ", ".join(f"{name} {format_seconds(self.phases[name])}" for name in PHASES if name in self.phases)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["phases"] = dict(self.phases)
        data["gbps"] = self.gbps
        data["engines"] = {name: _outcome_dict(outcome) for name, outcome in self.engines.items()}
        data["buckets"] = [asdict(bucket) for bucket in self.buckets]
        data["spans"] = [asdict(span) for span in self.spans]
        data["notes"], data["dropped"], data["behind"] = list(self.notes), list(self.dropped), list(self.behind)
        return data

    def to_trace(self) -> dict[str, Any]:
        """Chrome trace events (chrome://tracing, Perfetto): a row of phases and a row of buckets, when they were."""
        events = [_slice(span.name, span.start - self.started_at, span.seconds, row="phases") for span in self.spans]
        for bucket in self.buckets:
            start = bucket.submitted_at - self.started_at
            event = _slice(f"bucket {bucket.index}", start, bucket.done_at - bucket.submitted_at, row="buckets")
            event["args"] = {"nbytes": bucket.nbytes, "staged_s": bucket.staged_at - self.started_at}
            events.append(event)
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"version": self.version}}


def _slice(name: str, start: float, seconds: float, *, row: str) -> dict[str, Any]:
    return {
        "name": name,
        "cat": "weight_update",
        "ph": "X",
        "ts": round(start * 1e6, 1),
        "dur": round(seconds * 1e6, 1),
        "pid": "async_wsync",
        "tid": row,
    }


def _outcome_dict(outcome: EngineOutcome) -> dict[str, Any]:
    data = asdict(outcome)
    data["state"] = str(outcome.state)
    data["notes"] = list(outcome.notes)
    return data


def _engine_line(outcome: EngineOutcome) -> str:
    version = "-" if outcome.version is None else str(outcome.version)
    line = f"{outcome.engine}: {outcome.state}, version {version}"
    if outcome.error is not None:
        where = f" in {outcome.phase}" if outcome.phase else ""
        line += f"; {outcome.error}{where}"
    return "; ".join([line, *outcome.notes])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_bytes(nbytes: float) -> str:
    """Decimal units, as network speeds are given: 1 MB is 1e6 bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def format_seconds(seconds: float) -> str:
    if seconds < 1.0:
        return f"{seconds * 1e3:.1f} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 60 else f"{seconds / 60:.1f} min"
