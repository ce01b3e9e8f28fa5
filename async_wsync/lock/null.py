"""The lock of a source that has its engines to itself: never waits, and still counts fences upwards."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

__all__ = ["NullLock"]


@dataclass(frozen=True, slots=True)
class _Held:
    fence: int

    def set_stage(self, stage: str) -> None:
        """Nobody asks."""


class NullLock:
    """What ``lock=None`` means. A restarted source still fences off its dead predecessor, by the wall clock."""

    def __init__(self) -> None:
        self._fence = 0

    @asynccontextmanager
    async def hold(self, *, label: str, timeout: float | None = None) -> AsyncIterator[_Held]:
        self._fence = max(self._fence + 1, time.time_ns() // 1_000_000)
        yield _Held(self._fence)
