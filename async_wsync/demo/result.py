"""What the demo found: a line an update, a table at the end, and the same for machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from async_wsync.demo.engine import EngineTally
from async_wsync.report import UpdateReport, format_bytes, format_seconds
from async_wsync.transfer.checksum import combined_digest

__all__ = ["DemoResult", "EngineResult", "UpdateResult"]

SHOWN_PHASES = ("lock", "pause", "receive", "end", "resume")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """One version on its way, by one source or several at once.

    ``loss``: mean over the training steps before it. ``loop_gap``: the longest during it, in seconds.
    """

    version: int
    loss: float
    reports: tuple[UpdateReport, ...]
    loop_gap: float

    @property
    def nbytes(self) -> int:
        return sum(report.nbytes for report in self.reports)

    @property
    def seconds(self) -> float:
        return max(report.seconds for report in self.reports)

    @property
    def gbps(self) -> float:
        """Of the source that took longest: sources that share engines take turns."""
        return max(self.reports, key=lambda report: report.seconds).gbps

    @property
    def dropped(self) -> tuple[str, ...]:
        """Engines that the update left behind."""
        return tuple(dict.fromkeys(name for report in self.reports for name in report.dropped))

    def line(self) -> str:
        phases = max(self.reports, key=lambda report: report.seconds).phases
        spent = ", ".join(f"{name} {format_seconds(phases[name])}" for name in SHOWN_PHASES if name in phases)
        return (
            f"v{self.version:<3} loss {self.loss:.2f}  "
            f"{format_bytes(self.nbytes)} in {format_seconds(self.seconds)} ({self.gbps:.2f} GB/s): {spent}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "loss": self.loss,
            "nbytes": self.nbytes,
            "seconds": self.seconds,
            "gbps": self.gbps,
            "dropped": list(self.dropped),
            "loop_gap_ms": self.loop_gap * 1e3,
            "reports": [report.to_dict() for report in self.reports],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    """An engine at the end. ``equal``: its checksum is the trainer's."""

    name: str
    version: int | None
    checksum: str
    equal: bool
    num_samples: int
    versions_sampled: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tally: EngineTally, trainer_checksum: str) -> Self:
        checksum = combined_digest(tally.digests)
        return cls(
            name=name,
            version=tally.version,
            checksum=checksum,
            equal=checksum == trainer_checksum,
            num_samples=tally.num_samples,
            versions_sampled=tally.versions_sampled,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """``max_loop_gap``: the longest an event loop was held up during any update, in seconds. ``killed``: by us."""

    updates: tuple[UpdateResult, ...]
    engines: tuple[EngineResult, ...]
    max_loop_gap: float
    seconds: float
    killed: tuple[str, ...] = ()

    @property
    def checksums_match(self) -> bool:
        return all(engine.equal for engine in self.engines)

    @property
    def ok(self) -> bool:
        """Every engine is on the last version, with the trainer's very bytes."""
        last = self.updates[-1].version
        return self.checksums_match and all(engine.version == last for engine in self.engines)

    def table(self) -> str:
        rows = [("engine", "version", "checksum", "equal to the trainer's", "samples", "of versions")]
        rows += [
            (
                engine.name,
                str(engine.version),
                engine.checksum[:12],
                "yes" if engine.equal else "NO",
                str(engine.num_samples),
                _ranges(engine.versions_sampled),
            )
            for engine in self.engines
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        seconds = [update.seconds for update in self.updates]
        lines.append(
            f"{len(self.updates)} updates, {format_seconds(sum(seconds) / len(seconds))} each on average; "
            f"longest event loop gap during an update {self.max_loop_gap * 1e3:.1f} ms; "
            f"{format_seconds(self.seconds)} in all"
        )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "ok": self.ok,
            "versions": {engine.name: engine.version for engine in self.engines},
            "checksums_match": self.checksums_match,
            "checksums": {engine.name: engine.checksum for engine in self.engines},
            "samples": {engine.name: engine.num_samples for engine in self.engines},
            "versions_sampled": {engine.name: list(engine.versions_sampled) for engine in self.engines},
            "max_loop_gap_ms": self.max_loop_gap * 1e3,
            "seconds": self.seconds,
            "killed": list(self.killed),
            "losses": [update.loss for update in self.updates],
            "updates": [update.to_dict() for update in self.updates],
        }


def _ranges(numbers: tuple[int, ...]) -> str:
    """(1, 2, 3, 5) as "1-3, 5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts) or "none"
