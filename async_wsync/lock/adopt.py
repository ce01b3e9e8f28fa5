"""Our lock behind a framework's two methods, so that its callers need no change.

slime, miles and ROLL make a small Ray actor with ``acquire() -> bool`` and ``release()`` and poll it. `adopt` makes
an actor with the same two methods that is also a full lock server: old callers and `BroadcastLock.connect(name=...)`
exclude each other, `status` shows both, and a lock that an old caller left held can be revoked.

What the old callers bring with them stays: they have no names, so that all of them wait in one place of the queue and
`release` trusts its caller; and nobody notices their deaths, so that their lease ends only by ``anonymous_ttl``.
"""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

from async_wsync import arguments
from async_wsync.lock.client import ACTOR_NAMES
from async_wsync.lock.server import LockServer
from async_wsync.lock.state import Granted, Released, Waiting
from async_wsync.types import Requester

__all__ = ["AdoptedLockServer", "adopt"]


class AdoptedLockServer(LockServer):
    """``anonymous_ttl``: seconds after which a lock held by an old caller is taken back; None for never, as before."""

    def __init__(self, name: str, *, anonymous_ttl: float | None = None, **options: Any) -> None:
        super().__init__(name, **options)
        self._anonymous_ttl = math.inf if anonymous_ttl is None else anonymous_ttl
        self._claims = (f"anonymous-{n}" for n in itertools.count(time.time_ns()))
        self._claim = next(self._claims)
        self._granted: str | None = None

    def acquire(self, poll: list[Any] | None = None) -> Any:
        """Without arguments: the old callers' poll, True if granted. Otherwise as `LockServer.acquire`."""
        if poll is not None:
            return super().acquire(poll)
        reply = self._state.acquire(
            self._claim,
            now=self._drop_dead(),
            wall_ms=time.time_ns() // 1_000_000,
            who=Requester(label="a caller of acquire()"),
            ttl=self._anonymous_ttl,
            unbounded=True,
        )
        if isinstance(reply, Waiting):
            return False
        granted = isinstance(reply, Granted)
        if granted:
            self._granted = self._claim
        self._claim = next(self._claims)  # the next old caller gets a claim of its own
        return granted

    def release(self, claim: str | None = None) -> Released:
        """Without arguments: free what an old caller holds, and nothing else."""
        if claim is not None:
            return super().release(claim)
        if self._granted is None:
            return Released.NOT_HELD
        granted, self._granted = self._granted, None
        return super().release(granted)


def adopt(
    *,
    name: str,
    namespace: str | None = None,
    ttl: float = 30.0,
    anonymous_ttl: float | None = None,
    lifetime: str | None = None,
    actor_options: dict[str, Any] | None = None,
) -> Any:
    """A Ray actor handle to give to the framework in place of its own lock actor; the same one for the same name.

    It does not restart after a crash, as theirs does not: a holder without a lease could not be waited out.
    """
    arguments.text("the name of a lock", name)
    arguments.text("namespace", namespace, none=True)
    arguments.seconds("ttl", ttl)
    arguments.seconds("anonymous_ttl", anonymous_ttl, none=True)
    arguments.lifetime(lifetime)
    for_actor = arguments.options("actor_options", actor_options, reserved=ACTOR_NAMES)
    import ray

    options = {"num_cpus": 0, "max_concurrency": 1, "max_restarts": 0, **for_actor}
    return (
        ray.remote(AdoptedLockServer)
        .options(name=name, namespace=namespace, get_if_exists=True, lifetime=lifetime, **options)
        .remote(name, ttl=ttl, anonymous_ttl=anonymous_ttl)
    )
