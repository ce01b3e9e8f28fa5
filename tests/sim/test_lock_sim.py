"""The lock's rules in a world where everything goes wrong, thousands of times."""

from __future__ import annotations

import os

import pytest

from tests.sim.__main__ import run_seed, run_seeds
from tests.sim.variants import VARIANTS

FAULTS = (
    "cancel while held",
    "cancel while waiting",
    "client kill",
    "client pause",
    "late grant",
    "partition",
    "server kill",
    "server pause",
    "buckets refused",
    "leases lost",
)


def check(first: int, count: int) -> None:
    violations, seen = run_seeds(first, count, processes=min(2, os.cpu_count() or 1))
    assert not violations, "replay with `python -m tests.sim --seed N --trace`:\n" + "\n".join(violations[:20])
    assert not [fault for fault in FAULTS if not seen[fault]], f"faults that never happened: {seen}"
    print(f"{count} seeds: {dict(sorted(seen.items()))}")


def test_two_thousand_worlds_hold_no_violation() -> None:
    check(0, 2000)


@pytest.mark.sim
def test_two_hundred_thousand_worlds_hold_no_violation() -> None:
    check(1_000_000, int(os.environ.get("WSYNC_SIM_SEEDS", "200000")))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_broken_rule_is_caught(variant: str) -> None:
    for seed in range(2000):
        if violations := run_seed(seed, variant):
            print(f"seed {seed}: {violations[0]}")
            return
    pytest.fail(f"2000 seeds did not notice {variant!r}")


def test_a_seed_replays_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    seed = next(seed for seed in range(2000) if run_seed(seed, "no quarantine"))
    traces = []
    for _ in range(2):
        run_seed(seed, "no quarantine", trace=True)
        traces.append(capsys.readouterr().out)
    assert traces[0] == traces[1]
    assert "VIOLATION" in traces[0]
