"""What the lock costs, and what turns are worth: ours, a bool lock polled every 100 ms, one with jittered back-off.

``python benchmarks/lock.py --json PATH``. First the uncontended acquire and release, beside two bare calls to an actor;
then 8 sources that send 20 buckets of 20 ms each, and take the lock for every bucket (``lock_scope="bucket"``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])

import ray  # noqa: E402

from async_wsync.lock import BroadcastLock  # noqa: E402

SOURCES, BUCKETS, BUCKET_SECONDS = 8, 20, 0.020
LOCKS = ("ours", "polled every 100 ms", "jittered back-off")


class BoolLock:
    """As slime and miles have it."""

    def __init__(self) -> None:
        self.held = False

    def acquire(self) -> bool:
        if self.held:
            return False
        self.held = True
        return True

    def release(self) -> None:
        self.held = False


class Source:
    """Sends buckets of a fixed length, one lock holding each."""

    async def ready(self) -> None: ...

    async def send(self, kind: str, lock: Any, start_at: float) -> tuple[list[float], float]:
        """Waits for the lock, seconds, of every bucket; and when the last was done."""
        waits = []
        await asyncio.sleep(max(0.0, start_at - time.monotonic()))
        for _ in range(BUCKETS):
            asked = time.monotonic()
            if kind == "ours":
                async with lock.hold(label="source"):
                    waits.append(time.monotonic() - asked)
                    await asyncio.sleep(BUCKET_SECONDS)
                continue
            delay = 0.01
            while not await lock.acquire.remote():
                if kind == "jittered back-off":
                    await asyncio.sleep(delay * (0.5 + random.random() / 2))
                    delay = min(delay * 2, 0.1)
                else:
                    await asyncio.sleep(0.1)
            waits.append(time.monotonic() - asked)
            await asyncio.sleep(BUCKET_SECONDS)
            await lock.release.remote()
        return waits, time.monotonic()


async def timed(call: Callable[[], Awaitable[Any]]) -> float:
    started = time.perf_counter()
    await call()
    return time.perf_counter() - started


async def uncontended(times: int) -> dict[str, float]:
    """Medians, interleaved so that a busy moment hits both."""
    lock = BroadcastLock.create(name="bench-uncontended")
    bare = ray.remote(BoolLock).options(num_cpus=0).remote()

    async def ours() -> None:
        async with lock.hold(label="bench"):
            pass

    async def two_calls() -> None:
        await bare.acquire.remote()
        await bare.release.remote()

    for _ in range(20):
        await ours()
        await two_calls()
    pairs = [(await timed(ours), await timed(two_calls)) for _ in range(times)]
    mine, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    await lock.shutdown()
    return {"ours_ms": mine * 1e3, "two_bare_calls_ms": theirs * 1e3, "ratio": mine / theirs}


async def contended(kind: str) -> dict[str, float]:
    sources = [ray.remote(Source).options(num_cpus=0).remote() for _ in range(SOURCES)]
    await asyncio.gather(*[s.ready.remote() for s in sources])
    lock: Any = BroadcastLock.create(name="bench-contended") if kind == "ours" else None
    handle = lock or ray.remote(BoolLock).options(num_cpus=0).remote()
    if lock is not None:
        await lock.status()
    start_at = time.monotonic() + 0.5
    results = await asyncio.gather(*[s.send.remote(kind, handle, start_at) for s in sources])
    waits = sorted(wait for mine, _ in results for wait in mine)
    makespan = max(end for _, end in results) - start_at
    for source in sources:
        ray.kill(source)
    if lock is not None:
        await lock.shutdown()
    ideal = SOURCES * BUCKETS * BUCKET_SECONDS
    return {
        "makespan_s": makespan,
        "of_ideal": makespan / ideal,
        "wait_p50_ms": statistics.median(waits) * 1e3,
        "wait_max_ms": waits[-1] * 1e3,
    }


async def main(json_path: Path | None, times: int) -> None:
    result: dict[str, Any] = {
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}, Ray {ray.__version__}",
        "uncontended": await uncontended(times),
        "contended": {kind: await contended(kind) for kind in LOCKS},
    }
    alone = result["uncontended"]
    print(result["machine"])
    print(
        f"uncontended acquire + release: {alone['ours_ms']:.2f} ms; "
        f"two bare calls: {alone['two_bare_calls_ms']:.2f} ms; ratio {alone['ratio']:.2f}"
    )
    ideal = SOURCES * BUCKETS * BUCKET_SECONDS
    print(f"{SOURCES} sources x {BUCKETS} buckets x {BUCKET_SECONDS * 1e3:.0f} ms, serial ideal {ideal:.2f} s:")
    print(f"{'':22}{'makespan':>10}{'of ideal':>10}{'wait p50':>11}{'wait max':>11}")
    for kind, row in result["contended"].items():
        print(
            f"{kind:22}{row['makespan_s']:8.2f} s{row['of_ideal']:10.2f}{row['wait_p50_ms']:8.0f} ms"
            f"{row['wait_max_ms']:8.0f} ms"
        )
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--times", type=int, default=500, help="uncontended rounds")
    given = parser.parse_args()
    ray.init(num_cpus=SOURCES, include_dashboard=False, configure_logging=False, log_to_driver=False)
    asyncio.run(main(given.json, given.times))
    ray.shutdown()
