"""The full sweeps over a changing fleet; their figures are printed at the end of the run."""

from __future__ import annotations

import pytest

from tests.support import fleet_netns, lock_netns
from tests.support.cluster import RayCluster, Report
from tests.support.fleet_scenarios import drop_sweep, opposite_orders, random_chaos, replace_many, source_kill_sweep
from tests.support.lock_scenarios import Figures

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1500)]


async def test_an_engine_killed_at_every_event_is_dropped_and_replaced(
    ray_cluster: RayCluster, report_figures: Report
) -> None:
    figures = await drop_sweep(victims=("e0", "e1", "e2"), points=None)
    report_figures(figures)
    assert figures.repeats >= 40
    assert figures.facts["survivors current"] == f"{figures.repeats} of {figures.repeats}"


async def test_a_source_killed_at_every_event_is_noticed_and_the_next_round_heals(
    ray_cluster: RayCluster, report_figures: Report
) -> None:
    figures = await source_kill_sweep(points=None)
    report_figures(figures)
    assert figures.repeats >= 20
    assert max(figures.seconds) <= 3.0
    assert figures.facts["healed"] == f"{figures.repeats} of {figures.repeats}"


async def test_fifty_connects_in_opposite_order_never_deadlock(ray_cluster: RayCluster, report_figures: Report) -> None:
    report_figures(await opposite_orders(times=50))


async def test_five_hundred_updates_with_a_random_fault_in_every_fifth(
    ray_cluster: RayCluster, report_figures: Report
) -> None:
    figures = await random_chaos(updates=500, every=5, seed=7)
    report_figures(figures)
    assert figures.facts["torn samples"] == 0
    assert figures.facts["hangs"] == 0
    assert figures.facts["lock leaks"] == 0
    assert figures.facts["RSS growth %"] < 5.0
    assert figures.facts["fds"] <= 4
    assert figures.facts["threads"] <= 4
    assert figures.facts["tasks"] == 0


async def test_thirty_replacements_leave_nothing_behind(ray_cluster: RayCluster, report_figures: Report) -> None:
    figures = await replace_many(times=30)
    report_figures(figures)
    assert figures.facts["fds"] <= 4
    assert figures.facts["threads"] <= 2


def test_an_engine_whose_link_is_cut_is_named_and_left_behind(report_figures: Report) -> None:
    why = lock_netns.cannot()
    if why:
        pytest.skip(why)
    row = fleet_netns.run(timeout=300.0)
    assert row["cut_happened"]
    assert row["dropped"] == ["e1"]
    assert row["current"] == ["e0", "e2"]
    assert row["seconds"] <= row["limit"]
    figures = Figures("engine's link cut in the middle of an update: seconds to its end on the others", repeats=1)
    figures.seconds = [row["seconds"]]
    figures.facts = {"seconds after healing until all are current": round(row["back"], 1)}
    report_figures(figures)
