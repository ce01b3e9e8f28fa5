"""The lock's Ray actor: `lock.state` with a clock, and the liveness of its clients.

A synchronous actor whose methods never wait. An async one would reorder calls, and parked waiters could fill it up
so that the release that they wait for is never let in. Clients poll instead; their place in the queue keeps.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from typing import Any

from async_wsync.lock.messages import pack, unpack_poll
from async_wsync.lock.state import LockState, Released
from async_wsync.lock.wake_up import wake_up
from async_wsync.runtime.liveness import ClientIdentity, LivenessWatch

__all__ = ["LockServer"]

logger = logging.getLogger(__name__)


class LockServer:
    """Run as a named Ray actor with ``num_cpus=0``; `BroadcastLock.create` does that.

    ``ttl``: longest lease, seconds. After a restart it grants nothing for one ``ttl``, since it cannot know whom it
    had granted before. ``pidfds=False`` leaves the deaths on this machine to the slower ways of noticing.
    """

    def __init__(self, name: str, *, ttl: float = 30.0, waiter_silence: float = 3.0, pidfds: bool = True) -> None:
        self._name = name
        self._restarted = _was_restarted()
        now = time.monotonic()
        self._state = LockState(
            ttl=ttl,
            waiter_silence=waiter_silence,
            quarantine_until=now + ttl if self._restarted else now,
            last_now=now,
        )
        self._liveness = LivenessWatch(pidfds=pidfds, memory=2 * ttl + 60.0)
        self._woken: tuple[str, tuple[str, int]] | None = None  # who was told last: once for each turn

    def acquire(self, poll: list[Any]) -> list[Any]:
        """One packed poll; answers with the packed reply, and whether the client is watched (else it calls `watch`)."""
        claim, who, ttl, fence_seen, wake_up_at = unpack_poll(poll)
        now = self._drop_dead()
        self._liveness.heard(who.client)
        reply = self._state.acquire(
            claim,
            now=now,
            wall_ms=time.time_ns() // 1_000_000,
            who=who,
            ttl=ttl,
            fence_seen=fence_seen,
            wake_up_at=wake_up_at,
        )
        self._wake_next(now)
        return [*pack(reply), self._liveness.knows(who.client)]

    def heartbeat(self, claim: str, client: str, stage: str | None, fence: int) -> list[Any]:
        now = self._drop_dead()
        self._liveness.heard(client)
        reply = self._state.heartbeat(claim, now=now, stage=stage, fence=fence)
        self._wake_next(now)
        return [*pack(reply), self._liveness.knows(client)]

    def release(self, claim: str) -> Released:
        now = self._drop_dead()
        found = self._state.release(claim, now=now)
        self._wake_next(now)
        return found

    def revoke(self, claim: str) -> bool:
        """Take the lock from a claim, dead or alive; True if it held."""
        now = self._drop_dead()
        held = self._state.revoke(claim, now=now, why="revoked by hand")
        self._wake_next(now)
        return held

    def watch(self, identity: ClientIdentity, refs: list[Any], liveness_actor: Any = None) -> None:
        """Notice this client's death from here on. ``refs``: at most one reference, owned by the client."""
        self._liveness.watch(identity, refs[0] if refs else None, liveness_actor)

    def status(self) -> dict[str, Any]:
        """`LockState.status`, with the server's own pid, whether it has restarted, and how the holder is watched."""
        status = self._state.status(self._drop_dead())
        if self._state.holder is not None:
            status["holder"]["watched_by"] = self._liveness.how(self._state.holder.who.client)
        return {"name": self._name, "server_pid": os.getpid(), "restarted": self._restarted, **status}

    def _wake_next(self, now: float) -> None:
        """Tell the waiter whose turn it now is."""
        waiter = self._state.to_wake_up(now)
        if waiter is not None and waiter != self._woken:
            wake_up(waiter[1])
        self._woken = waiter

    def _drop_dead(self) -> float:
        """Act on the deaths that the watchers saw; returns now."""
        now = time.monotonic()
        for client, why in self._liveness.drain():
            if self._state.died(client, now=now, why=why):
                logger.warning("lock %r: the holder is gone (%s)", self._name, why)
        return now


def _was_restarted() -> bool:
    import ray

    with warnings.catch_warnings():
        # Deprecated within: it reads an attribute of its own that is.
        warnings.simplefilter("ignore", DeprecationWarning)
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
