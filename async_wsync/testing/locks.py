"""Lock actors as other frameworks have them, and ones that answer late. Use with ``ray.remote``."""

from __future__ import annotations

import threading
from typing import Any

from async_wsync.lock.server import LockServer

__all__ = ["BoolLockActor", "SlowLockServer"]


def _pass_time(seconds: float) -> None:
    if seconds > 0:
        threading.Event().wait(seconds)


class BoolLockActor:
    """``acquire() -> bool`` and ``release()``, like the lock of slime, miles and ROLL, plus a record.

    Knows nothing of owners: whoever releases, frees it. ``answer_delay``: seconds between deciding and answering,
    for `acquire` only; ``busy_polls``: refuse this many acquires first; ``strict``: releasing a free lock raises.
    ::

        handle = ray.remote(BoolLockActor).options(num_cpus=0).remote(answer_delay=0.5)
        lock = PolledLock(handle)
    """

    def __init__(self, *, answer_delay: float = 0.0, busy_polls: int = 0, strict: bool = False) -> None:
        self._held = False
        self._answer_delay = answer_delay
        self._busy_polls = busy_polls
        self._strict = strict
        self._record = {"acquires": 0, "granted": 0, "releases": 0, "releases_of_nothing": 0}

    def acquire(self) -> bool:
        self._record["acquires"] += 1
        granted = not self._held and self._record["acquires"] > self._busy_polls
        if granted:
            self._held = True
            self._record["granted"] += 1
        _pass_time(self._answer_delay)
        return granted

    def release(self) -> None:
        self._record["releases"] += 1
        if not self._held:
            self._record["releases_of_nothing"] += 1
            if self._strict:
                raise AssertionError("the lock is not held")
        self._held = False

    def held(self) -> bool:
        return self._held

    def record(self) -> dict[str, int]:
        """Counts of ``acquires`` (polls), ``granted``, ``releases``, and ``releases_of_nothing``."""
        return dict(self._record)


class SlowLockServer(LockServer):
    """The server of a `BroadcastLock` that decides at once and answers ``answer_delay`` seconds later. ::

    ray.remote(SlowLockServer).options(name="lock", num_cpus=0).remote("lock", answer_delay=0.5)
    lock = BroadcastLock.connect(name="lock")
    """

    def __init__(self, name: str, *, answer_delay: float = 0.5, **options: Any) -> None:
        super().__init__(name, **options)
        self._answer_delay = answer_delay

    def acquire(self, *args: Any, **kwargs: Any) -> Any:
        answer = super().acquire(*args, **kwargs)
        _pass_time(self._answer_delay)
        return answer
