"""A holder, and then the lock server, behind a link that drops everything for longer than the lease."""

from __future__ import annotations

import pytest

from tests.support import lock_netns

WHY_NOT = lock_netns.cannot()


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
@pytest.mark.timeout(240)
def test_a_cut_link_lets_nobody_send_under_a_lost_lease() -> None:
    rows = lock_netns.run(1, timeout=200.0)
    assert [row["case"] for row in rows] == ["holder cut", "server cut"]
    for row in rows:
        print(row)
        assert row["cut_happened"]
        assert row["stale"] == 0
        assert row["told"] == "LeaseLost"
        assert not row["late_bucket_applied"]
        assert row["fences_rise"]
        assert row["lapse"] < lock_netns.TTL + 5.0
