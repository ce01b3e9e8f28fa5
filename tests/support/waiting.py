"""Waiting for what another task, thread or process does."""

from __future__ import annotations

import asyncio
import time
from typing import Any


async def until(condition: Any, *, limit: float = 60.0) -> None:
    """Wait for ``condition()``, which may be a coroutine function, to become true."""
    deadline = time.monotonic() + limit
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.005)
