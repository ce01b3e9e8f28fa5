"""A source inside a Ray actor shows its bar on the driver (field case B2)."""

from __future__ import annotations

from pathlib import Path

from tests.support.scripts import Scripts


def test_a_source_in_an_actor_shows_one_bar_on_the_driver_and_does_not_flood_the_logs(scripts: Scripts) -> None:
    done = scripts.result("bar in an actor")
    assert done.returncode == 0, done.stderr
    shown = done.stdout + done.stderr
    assert "weights v7: 100%" in shown
    assert "weights v8 cancelled" in shown
    assert "__ray_tqdm_magic_token__" not in shown
    session = Path(done.stdout.split("SESSION ")[1].splitlines()[0])
    logged = [
        line
        for path in session.glob("logs/worker-*.out")
        for line in path.read_text().splitlines()
        if "__ray_tqdm_magic_token__" in line
    ]
    assert 3 <= len(logged) <= 12, f"{len(logged)} records for 10 000 buckets"
