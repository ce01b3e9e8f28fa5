"""Faults done to the lock in full, and a table of what came of it at the end. The figures are those of docs/lock.md."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from tests.chaos.slack import SLACK
from tests.support import lock_netns
from tests.support.cluster import Report
from tests.support.lock_cancel import every_case, new_lock, storm, until_free, use_shortly
from tests.support.lock_scenarios import (
    Figures,
    added,
    contention,
    kill_holders,
    kill_server,
    many_waiters,
    percentile,
    stop_holders,
)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1500)]

TTL = 1.5
WHY_NOT = lock_netns.cannot()


async def test_sixteen_processes_take_turns(ray_cluster: Any, report_figures: Report) -> None:
    figures = await contention(16, 250)
    report_figures(figures)
    assert figures.repeats == 4000
    assert set(figures.facts.values()) == {0}
    assert figures.p(0.99) <= 0.050 * SLACK
    assert figures.p(0.5) <= 0.010 * SLACK


async def test_two_thousand_waiters_are_served_a_hundred_times_a_second(
    ray_cluster: Any, report_figures: Report
) -> None:
    figures = await many_waiters(2000, 500)
    report_figures(figures)
    assert figures.facts["waiters"] == 2000
    assert sum(figures.seconds) / figures.facts["handovers"] <= 0.010 * SLACK


async def test_a_hold_is_cancelled_at_every_await(ray_cluster: Any, report_figures: Report) -> None:
    lock, figures = new_lock(), Figures("cancel at every await of a hold")
    report_figures(figures)
    await lock.status()
    figures.repeats = await every_case(lock, partial(use_shortly, lock), seconds=figures.seconds)
    assert figures.repeats >= 4 * 3 * 3
    assert max(figures.seconds) <= 0.1 * SLACK


async def test_three_thousand_holds_are_cancelled_at_random_instants(ray_cluster: Any, report_figures: Report) -> None:
    lock, figures = new_lock(ttl=600.0), Figures("cancel at a random instant", repeats=3000)
    report_figures(figures)
    await lock.status()
    figures.facts["cancelled"] = await storm(lock, 3000, lambda: until_free(lock))
    figures.seconds.append(await until_free(lock))
    assert figures.facts["cancelled"] > 1000


@pytest.mark.parametrize(("way", "limit", "at_once"), [("pid", 0.2, 1), ("ref", 2.5, 4), ("liveness_actor", 0.2, 1)])
async def test_a_hundred_holders_are_killed(
    ray_cluster: Any, way: str, limit: float, at_once: int, report_figures: Report
) -> None:
    # A reference tells after two seconds: those may be waited for side by side.
    kills = [kill_holders(ray_cluster, 80 // at_once, 20 // at_once, way=way, seed=1 + n) for n in range(at_once)]
    figures = added(await asyncio.gather(*kills))
    report_figures(figures)
    assert figures.facts["stale buckets applied"] == 0
    assert figures.facts["struck a holder"] > 50
    assert figures.p(0.99) <= limit * SLACK


async def test_twenty_holders_are_stopped_past_their_lease(ray_cluster: Any, report_figures: Report) -> None:
    figures = await stop_holders(20, ttl=TTL)
    report_figures(figures)
    assert figures.facts["stale buckets applied"] == 0
    assert figures.facts["holders told LeaseLost"] == 20
    assert figures.facts["late buckets refused"] == 20
    assert max(figures.seconds) <= (TTL + 1.0) * SLACK


async def test_the_lock_server_is_killed_thirty_times(ray_cluster: Any, report_figures: Report) -> None:
    figures = await kill_server(30, ttl=TTL)
    report_figures(figures)
    assert figures.facts["overlaps (times)"] == 0
    assert figures.facts["stale buckets applied"] == 0
    assert figures.facts["fences fell"] == 0
    assert max(figures.seconds) <= (TTL + 3.0) * SLACK


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_the_link_between_two_nodes_is_cut_five_times_either_way(report_figures: Report) -> None:
    rows = lock_netns.run(5, timeout=1200.0)
    for case in ("holder cut", "server cut"):
        mine = [row for row in rows if row["case"] == case]
        figures = Figures(f"network cut, {case}", repeats=len(mine), seconds=[row["lapse"] for row in mine])
        report_figures(figures)
        figures.facts = {
            "stale buckets applied": sum(row["stale"] for row in mine),
            "holders told LeaseLost": sum(row["told"] == "LeaseLost" for row in mine),
            "refused": sum(row["refused"] for row in mine),
        }
        assert len(mine) == 5
        assert all(row["cut_happened"] and row["fences_rise"] and not row["late_bucket_applied"] for row in mine)
        assert figures.facts["stale buckets applied"] == 0
        assert figures.facts["holders told LeaseLost"] == 5
        assert percentile(figures.seconds, 1.0) <= (lock_netns.TTL + 1.0) * SLACK
