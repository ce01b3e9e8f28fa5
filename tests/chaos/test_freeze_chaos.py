"""One engine of three is frozen in each phase of an update: 20 times at limits of 1, 3 and 10 s, 12 if dropped."""

from __future__ import annotations

from functools import partial

import pytest

from tests.chaos.slack import STRIDE
from tests.support.cluster import Report
from tests.support.fleet import Rig, side_by_side
from tests.support.freezes import PHASES, added, freeze_sweep

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1700)]

PART = 5  # runs of one phase in a row on one rig: no rig is left with a long rest while the others are done


@pytest.mark.parametrize(
    ("seconds", "times", "dropping"),
    [(1.0, 20, False), (3.0, 20, False), (10.0, 20, False), (1.0, 12, True)],
    ids=["1 s", "3 s", "10 s", "1 s, drop"],
)
async def test_an_engine_frozen_in_any_phase_is_named_and_nobody_else(
    rigs: list[Rig], more_rigs: list[Rig], seconds: float, times: int, dropping: bool, report_figures: Report
) -> None:
    times = max(1, times // STRIDE)
    sweeps = [
        partial(freeze_sweep, phase=p, seconds=seconds, times=min(PART, times - n), first=n, dropping=dropping)
        for p in PHASES
        for n in range(0, times, PART)
    ]
    # At limits of 1 s more of them would be late for want of a core.
    used = rigs if seconds < 3 else rigs + more_rigs
    wrong = []
    for figures in added(await side_by_side(used, sweeps)):
        report_figures(figures)
        wrong += figures.wrong
        assert figures.runs == times
        if figures.fired < times:
            wrong.append(f"{figures.what}: {figures.fired} of {times} struck")
    assert not wrong, "\n".join(wrong)
