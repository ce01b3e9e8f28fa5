"""Each example runs as is, in a process and a Ray cluster of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHOWS = {
    "minimal": [
        r"version 2: .* in 4 tensors",
        r"(?s)version 2, equal to the trainer's: True.*version 2, equal .*: True",
    ],
    "two_sources": [r"version 2: .* in 8 tensors", r"(?s)version 2, equal to both stages': True.*equal .*: True"],
    "own_engine": [r"my-engine: current, version 2", r"tokens by weight version: \{1: \d+, 2: \d+\}"],
    "survive_engine_crash": [
        r"rollout-1 was killed; the others had version 2 after \d+\.\d+ s",
        r"before its first update: .*rollout-1b stale",
        r"(?s)rollout-1b: current, version 2.*rollout-1b: current, version 3",
        r"samples from versions \[.*\b3\], 0 of them torn",
    ],
}


def run(path: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, str(path), *arguments], capture_output=True, text=True, timeout=100, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_tested() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == SHOWS.keys()


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Future[str]]]:
    """Two at a time: each mostly waits for its own cluster to start."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {name: pool.submit(run, ROOT / "examples" / f"{name}.py") for name in SHOWS}


@pytest.mark.parametrize("name", SHOWS)
def test_the_example_runs_as_is(name: str, runs: dict[str, Future[str]]) -> None:
    shown = runs[name].result()
    for pattern in SHOWS[name]:
        assert re.search(pattern, shown), shown
