"""One engine of three is frozen: it is named, and nobody else. `nox -s chaos` has 20 of each phase at 1, 3 and 10 s."""

from __future__ import annotations

import pytest

from tests.support.fleet import Rig
from tests.support.freezes import freeze_sweep


@pytest.mark.parametrize(
    ("phase", "dropping"), [("join", False), ("join", True), ("receive", True), ("publish", False)]
)
async def test_a_frozen_engine_is_named_and_nobody_else(rig: Rig, phase: str, dropping: bool) -> None:
    figures = await freeze_sweep(rig, phase, seconds=1.0, times=1, dropping=dropping)
    assert not figures.wrong
    assert figures.fired == 1
