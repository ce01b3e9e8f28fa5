"""Scripts as a user runs them, in processes of their own, most of them in a Ray cluster of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.cluster import ROOT, RayCluster

FENCED = re.compile(r"```python\n(.*?)```", re.DOTALL)

BAR_IN_AN_ACTOR = """
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


class Scripts:
    """Runs ``jobs`` two at a time, from when the first of them is asked for: each mostly waits for its cluster."""

    def __init__(self, jobs: Mapping[str, Callable[[], Any]]) -> None:
        self._jobs = jobs
        self._pool = ThreadPoolExecutor(max_workers=2)
        self._futures: dict[str, Future[Any]] = {}

    def result(self, name: str) -> Any:
        for job in (name, *self._jobs):
            if job not in self._futures:
                self._futures[job] = self._pool.submit(self._jobs[job])
        return self._futures[name].result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    environment.pop("RAY_ADDRESS", None)
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=110, env=environment, check=False
    )


def shown_by(script: Path) -> str:
    """The output of a script that must succeed."""
    done = run_python(str(script))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_demo(folder: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What a short demo shows, and its figures."""
    figures = folder / "out.json"
    command = ("-m", "async_wsync", "demo", "--updates", "3", "--steps", "8", "--json", str(figures), *arguments)
    done = run_python(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(figures.read_text())


def all_scripts(cluster: RayCluster, new_folder: Callable[[str], Path]) -> Scripts:
    """The demos, the README's example, the examples, and a source in an actor with a bar."""
    (code,) = FENCED.findall((ROOT / "README.md").read_text())
    readme = new_folder("readme") / "readme.py"
    readme.write_text(code)
    in_cluster = ("--address", cluster.address, "--sources", "2", "--kill-engine-at", "2")
    return Scripts(
        {
            "demo in a running cluster": partial(run_demo, new_folder("two-stages"), *in_cluster),
            "demo": partial(run_demo, new_folder("demo")),
            "README": partial(shown_by, readme),
            **{path.stem: partial(shown_by, path) for path in sorted((ROOT / "examples").glob("*.py"))},
            "bar in an actor": partial(run_python, "-c", BAR_IN_AN_ACTOR),
        }
    )
