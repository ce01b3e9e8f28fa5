"""The meter that all loop gap figures come from."""

from __future__ import annotations

import asyncio
import time

from async_wsync.runtime.loop_gap import LoopGapMeter


async def test_a_blocked_loop_is_measured() -> None:
    with LoopGapMeter() as meter:
        await asyncio.sleep(0.01)
        time.sleep(0.15)
        await asyncio.sleep(0.01)
    assert meter.longest >= 0.14


async def test_a_loop_that_comes_round_late_only_because_it_waits_has_no_gap() -> None:
    with LoopGapMeter() as meter:
        await asyncio.sleep(0.3)
    assert meter.longest < 0.25


async def test_reset_starts_over() -> None:
    with LoopGapMeter() as meter:
        await asyncio.sleep(0.01)
        time.sleep(0.15)
        await asyncio.sleep(0.01)
        assert meter.reset() >= 0.14
        assert meter.longest < 0.14


async def test_a_block_until_the_very_end_counts() -> None:
    with LoopGapMeter() as meter:
        await asyncio.sleep(0.01)
        time.sleep(0.15)
    assert meter.longest >= 0.14
