"""What happened in one call of `update_weights`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from async_wsync.phases import PHASES
from async_wsync.protocols import HeldLock
from async_wsync.report import BucketTiming, PhaseSpan
from async_wsync.types import UpdateEvent

__all__ = ["UpdateHistory"]


@dataclass(slots=True)
class UpdateHistory:
    """What happened in it, over all its attempts: for events, stages and the report."""

    version: int
    emit: Callable[[UpdateEvent], None]
    started_at: float = field(default_factory=time.monotonic)
    spans: list[PhaseSpan] = field(default_factory=list)
    phase: str = "plan"  # the one that began last
    held: HeldLock | None = None
    notes: list[str] = field(default_factory=list)
    timings: list[BucketTiming] = field(default_factory=list)
    rebuilds: int = 0
    checksum: str | None = None
    started: bool = False  # some engine may have been paused or sent something
    published: bool = False

    def leave_behind(self, names: Iterable[str]) -> None:
        """Note that these lack what a partial update builds on, and take no part in it."""
        self.notes.append(
            f"partial update: {', '.join(names)} left as they were, catch_up with a full source brings them to it"
        )

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Time a phase, and show it as the lock holder's stage."""
        assert phase in PHASES, phase
        self.phase = phase
        start = time.monotonic()
        self.stage(phase)
        try:
            yield
        finally:
            self.spans.append(PhaseSpan(phase, start, time.monotonic() - start))

    @property
    def phases(self) -> dict[str, float]:
        """Seconds in each phase, over all attempts."""
        seconds: dict[str, float] = {}
        for span in self.spans:
            seconds[span.name] = seconds.get(span.name, 0.0) + span.seconds
        return seconds

    def stage(self, doing: str) -> None:
        if self.held is not None:
            self.held.set_stage(f"update {self.version}: {doing}")

    def event(self, kind: str, **facts: Any) -> None:
        self.emit(UpdateEvent(kind=kind, version=self.version, at=time.monotonic(), **facts))
