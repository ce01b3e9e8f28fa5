"""An engine on another node, in a network namespace of its own, whose link is cut in the middle of an update.

``python -m tests.support.fleet_netns`` as root prints one JSON line of figures. Nobody gets an error if the link goes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from typing import Any

from tests.support.lock_netns import Link, cannot, environment, two_nodes


async def engine_cut(link: Link) -> dict[str, Any]:
    """Three engines, one of them behind the link. The update ends on the two others; healed, the third catches up."""
    import ray

    from async_wsync import TorchEngine, UpdateEvent, WeightBroadcaster
    from tests.support.changing_fleet import BUCKET_BYTES, LIMITS, FleetEngine, layers, source

    actor = ray.remote(FleetEngine)
    places = {"e0": "one", "e1": "two", "e2": "one"}
    handles = {
        name: actor.options(num_cpus=0, max_concurrency=4, resources={place: 0.01}).remote(layers)
        for name, place in places.items()
    }
    for handle in handles.values():
        await handle.pid.remote()
    cut: list[float] = []

    def cut_in_the_middle(event: UpdateEvent) -> None:
        if event.version == 2 and event.kind == "bucket_done" and not cut:
            cut.append(link.cut())

    async with WeightBroadcaster(
        [TorchEngine(handle, name=name) for name, handle in handles.items()],
        lock=None,
        timeouts=LIMITS,
        progress=False,
        bucket_bytes=BUCKET_BYTES,
        on_engine_failure="drop",
        on_event=cut_in_the_middle,
    ) as casting:
        await casting.update_weights(source(1), version=1)
        try:
            report = await casting.update_weights(source(2), version=2)
            took = time.monotonic() - cut[0]
            current = casting.current_engines()
        finally:
            link.heal()
        healed = time.monotonic()
        while casting.current_engines() != ("e0", "e1", "e2"):
            assert time.monotonic() < healed + 90, casting
            await asyncio.sleep(0.5)
            await casting.update_weights(source(3), version=(casting.version or 0) + 1)
        back = time.monotonic() - healed
    return {
        "case": "engine cut",
        "cut_happened": bool(cut),
        "seconds": took,
        "limit": LIMITS.bucket + 2.0,
        "dropped": report.dropped,
        "error": report.engines["e1"].error,
        "current": current,
        "back": back,
    }


def drive(prefix: str, address: str) -> None:
    import ray

    ray.init(address=address, namespace="netns", configure_logging=False, log_to_driver=False)
    limit = time.monotonic() + 60
    while "two" not in ray.cluster_resources():
        assert time.monotonic() < limit, "the second node never joined"
        time.sleep(0.2)
    print(json.dumps(asyncio.run(engine_cut(Link(prefix)))), flush=True)
    ray.shutdown()


def run(*, timeout: float) -> dict[str, Any]:
    """Make the two nodes, and run the case from the first."""
    with two_nodes() as (prefix, address):
        command = ["ip", "netns", "exec", prefix + "1", sys.executable, "-m", "tests.support.fleet_netns"]
        done = subprocess.run(
            [*command, "--drive", prefix, "--address", address],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
        if done.returncode != 0 or not rows:
            raise RuntimeError(f"after {rows}:\n{done.stderr[-4000:]}")
        return dict(rows[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--drive")
    parser.add_argument("--address", default="")
    given = parser.parse_args()
    if given.drive:
        drive(given.drive, given.address)
    elif why := cannot():
        sys.exit(why)
    else:
        print(json.dumps(run(timeout=300.0)))


if __name__ == "__main__":
    main()
