"""Some points of each sweep, at the promised limits: `nox -s gate`, on a machine that does nothing else.

What was late and in time at a second try is told at the end of the output.
"""

from __future__ import annotations

import signal
from functools import partial
from typing import Any

import pytest

from async_wsync import BroadcastLock
from tests.support.cluster import Report
from tests.support.fixtures import Judge
from tests.support.fleet import Rig, side_by_side
from tests.support.freezes import PHASES, freeze_sweep
from tests.support.sweep_figures import PROMISED
from tests.support.sweeps import SETTINGS, Setting, cancel_sweep, fault_sweep

pytestmark = pytest.mark.gate


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: str(setting) or "plain")
async def test_a_killed_engine_is_named_within_a_second(
    rig: Rig, lock: BroadcastLock, setting: Setting, judge: Judge
) -> None:
    first = 1 + SETTINGS.index(setting)
    figures = await fault_sweep(rig, lock, victims=["e1"], at=range(first, 40, 5), setting=setting, promised=PROMISED)
    judge(figures, hits=3)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: str(setting) or "plain")
async def test_a_stopped_engine_costs_its_phases_limit_and_the_drain(
    rig: Rig, lock: BroadcastLock, setting: Setting, judge: Judge
) -> None:
    first = 4 + SETTINGS.index(setting)
    figures = await fault_sweep(
        rig, lock, number=signal.SIGSTOP, victims=["e2"], at=range(first, 40, 7), setting=setting, promised=PROMISED
    )
    judge(figures, hits=2)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: str(setting) or "plain")
@pytest.mark.parametrize("on_cancel", ["finish", "stop"])
async def test_a_cancelled_update_leaves_everything_at_rest(
    rig: Rig, lock: BroadcastLock, setting: Setting, on_cancel: Any, judge: Judge
) -> None:
    first = 1 + 5 * SETTINGS.index(setting)
    kinds = ["once", "anyio"] if on_cancel == "finish" else ["twice", "timeout"]
    figures = await cancel_sweep(
        rig, lock, kinds=kinds, on_cancel=on_cancel, at=range(first, 400, 23), setting=setting, promised=PROMISED
    )
    judge(figures, hits=4)


async def test_an_engine_frozen_in_any_phase_is_named_and_nobody_else(rigs: list[Rig], report_figures: Report) -> None:
    sweeps = [partial(freeze_sweep, phase=p, seconds=1.0, times=1, first=n) for n, p in enumerate(PHASES)]
    for figures in await side_by_side(rigs[:3], sweeps):
        report_figures(figures)
        assert not figures.wrong, "\n".join(figures.wrong)
        assert figures.fired == 1
