"""Real processes for the lock's tests: sources that hold it and send buckets, and an engine that checks fences."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
import time
from typing import Any

import ray

from async_wsync.errors import LeaseLost, LockError
from async_wsync.lock import BroadcastLock, Hold


class FenceEngine:
    """Takes a bucket if its fence is no lower than any seen before, and keeps a record of both kinds."""

    def __init__(self) -> None:
        self._seen = 0
        self._applied: list[tuple[int, str]] = []
        self._refused: list[tuple[int, str]] = []

    def bucket(self, fence: int, label: str) -> bool:
        if fence < self._seen:
            self._refused.append((fence, label))
            return False
        self._seen = fence
        self._applied.append((fence, label))
        return True

    def record(self) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
        return list(self._applied), list(self._refused)


def stale_buckets(applied: list[tuple[int, str]]) -> int:
    """How many were applied after one with a higher fence, or under the fence of another source."""
    stale, highest, owners = 0, 0, dict[int, str]()
    for fence, label in applied:
        if fence < highest or owners.setdefault(fence, label) != label:
            stale += 1
        highest = max(highest, fence)
    return stale


class TimedHold(Hold):
    """A hold that remembers when its first poll was sent and answered (monotonic seconds, the machine's)."""

    first_sent = 0.0
    first_answered = 0.0

    async def _poll(self, waker: Any, limit: float) -> Any:
        sent = time.monotonic()
        step = await super()._poll(waker, limit)
        if not self.first_answered and self._heard:
            self.first_sent, self.first_answered = sent, time.monotonic()
        return step


def timed_hold(lock: BroadcastLock, label: str) -> TimedHold:
    hold = lock.hold(label=label, timeout=120.0)
    hold.__class__ = TimedHold
    assert isinstance(hold, TimedHold)
    return hold


class Source:
    """An async actor (or a driver) that takes the lock and sends buckets."""

    def __init__(self) -> None:
        self.stopping = False

    async def pid(self) -> int:
        return os.getpid()

    async def stop(self) -> None:
        self.stopping = True

    async def loop(
        self, lock: BroadcastLock, engine: Any, label: str, buckets: int, pause: float
    ) -> list[tuple[float, float, int]]:
        """Hold, send, release, until told to stop; returns (granted, given up or lost, fence) of every hold."""
        holds = []
        while not self.stopping:
            try:
                async with lock.hold(label=label, timeout=60.0) as held:
                    start, end = time.monotonic(), 0.0
                    try:
                        for n in range(buckets):
                            held.set_stage(f"bucket {n}")
                            await engine.bucket.remote(held.fence, label)
                            await asyncio.sleep(pause)
                    finally:
                        end = time.monotonic()
                        holds.append((start, end, held.fence))
            except LockError:
                await asyncio.sleep(0.01)
        return holds

    async def hold_until_lost(self, lock: BroadcastLock, engine: Any, label: str) -> tuple[str, bool, int]:
        """Send until the lease is lost; returns what ended it, whether one more bucket was applied, and the fence."""
        fence = 0
        try:
            async with lock.hold(label=label, timeout=60.0) as held:
                fence = held.fence
                while True:
                    await engine.bucket.remote(fence, label)
                    await asyncio.sleep(0.005)
        except LeaseLost as error:
            return type(error).__name__, await engine.bucket.remote(fence, label), fence

    async def contend(
        self, lock: BroadcastLock, label: str, times: int, path: str
    ) -> list[tuple[float, float, float, float, int, bool]]:
        """(first poll sent, answered, granted, given up, fence, nobody else was in) of ``times`` short holds."""
        rows = []
        with open(path, "w") as file:
            for _ in range(times):
                hold = timed_hold(lock, label)
                async with hold:
                    granted = time.monotonic()
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        alone = True
                        fcntl.flock(file, fcntl.LOCK_UN)
                    except BlockingIOError:
                        alone = False
                    end = time.monotonic()
                rows.append((hold.first_sent, hold.first_answered, granted, end, hold.fence, alone))
        return rows

    async def wait_for(self, lock: BroadcastLock, label: str, timeout: float) -> tuple[float, int]:
        """(when granted, fence) of one hold."""
        async with lock.hold(label=label, timeout=timeout) as held:
            return time.monotonic(), held.fence


def overlaps(holds: list[tuple[float, float, int]]) -> int:
    """How many holds began before an earlier one had ended."""
    count, latest = 0, 0.0
    for start, end, _ in sorted(holds):
        count += start < latest
        latest = max(latest, end)
    return count


def drive() -> None:
    """``python -m tests.support.lock_actors ADDRESS NAMESPACE LOCK ENGINE LABEL``: a source that is its own driver."""
    address, namespace, name, engine_name, label, liveness_actor = sys.argv[1:]
    ray.init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)

    async def main() -> None:
        lock = BroadcastLock.connect(name=name, liveness_actor=liveness_actor == "liveness_actor")
        await Source().loop(lock, ray.get_actor(engine_name), label, 20, 0.005)

    asyncio.run(main())


if __name__ == "__main__":
    drive()


@ray.remote(num_cpus=0)
class ManyWaiters:
    """Many tasks of one process that each want the lock once, for a moment."""

    def __init__(self, lock: BroadcastLock) -> None:
        self._lock = lock
        self._tasks: list[asyncio.Task[None]] = []
        self._served: list[float] = []

    async def queue(self, count: int) -> None:
        self._tasks += [asyncio.create_task(self._wait(f"waiter {n}")) for n in range(count)]

    async def _wait(self, label: str) -> None:
        async with self._lock.hold(label=label):
            self._served.append(time.monotonic())

    async def served(self) -> list[float]:
        """When each was granted, by the machine's monotonic clock."""
        return list(self._served)
