"""The meter that all loop gap figures come from."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from async_wsync.runtime.loop_gap import Gap, LoopGapMeter
from tests.support.idle import IdleProcess, longest_beyond


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


async def test_gaps_are_noted_with_the_cpu_time_that_went_into_them() -> None:
    with LoopGapMeter() as meter:
        await asyncio.sleep(0.01)
        time.sleep(0.15)
        await asyncio.sleep(0.01)
        asleep = max(meter.gaps, key=lambda gap: gap.end - gap.start)
        meter.reset()
        until = time.process_time() + 0.15
        while time.process_time() < until:
            pass
        await asyncio.sleep(0.01)
        busy = max(meter.gaps, key=lambda gap: gap.end - gap.start)
    assert asleep.end - asleep.start >= 0.14
    assert asleep.cpu < 0.1
    assert busy.cpu >= 0.14


def test_what_kept_an_idle_process_waiting_is_not_counted_against_ours() -> None:
    gaps = [Gap(10.0, 10.05, 1.0), Gap(20.0, 20.1, 0.03)]
    assert longest_beyond(gaps, []) == pytest.approx(0.05), "the second had a CPU for 30 ms only"
    assert longest_beyond(gaps, [(9.9, 10.04)]) == pytest.approx(0.03)
    assert longest_beyond([], [(0.0, 100.0)]) == 0.0


def test_an_idle_process_tells_when_it_was_kept_waiting() -> None:
    with IdleProcess() as idle:
        stopped = time.monotonic()
        idle.process.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        idle.process.send_signal(signal.SIGCONT)
        time.sleep(0.05)
    assert any(start < stopped + 0.05 and end > stopped + 0.09 for start, end in idle.late)
