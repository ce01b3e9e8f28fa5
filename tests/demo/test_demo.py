"""The demo and the command line, as a user runs them."""

from __future__ import annotations

from tests.support.scripts import Scripts, run_python


def test_the_demo_ends_with_every_engine_on_the_trainers_very_bytes(scripts: Scripts) -> None:
    shown, figures = scripts.result("demo")
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
    scripts: Scripts,
) -> None:
    shown, figures = scripts.result("demo in a running cluster")
    assert figures["killed"] == ["rollout-1"]
    assert "v2   loss" in shown
    assert "failed: update to version 2 failed in bucket" in shown, "the fault did not fire in the middle"
    assert figures["versions"] == {"rollout-0": 3, "rollout-1-new": 3}
    assert figures["checksums_match"] is True
    assert all(len(update["reports"]) == 2 for update in figures["updates"])


def test_wrong_usage_is_told_without_a_traceback() -> None:
    done = run_python("-m", "async_wsync", "demo", "--updates", "0")
    assert done.returncode == 2
    assert done.stderr == "async-wsync: updates must be at least 1, got 0\n"


def test_the_command_names_its_subcommands() -> None:
    done = run_python("-m", "async_wsync", "--help")
    assert done.returncode == 0
    assert all(f"    {name} " in done.stdout for name in ("demo", "lock", "push"))
