"""Short forms of the sweeps: a fault at some of the points of an update, on a machine that may be busy.

`nox -s gate` measures some points against the promised limits, `nox -s chaos` all of them.
"""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from async_wsync import BroadcastLock
from async_wsync.testing import Fault
from tests.support.fixtures import Judge
from tests.support.fleet import Rig
from tests.support.sweep_figures import BUSY
from tests.support.sweeps import cancel_sweep, fault_sweep


@pytest.mark.parametrize(("kind", "first"), [("once", 1), ("twice", 5), ("anyio", 9), ("timeout", 13)])
async def test_an_update_cancelled_at_any_await_leaves_everything_at_rest(
    rig: Rig, lock: BroadcastLock, kind: str, first: int, judge: Judge
) -> None:
    at = range(first, 400, 29)
    judge(await cancel_sweep(rig, lock, kinds=[kind], at=at, promised=BUSY), hits=3)  # type: ignore[list-item]


async def test_an_update_stopped_at_any_await_leaves_everything_at_rest(
    rig: Rig, lock: BroadcastLock, judge: Judge
) -> None:
    at = range(3, 400, 37)
    judge(await cancel_sweep(rig, lock, kinds=["once"], at=at, on_cancel="stop", promised=BUSY), hits=3)


async def test_an_engine_killed_at_any_event_is_named_and_the_rest_is_whole_or_torn(
    rig: Rig, lock: BroadcastLock, judge: Judge
) -> None:
    judge(await fault_sweep(rig, lock, victims=["e1"], at=[3, 9, 16], promised=BUSY), hits=3)


async def test_an_engine_stopped_at_any_event_costs_no_more_than_a_limit(
    rig: Rig, lock: BroadcastLock, judge: Judge
) -> None:
    figures = await fault_sweep(rig, lock, number=signal.SIGSTOP, victims=["e2"], at=[4, 10], promised=BUSY)
    judge(figures, hits=2)


# --------------------------------------------------------- what the sweeps themselves would see


async def test_a_sweep_passes_over_no_delay_and_tries_again_only_once(rig: Rig, lock: BroadcastLock) -> None:
    figures = await cancel_sweep(rig, lock, kinds=["once"], at=[30], promised=replace(BUSY, loop_gap=-9.0))
    assert figures.fired == 2
    assert len([wrong for wrong in figures.wrong if "the loop was held" in wrong]) == 2


async def test_a_sweep_passes_over_no_next_update_that_fails(rig: Rig, lock: BroadcastLock) -> None:
    # After the first update and the cancelled one, which is finished.
    await rig.script("e1", Fault(do="raise_before", at="end", skip=2))
    figures = await cancel_sweep(rig, lock, kinds=["once"], at=[60], promised=BUSY)
    assert await rig.fired("e1") == ["raise_before at end"]
    assert len(figures.wrong) == 1
    assert "the next update" in figures.wrong[0]
