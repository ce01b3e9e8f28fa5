"""Killed, stopped and restarted: the short forms of the chaos sweeps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.lock_scenarios import contention, kill_holders, kill_server, stop_holders

TTL = 1.5


async def test_the_lock_passes_from_hand_to_hand_in_order(ray_cluster: Any) -> None:
    figures = await contention(5, 30)
    print(figures.row())
    assert figures.repeats == 150
    assert set(figures.facts.values()) == {0}
    assert len(figures.seconds) > 50, "nobody ever waited"
    assert figures.p(0.5) < 0.5


@pytest.mark.parametrize(("way", "limit", "actors"), [("pid", 2.0, 4), ("ref", 10.0, 2), ("liveness_actor", 2.0, 2)])
async def test_a_killed_holder_is_noticed(ray_cluster: Any, way: str, limit: float, actors: int) -> None:
    figures = await kill_holders(ray_cluster, actors, 1, way=way)
    print(figures.row())
    assert figures.facts["stale buckets applied"] == 0
    assert figures.p(0.5) < limit


async def test_a_stopped_holder_loses_its_lease_and_is_told_when_it_wakes(ray_cluster: Any) -> None:
    figures = await stop_holders(5, ttl=TTL)
    print(figures.row())
    assert figures.facts["stale buckets applied"] == 0
    assert figures.facts["holders told LeaseLost"] == 5
    assert figures.facts["late buckets refused"] == 5
    assert min(figures.seconds) > TTL * 0.6
    assert figures.p(0.5) < TTL + 3.0


async def test_a_killed_lock_server_comes_back_empty_and_careful(ray_cluster: Any) -> None:
    figures = await kill_server(3, ttl=TTL)
    print(figures.row())
    assert figures.facts["overlaps (times)"] == 0
    assert figures.facts["stale buckets applied"] == 0
    assert figures.facts["fences fell"] == 0
    assert min(figures.seconds) > TTL * 0.9, "it granted before the quarantine was over"
    assert figures.p(0.5) < TTL + 10.0
