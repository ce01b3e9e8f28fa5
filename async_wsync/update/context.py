"""How a broadcaster goes about its updates, and what happened in one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from async_wsync.phases import PHASES
from async_wsync.protocols import HeldLock
from async_wsync.report import BucketTiming, PhaseSpan
from async_wsync.types import PauseMode, Timeouts, UpdateEvent

__all__ = ["Settings", "UpdateHistory", "Verify"]

Verify = Literal["engines", "source"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a broadcaster goes about its updates; see `WeightBroadcaster` for each."""

    bucket_bytes: int
    num_buffers: int
    timeouts: Timeouts
    pause_mode: PauseMode
    resume_policy: Literal["whole", "current", "never"]
    on_engine_failure: Literal["raise", "drop"]
    on_cancel: Literal["finish", "stop"]
    lock_scope: Literal["update", "bucket"]
    topology: Literal["shared", "per_engine"]
    min_engines: int
    max_rebuilds: int


@dataclass(slots=True)
class UpdateHistory:
    """What happened in one call of `update_weights`, over all its attempts: for events, stages and the report."""

    version: int
    emit: Callable[[UpdateEvent], None]
    started_at: float = field(default_factory=time.monotonic)
    spans: list[PhaseSpan] = field(default_factory=list)
    phase: str = "plan"  # the one that began last
    held: HeldLock | None = None
    notes: list[str] = field(default_factory=list)
    timings: list[BucketTiming] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    behind: list[str] = field(default_factory=list)
    rebuilds: int = 0
    checksum: str | None = None
    started: bool = False  # some engine may have been paused or sent something
    published: bool = False

    def leave_behind(self, names: Iterable[str]) -> None:
        """These lack what a partial update builds on, and take no part in it."""
        self.behind.extend(names)
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
