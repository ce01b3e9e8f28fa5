"""Faults done to real lock holders, a number of times each: `tests/ray` runs them in short, `tests/chaos` in full.

Each returns its figures; each asserts that its fault happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import ray

from async_wsync.errors import LockError
from async_wsync.lock import BroadcastLock
from tests.support.cluster import ROOT
from tests.support.lock_actors import FenceEngine, ManyWaiters, Source, overlaps, stale_buckets
from tests.support.waiting import until


@dataclass
class Figures:
    """What a scenario measured; ``seconds`` are the waits that its promise is about."""

    COLUMNS: ClassVar[str] = "| fault | times | seconds | what came of it |"

    what: str
    repeats: int = 0
    seconds: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def p(self, share: float) -> float:
        return percentile(self.seconds, share)

    def row(self) -> str:
        times = ""
        if self.seconds:
            times = (
                f"p50 {self.p(0.5) * 1e3:.0f} ms, p99 {self.p(0.99) * 1e3:.0f} ms, max {max(self.seconds) * 1e3:.0f} ms"
            )
        facts = ", ".join(f"{value} {name}" for name, value in self.facts.items())
        return f"| {self.what} | {self.repeats} | {times} | {facts} |"


def added(parts: Sequence[Figures]) -> Figures:
    """One for all, of ``parts`` that did the same."""
    facts = {key: sum(part.facts[key] for part in parts) for key in parts[0].facts}
    seconds = [second for part in parts for second in part.seconds]
    return Figures(parts[0].what, sum(part.repeats for part in parts), seconds, facts)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def new_name(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex[:8]}"


def new_lock(**options: Any) -> BroadcastLock:
    return BroadcastLock.create(name=new_name("lock"), **options)


def new_engine(**options: Any) -> Any:
    return ray.remote(FenceEngine).options(num_cpus=0, **options).remote()


async def new_sources(count: int) -> list[Any]:
    sources = [ray.remote(Source).options(num_cpus=0, max_concurrency=8).remote() for _ in range(count)]
    await asyncio.gather(*[s.pid.remote() for s in sources])
    return sources


async def applied_by(engine: Any, label: str) -> int:
    applied, _ = await engine.record.remote()
    return sum(who == label for _, who in applied)


async def take_and_send(lock: BroadcastLock, engine: Any, label: str, timeout: float) -> tuple[float, int]:
    """One hold with one bucket; returns when it was granted, and its fence."""
    async with lock.hold(label=label, timeout=timeout) as held:
        granted = time.monotonic()
        assert await engine.bucket.remote(held.fence, label), "the new holder's bucket was refused"
        return granted, held.fence


# ------------------------------------------------------------------------------------ contention


async def contention(processes: int, times: int) -> Figures:
    """``processes`` actors take the lock ``times`` each, as fast as it goes."""
    lock = new_lock()
    sources = await new_sources(processes)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "alone")
        calls = [s.contend.remote(lock, f"source {n}", times, path) for n, s in enumerate(sources)]
        rows = [row for rows in await asyncio.gather(*calls) for row in rows]
    rows.sort(key=lambda row: row[4])
    # A hand-off is one that somebody was waiting for when the lock came free.
    gaps = [after[2] - before[3] for before, after in itertools.pairwise(rows) if after[1] <= before[3]]
    inversions, latest_answer = 0, float("inf")
    for sent, answered, *_ in reversed(rows):
        # Somebody granted later had its place before this one had even asked.
        inversions += latest_answer < sent
        latest_answer = min(latest_answer, answered)
    figures = Figures(f"contention, {processes} processes", repeats=len(rows), seconds=gaps)
    figures.facts = {
        "overlaps (times)": overlaps([(row[2], row[3], row[4]) for row in rows]),
        "overlaps (file lock)": sum(not row[5] for row in rows),
        "FIFO inversions": inversions,
    }
    for source in sources:
        ray.kill(source)
    await lock.shutdown()
    return figures


async def many_waiters(waiters: int, handovers: int, *, processes: int = 2, limit: float = 30.0) -> Figures:
    """Seconds between the first ``handovers`` grants to so many waiters, all of whom were there before the first."""
    figures = Figures(f"{waiters} waiters", repeats=handovers)
    lock = new_lock()
    actors = [ManyWaiters.remote(lock) for _ in range(processes)]
    async with lock.hold(label="the first"):
        await asyncio.gather(*[actor.queue.remote(waiters // processes) for actor in actors])
        queued = 0
        while queued < waiters:
            await asyncio.sleep(0.1)
            queued = len((await lock.status(timeout=limit))["waiters"])
    granted: list[float] = []
    over = time.monotonic() + limit
    while len(granted) < handovers and time.monotonic() < over:
        await asyncio.sleep(0.1)
        granted = sorted(
            [at for served in await asyncio.gather(*[actor.served.remote() for actor in actors]) for at in served]
        )
    figures.seconds = [after - before for before, after in itertools.pairwise(granted)]
    figures.facts = {"waiters": queued, "handovers": len(figures.seconds)}
    for actor in actors:
        ray.kill(actor)
    await lock.shutdown()
    return figures


# ------------------------------------------------------------------------------------ kill -9 of the holder


@contextlib.asynccontextmanager
async def driver_source(
    cluster: Any, lock: BroadcastLock, engine: str, label: str, liveness_actor: bool
) -> AsyncIterator[int]:
    """A source in a driver of its own; yields its pid."""
    command = [
        *(sys.executable, "-m", "tests.support.lock_actors"),
        *(cluster.address, cluster.namespace, lock.name, engine, label),
        "liveness_actor" if liveness_actor else "plain",
    ]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


async def kill_holders(cluster: Any, actors: int, drivers: int, *, way: str, seed: int = 1) -> Figures:
    """kill -9 of ``actors`` and ``drivers`` at random instants of their holds; how long until the next grant.

    ``way``: how the server may notice. "pid" and what else there is, "ref" only, or "liveness_actor" (and ref).
    """
    rng = random.Random(seed)
    lock = new_lock(ttl=30.0, liveness_actor=way == "liveness_actor", server_options={"pidfds": way == "pid"})
    engine_name = new_name("engine")
    engine = new_engine(name=engine_name)
    figures = Figures(f"kill -9 of the holder, noticed by {way}", repeats=actors + drivers)
    kinds = ["actor"] * actors + ["driver"] * drivers
    rng.shuffle(kinds)
    holding, previous = 0, 0
    ready: list[Any] = []
    for number, kind in enumerate(kinds):
        label = f"{kind} {number}"
        async with contextlib.AsyncExitStack() as stack:
            if kind == "actor":
                ready = ready or await new_sources(min(4, kinds[number:].count("actor")))
                source = ready.pop()
                pid = await source.pid.remote()
                source.loop.remote(lock, engine, label, 20, 0.005)
            else:
                pid = await stack.enter_async_context(
                    driver_source(cluster, lock, engine_name, label, way == "liveness_actor")
                )
            await until(lambda label=label: _sent(engine, label))
            await until(lambda: _watched_by(lock, way))
            await asyncio.sleep(rng.uniform(0.0, 0.3))
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            held = (await lock.status())["holder"]
            granted, fence = await take_and_send(lock, engine, f"heir of {label}", 60.0)
            await until(lambda pid=pid: _is_gone(pid))  # the kill did happen
            assert fence > previous
            previous = fence
            if held is not None and held["label"] == label:
                holding += 1
                figures.seconds.append(granted - killed)
    applied, refused = await engine.record.remote()
    assert holding > 0, "no kill struck a holder"
    figures.facts = {
        "struck a holder": holding,
        "stale buckets applied": stale_buckets(applied),
        "refused": len(refused),
    }
    await lock.shutdown()
    ray.kill(engine)
    return figures


async def _sent(engine: Any, label: str) -> bool:
    return await applied_by(engine, label) > 5


async def _watched_by(lock: BroadcastLock, way: str) -> bool:
    # A liveness_actor is a process that has to start; one whose client dies before that is noticed by the reference.
    holder = (await lock.status())["holder"]
    return holder is not None and way in holder["watched_by"]


async def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


# ------------------------------------------------------------------------------------ SIGSTOP of the holder


async def stop_holders(repeats: int, *, ttl: float, at_once: int = 5) -> Figures:
    """SIGSTOP a holder past its lease, let another one in, SIGCONT: its late bucket must be refused.

    ``at_once`` holders, of a lock each, are stopped side by side, since what takes long is waiting for a lease to end.
    """
    figures = Figures("SIGSTOP of the holder past its lease", repeats=repeats)
    figures.facts = dict.fromkeys(
        ("stale buckets applied", "holders told LeaseLost", "late buckets refused", "refused in all"), 0
    )
    for first in range(0, repeats, at_once):
        sources = await new_sources(min(at_once, repeats - first))
        await asyncio.gather(*[_stop_holder(source, figures, ttl) for source in sources])
    return figures


async def _stop_holder(source: Any, figures: Figures, ttl: float) -> None:
    lock, engine, pid = new_lock(ttl=ttl), new_engine(), await source.pid.remote()
    ended = source.hold_until_lost.remote(lock, engine, "stopped")
    await until(lambda: _sent(engine, "stopped"))
    os.kill(pid, signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        granted, fence = await take_and_send(lock, engine, "heir", 60.0)
        figures.seconds.append(granted - stopped)
    finally:
        os.kill(pid, signal.SIGCONT)
    kind, applied, old_fence = await ended
    assert old_fence < fence
    ray.kill(source)
    of_engine, refused = await engine.record.remote()
    figures.facts["stale buckets applied"] += stale_buckets(of_engine)
    figures.facts["holders told LeaseLost"] += kind == "LeaseLost"
    figures.facts["late buckets refused"] += not applied
    figures.facts["refused in all"] += len(refused)
    await lock.shutdown()
    ray.kill(engine)


# ------------------------------------------------------------------------------------ kill -9 of the server


async def kill_server(repeats: int, *, ttl: float, seed: int = 1) -> Figures:
    """kill -9 of the lock's actor while three sources hold, wait and release; how long until it grants again."""
    rng = random.Random(seed)
    lock = new_lock(ttl=ttl)
    engine = new_engine()
    sources = await new_sources(3)
    loops = [s.loop.remote(lock, engine, f"source {n}", 5, 0.01) for n, s in enumerate(sources)]
    figures = Figures("kill -9 of the lock server", repeats=repeats)
    struck = {"hold": 0, "wait": 0, "release": 0}
    own: list[tuple[float, float, int]] = []
    for number in range(repeats):
        await until(lambda: _granted_since_restart(lock))
        await asyncio.sleep(rng.uniform(0.0, 0.15))
        phase, killed = await (_kill_in_release(lock, own) if number % 3 == 2 else _kill_now(lock))
        for what in phase:
            struck[what] += 1
        await until(lambda: _granted_since_restart(lock))
        figures.seconds.append(time.monotonic() - killed)
    await asyncio.gather(*[s.stop.remote() for s in sources])
    holds = own + [hold for rows in await asyncio.gather(*loops) for hold in rows]
    applied, refused = await engine.record.remote()
    fences = [fence for fence, _ in applied]
    assert (await lock.status())["restarted"], "the server never restarted"
    figures.facts = {
        "overlaps (times)": overlaps(holds),
        "stale buckets applied": stale_buckets(applied),
        "fences fell": sum(b < a for a, b in itertools.pairwise(fences)),
        "refused": len(refused),
        **{f"during {what}": count for what, count in struck.items()},
    }
    for source in sources:
        ray.kill(source)
    await lock.shutdown()
    ray.kill(engine)
    return figures


async def _kill_now(lock: BroadcastLock) -> tuple[list[str], float]:
    status = await lock.status()
    os.kill(status["server_pid"], signal.SIGKILL)
    phases = [what for what, there in (("hold", status["holder"]), ("wait", status["waiters"])) if there]
    return phases, time.monotonic()


async def _kill_in_release(lock: BroadcastLock, own: list[tuple[float, float, int]]) -> tuple[list[str], float]:
    """Take a turn, and kill the server right after the release was sent."""
    impatient = BroadcastLock.connect(name=lock.name, release_timeout=0.1)  # the dead server will not answer
    async with impatient.hold(label="the test", timeout=60.0) as held:
        start, pid = time.monotonic(), (await lock.status())["server_pid"]
        own.append((start, time.monotonic(), held.fence))
        asyncio.get_running_loop().call_soon(os.kill, pid, signal.SIGKILL)
        killed = time.monotonic()
    return ["release"], killed


async def _granted_since_restart(lock: BroadcastLock) -> bool:
    try:
        return bool((await lock.status())["num_grants"] > 2)
    except LockError:
        return False
