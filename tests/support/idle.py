"""What the machine alone does to a process: on a busy one, even an idle process wakes up late."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from async_wsync.runtime.loop_gap import Gap

__all__ = ["IdleProcess", "longest_beyond"]

_IDLE = """
import json, select, sys, time
late = []
now, asked = time.monotonic(), False
print("ready", flush=True)
while not asked:
    asked = bool(select.select([sys.stdin], [], [], 0.002)[0])
    due, now = now + 0.002, time.monotonic()
    if now - due >= 0.001:
        late.append((due, now))
print(json.dumps(late))
"""


class IdleProcess:
    """``with IdleProcess() as idle:``, then ``idle.late``: from when to when (time.monotonic()) it was to be awake and
    was not."""

    def __init__(self) -> None:
        self.late: list[tuple[float, float]] = []

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _IDLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        said, _ = self.process.communicate("\n", timeout=30)
        self.late = [(start, end) for start, end in json.loads(said)]


def longest_beyond(gaps: Iterable[Gap], late: Sequence[tuple[float, float]]) -> float:
    """The longest of ``gaps``, in seconds, less what of it an idle process was kept waiting for too; and counted for no
    longer than this process had a CPU: a thread of ours that holds the GIL may be kept waiting like an idle process."""
    return max((min(g.end - g.start - _overlap(g.start, g.end, late), g.cpu) for g in gaps), default=0.0)


def _overlap(start: float, end: float, late: Sequence[tuple[float, float]]) -> float:
    return sum(max(0.0, min(end, until) - max(start, since)) for since, until in late)
