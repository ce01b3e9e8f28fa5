"""The demo and the command line, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conftest import RayCluster

ROOT = Path(__file__).resolve().parents[2]


def async_wsync(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    environment.pop("RAY_ADDRESS", None)
    return subprocess.run(
        [sys.executable, "-m", "async_wsync", *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        env=environment,
        check=False,
    )


def run_demo(tmp_path: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    figures = tmp_path / "out.json"
    done = async_wsync("demo", "--updates", "3", "--steps", "8", "--json", str(figures), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(figures.read_text())


def test_the_demo_ends_with_every_engine_on_the_trainers_very_bytes(tmp_path: Path) -> None:
    shown, figures = run_demo(tmp_path)
    assert figures["ok"] is True
    assert figures["checksums_match"] is True
    assert figures["versions"] == {"rollout-0": 3, "rollout-1": 3}
    assert len(set(figures["checksums"].values())) == 1
    assert all(count > 0 for count in figures["samples"].values())
    assert all(versions[-1] == 3 for versions in figures["versions_sampled"].values())
    assert figures["losses"][-1] < figures["losses"][0]
    assert [update["version"] for update in figures["updates"]] == [1, 2, 3]
    assert all(update["seconds"] > 0 and update["gbps"] > 0 for update in figures["updates"])
    assert figures["max_loop_gap_ms"] > 0
    assert "untrained: 'The " in shown
    assert "equal to the trainer's" in shown
    assert shown.count(" yes ") == 2


def test_in_a_running_cluster_two_stages_survive_an_engine_killed_in_the_middle_of_their_update(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    shown, figures = run_demo(tmp_path, "--address", ray_cluster.address, "--sources", "2", "--kill-engine-at", "2")
    assert figures["killed"] == ["rollout-1"]
    assert "v2   loss" in shown
    assert "failed: update to version 2 failed in bucket" in shown, "the fault did not fire in the middle"
    assert figures["versions"] == {"rollout-0": 3, "rollout-1-new": 3}
    assert figures["checksums_match"] is True
    assert all(len(update["reports"]) == 2 for update in figures["updates"])


def test_wrong_usage_is_told_without_a_traceback() -> None:
    done = async_wsync("demo", "--updates", "0")
    assert done.returncode == 2
    assert done.stderr == "async-wsync: updates must be at least 1, got 0\n"


def test_the_command_names_its_subcommands() -> None:
    done = async_wsync("--help")
    assert done.returncode == 0
    assert all(f"    {name} " in done.stdout for name in ("demo", "lock", "push"))
