"""One engine of three is frozen in each phase of an update, at limits of 1, 3 and 10 s, a number of times each."""

from __future__ import annotations

from functools import partial

import pytest

from tests.chaos.slack import STRIDE
from tests.support.cluster import Report
from tests.support.fleet import Rig, side_by_side
from tests.support.freezes import PHASES, freeze_sweep

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1700)]


@pytest.mark.parametrize(
    ("seconds", "times", "dropping"),
    [(1.0, 20, False), (3.0, 12, False), (10.0, 6, False), (1.0, 12, True)],
    ids=["1 s", "3 s", "10 s", "1 s, drop"],
)
async def test_an_engine_frozen_in_any_phase_is_named_and_nobody_else(
    rigs: list[Rig], seconds: float, times: int, dropping: bool, report_figures: Report
) -> None:
    times = max(1, times // STRIDE)
    sweeps = [partial(freeze_sweep, phase=p, seconds=seconds, times=times, dropping=dropping) for p in PHASES]
    for figures in await side_by_side(rigs, sweeps):
        report_figures(figures)
        assert not figures.wrong, "\n".join(figures.wrong)
        assert figures.fired == times
