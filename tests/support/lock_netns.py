"""Two Ray nodes in two network namespaces of this machine, and a link between them that can be cut without a trace.

``python -m tests.support.lock_netns --repeats N`` as root prints one JSON line of figures. Packets are dropped silently
while the link is cut, as by a dead switch: nobody gets an error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TTL = 3.0
CUT = 2.0 * TTL
SWITCH, HOSTS = "x", ("1", "2")
NETWORK = "10.177.94"


def cannot() -> str | None:
    """Why this machine cannot do it."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2) here"
    probe = f"wsprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode != 0:
        return f"`ip netns add` fails: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


def environment() -> dict[str, str]:
    # Nobody else can reach these nodes; Ray would otherwise want a token from whoever joins.
    return {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[str, str]]:
    """A switch and two hosts with a Ray node each; yields the prefix of their names and the cluster's address."""
    prefix = f"ws{uuid.uuid4().hex[:5]}"
    switch = prefix + SWITCH
    nodes: list[subprocess.Popen[bytes]] = []
    # Its own folder, or Ray would note this head as the cluster that every ray.init() on the machine should join.
    folder = tempfile.mkdtemp(prefix="ws-")
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for host in HOSTS:
            name = prefix + host
            ip("netns", "add", name)
            ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"p{host}", "netns", switch)
            ip("-n", switch, "link", "set", f"p{host}", "master", "br0", "up")
            ip("-n", name, "addr", "add", f"{NETWORK}.{host}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        address = f"{NETWORK}.1:6379"
        nodes.append(
            start_node(
                prefix + "1",
                "--head",
                f"--temp-dir={folder}",
                "--include-dashboard=false",
                "--port=6379",
                f"--node-ip-address={NETWORK}.1",
                "one",
            )
        )
        wait_for_port(prefix + "1", address)
        nodes.append(start_node(prefix + "2", f"--address={address}", f"--node-ip-address={NETWORK}.2", "two"))
        yield prefix, address
    finally:
        for name in (prefix + end for end in (*HOSTS, SWITCH)):
            # Everything in there is ours; a polite end would drain for half a minute.
            inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
            for pid in inside.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        for node in nodes:
            node.kill()
            node.wait(10)
        shutil.rmtree(folder, ignore_errors=True)


def start_node(namespace: str, *arguments: str) -> subprocess.Popen[bytes]:
    *options, resource = arguments
    return subprocess.Popen(
        [
            *("ip", "netns", "exec", namespace, sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
            *(*options, "--num-cpus=4", "--object-store-memory=100000000", "--disable-usage-stats"),
            f"--resources={json.dumps({resource: 100})}",
        ],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def wait_for_port(namespace: str, address: str) -> None:
    host, port = address.split(":")
    probe = f"import socket; socket.create_connection(({host!r}, {port}), 1).close()"
    limit = time.monotonic() + 60
    while subprocess.run(
        ["ip", "netns", "exec", namespace, sys.executable, "-c", probe], capture_output=True
    ).returncode:
        if time.monotonic() > limit:
            raise RuntimeError("the Ray head did not come up")
        time.sleep(0.2)


# ------------------------------------------------------------------------------------ inside the first namespace


class Link:
    """The second host's port on the switch."""

    def __init__(self, prefix: str) -> None:
        self.switch = prefix + SWITCH

    def cut(self) -> float:
        ip("-n", self.switch, "link", "set", "p2", "nomaster")
        return time.monotonic()

    async def cut_together(self, ready: asyncio.Barrier) -> float:
        """Cut once all who share ``ready`` have got as far. Cutting and healing may be done again."""
        await asyncio.wait_for(ready.wait(), 60)
        return self.cut()

    def heal(self) -> None:
        ip("-n", self.switch, "link", "set", "p2", "master", "br0")


async def holder_cut(link: Link, ready: asyncio.Barrier) -> dict[str, Any]:
    """The holder is alone on node two. The lock lapses, another source takes over, the holder comes back too late."""
    import ray

    from async_wsync.lock import BroadcastLock
    from tests.support.lock_actors import FenceEngine, Source, stale_buckets
    from tests.support.lock_scenarios import applied_by, take_and_send, until

    here, there = {"num_cpus": 0, "resources": {"one": 0.01}}, {"num_cpus": 0, "resources": {"two": 0.01}}
    lock = BroadcastLock.create(name=f"netns-{uuid.uuid4().hex[:6]}", ttl=TTL, actor_options=here)
    engine = ray.remote(FenceEngine).options(**here).remote()
    source = ray.remote(Source).options(max_concurrency=8, **there).remote()
    ended = source.hold_until_lost.remote(lock, engine, "cut off")
    await until(lambda: _has_sent(applied_by, engine, "cut off"))
    cut = await link.cut_together(ready)
    try:
        granted, fence = await take_and_send(lock, engine, "heir", 60.0)
        before = await applied_by(engine, "cut off")
        await asyncio.sleep(max(0.0, cut + CUT - time.monotonic()))
        silent = await applied_by(engine, "cut off") == before
        await asyncio.wait_for(ready.wait(), 60)
    finally:
        link.heal()
    kind, late_applied, old_fence = await asyncio.wait_for(_value(ended), 90)
    _, new_fence = await asyncio.wait_for(_value(source.wait_for.remote(lock, "back", 60.0)), 90)
    applied, refused = await engine.record.remote()
    await lock.shutdown()
    return {
        "case": "holder cut",
        "cut_happened": silent,
        "lapse": granted - cut,
        "told": kind,
        "late_bucket_applied": late_applied,
        "stale": stale_buckets(applied),
        "refused": len(refused),
        "fences_rise": old_fence < fence < new_fence,
    }


async def server_cut(link: Link, ready: asyncio.Barrier) -> dict[str, Any]:
    """The lock server is alone on node two. The holder lets go in time, nobody else gets in, then all goes on."""
    import ray

    from async_wsync.errors import AcquireTimeout
    from async_wsync.lock import BroadcastLock
    from tests.support.lock_actors import FenceEngine, Source, stale_buckets
    from tests.support.lock_scenarios import applied_by, take_and_send, until

    here, there = {"num_cpus": 0, "resources": {"one": 0.01}}, {"num_cpus": 0, "resources": {"two": 0.01}}
    lock = BroadcastLock.create(name=f"netns-{uuid.uuid4().hex[:6]}", ttl=TTL, actor_options=there)
    engine = ray.remote(FenceEngine).options(**here).remote()
    source = ray.remote(Source).options(max_concurrency=8, **here).remote()
    ended = source.hold_until_lost.remote(lock, engine, "holder")
    await until(lambda: _has_sent(applied_by, engine, "holder"))
    cut = await link.cut_together(ready)
    kept_out = False
    try:
        lost_at = asyncio.create_task(_value(ended))
        lost_at.add_done_callback(lambda _: times.append(time.monotonic()))
        times: list[float] = []
        try:
            await take_and_send(lock, engine, "heir", CUT - 1.0)
        except AcquireTimeout:
            kept_out = True
        await asyncio.sleep(max(0.0, cut + CUT - time.monotonic()))
        await asyncio.wait_for(ready.wait(), 60)
    finally:
        link.heal()
    kind, _, old_fence = await asyncio.wait_for(lost_at, 90)
    healed = time.monotonic()
    _, fence = await take_and_send(lock, engine, "heir", 90.0)
    recovered = time.monotonic()
    _, new_fence = await asyncio.wait_for(_value(source.wait_for.remote(lock, "back", 60.0)), 90)
    applied, refused = await engine.record.remote()
    await lock.shutdown()
    return {
        "case": "server cut",
        "cut_happened": kept_out,
        "lapse": times[0] - cut,
        "told": kind,
        "late_bucket_applied": False,
        "stale": stale_buckets(applied),
        "refused": len(refused),
        "fences_rise": old_fence < fence < new_fence,
        "recovery": recovered - healed,
    }


async def both(link: Link) -> list[dict[str, Any]]:
    """Two locks, one with its holder on node two and one with its server there, and one cut for both."""
    ready = asyncio.Barrier(2)
    return list(await asyncio.gather(holder_cut(link, ready), server_cut(link, ready)))


async def _has_sent(applied_by: Any, engine: Any, label: str) -> bool:
    return bool(await applied_by(engine, label) > 5)


async def _value(ref: Any) -> Any:
    return await ref


def drive(prefix: str, address: str, repeats: int) -> None:
    import ray

    ray.init(address=address, namespace="netns", configure_logging=False, log_to_driver=False)
    limit = time.monotonic() + 60
    while "two" not in ray.cluster_resources():
        assert time.monotonic() < limit, "the second node never joined"
        time.sleep(0.2)
    link = Link(prefix)
    for _ in range(repeats):
        for row in asyncio.run(both(link)):
            print(json.dumps(row), flush=True)
    ray.shutdown()


def run(repeats: int, *, timeout: float) -> list[dict[str, Any]]:
    """Make the two nodes, and run both cases ``repeats`` times from the first."""
    with two_nodes() as (prefix, address):
        command = ["ip", "netns", "exec", prefix + "1", sys.executable, "-m", "tests.support.lock_netns"]
        done = subprocess.run(
            [*command, "--drive", prefix, "--address", address, "--repeats", str(repeats)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
        if done.returncode != 0:
            raise RuntimeError(f"after {rows}:\n{done.stderr[-4000:]}")
        return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--drive")
    parser.add_argument("--address", default="")
    parser.add_argument("--repeats", type=int, default=1)
    given = parser.parse_args()
    if given.drive:
        drive(given.drive, given.address, given.repeats)
    elif why := cannot():
        sys.exit(why)
    else:
        print("\n".join(json.dumps(row) for row in run(given.repeats, timeout=600.0)))


if __name__ == "__main__":
    main()
