"""A source inside a Ray actor shows its bar on the driver (field case B2)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

DRIVER = """
import ray, time
from async_wsync.progress import RayTqdmProgress, make_progress

@ray.remote(num_cpus=0)
class Source:
    def push(self):
        bar = make_progress(True)
        assert isinstance(bar._inner, RayTqdmProgress), "not known as an actor"
        bar.start(version=7, total_bytes=10_000, num_buckets=10_000)
        for bucket in range(10_000):
            bar.advance(nbytes=1, bucket=bucket)
        bar.close(status="done")
        bar.start(version=8, total_bytes=10, num_buckets=1)
        bar.close(status="cancelled")

context = ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=100_000_000)
source = Source.remote()
ray.get(source.push.remote())
time.sleep(3)  # the driver reads the worker's output once a second
print("SESSION", ray._private.worker._global_node.get_session_dir_path())
"""


def test_a_source_in_an_actor_shows_one_bar_on_the_driver_and_does_not_flood_the_logs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
        check=False,
    )
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
