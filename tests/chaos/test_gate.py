"""Some points of each sweep, at the promised limits: `nox -s gate`, on a machine that does nothing else."""

from __future__ import annotations

import signal

import pytest

from async_wsync import BroadcastLock
from tests.chaos.conftest import Report
from tests.ray.fleet import Rig
from tests.sweeps import STOP_BOUND, fault_sweep

pytestmark = pytest.mark.gate


async def test_an_engine_killed_is_named_within_a_second(rig: Rig, lock: BroadcastLock, report_figures: Report) -> None:
    figures = await fault_sweep(rig, lock, victims=["e1"], at=range(1, 40, 3), soon=1.0)
    report_figures(figures)
    assert not figures.wrong


async def test_an_engine_stopped_costs_no_more_than_a_limit(
    rig: Rig, lock: BroadcastLock, report_figures: Report
) -> None:
    figures = await fault_sweep(rig, lock, number=signal.SIGSTOP, victims=["e2"], at=range(2, 40, 4), soon=STOP_BOUND)
    report_figures(figures)
    assert not figures.wrong
