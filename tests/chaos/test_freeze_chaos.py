"""One engine of three is frozen in each phase of an update, at limits of 1, 3 and 10 s, 20 times each."""

from __future__ import annotations

import pytest

from tests.chaos.test_update_chaos import STRIDE
from tests.conftest import Report
from tests.freezes import PHASES, freeze_sweep
from tests.ray.fleet import Rig

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1700)]

TIMES = max(1, 20 // STRIDE)


@pytest.mark.parametrize("seconds", [1.0, 3.0, 10.0])
@pytest.mark.parametrize("phase", PHASES)
async def test_an_engine_frozen_in_any_phase_is_named_and_nobody_else(
    rig: Rig, phase: str, seconds: float, report_figures: Report
) -> None:
    figures = await freeze_sweep(rig, phase, seconds=seconds, times=TIMES)
    report_figures(figures)
    assert not figures.wrong, "\n".join(figures.wrong)
    assert figures.fired == TIMES


@pytest.mark.parametrize("phase", PHASES)
async def test_a_frozen_engine_alone_is_dropped(rig: Rig, phase: str, report_figures: Report) -> None:
    figures = await freeze_sweep(rig, phase, seconds=1.0, times=TIMES, dropping=True)
    report_figures(figures)
    assert not figures.wrong, "\n".join(figures.wrong)
    assert figures.fired == TIMES
