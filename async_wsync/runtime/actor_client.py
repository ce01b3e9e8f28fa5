"""A client's line to the lock server: finding the actor, saying who we are, and one bounded call."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from async_wsync.errors import LockError, LockUnavailable
from async_wsync.runtime.liveness import ClientIdentity, LivenessActor, own_identity
from async_wsync.runtime.object_refs import (
    RemoteDied,
    RemoteRaised,
    await_ref,
    node_address,
    ray_is_up,
    remote_error,
    submit,
)
from async_wsync.runtime.threads import pause, spawn, start_daemon, wait_done, wait_for
from async_wsync.types import Requester

__all__ = ["ActorClient"]

logger = logging.getLogger(__name__)

#: An actor whose creator has just died is still to be found for a moment, measured at 50 ms, and may even answer. Its
#: death within so many seconds after it was found, or has first answered, means that it was such a one:
DYING = 2.0
#: When, after `create` has found an actor, it is asked whether it is still there, seconds apart.
LOOKS = (0.05, 0.1, 0.2, 0.4, 0.8)
#: Seconds for another to take its name, asked for so far apart.
SUCCESSION, SUCCESSION_INTERVAL = 3.0, 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class _Identity:
    """This process, to one lock server. ``ref`` and ``liveness_actor`` die with the process."""

    key: tuple[int, str]
    identity: ClientIdentity
    ref: Any
    liveness_actor: Any
    host: str
    actor_id: str


class ActorClient:
    """Looks the actor up at first use, off the loop, and registers this process for the server's liveness."""

    def __init__(
        self, *, name: str, namespace: str | None, handle: Any, liveness_actor: bool, what: str = "lock"
    ) -> None:
        self.name = name
        self.what = what
        self.namespace = namespace
        self.handle = handle
        self.liveness_actor = liveness_actor
        self._identity: _Identity | None = None
        self._guard = threading.Lock()
        self._setup: Future[None] | None = None
        self._make: Callable[[], Any] | None = None
        self._young_until = math.inf  # of the actor of this handle: set once it is found, or has answered

    def get_or_make(self, make: Callable[[], Any]) -> None:
        """``make`` returns the actor of this name, made now if there is none.

        One that was there may be about to end with its creator. Then it is made again, as soon as that shows.
        """
        found = self._exists()
        self.handle = make()
        if found:
            self._make, self._young_until = make, time.monotonic() + DYING
            start_daemon(self._look_after, self.handle, name=f"wsync-{self.what}-found")

    async def ready(self, timeout: float) -> None:
        """Raises `LockUnavailable` if there is no actor of this name, or if Ray does not answer within ``timeout``."""
        if not ray_is_up():  # each call of Ray below would start a cluster
            raise LockUnavailable(
                f"{self.what} {self.name!r}: Ray is not running in this process: ray.init() comes first"
            )
        if self.handle is not None and self._identity is not None and self._identity.key == _process_key():
            return
        with self._guard:  # once for all the tasks that come at the same time
            if self._setup is None or self._setup.done():
                self._setup = spawn(self._set_up, name="wsync-lock-setup")  # it waits for Ray's control plane
            setup = self._setup
        try:
            async with asyncio.timeout(timeout):
                await wait_for(setup)
        except TimeoutError as error:
            raise LockUnavailable(f"{self.what} {self.name!r}: Ray did not answer within {timeout:g} s") from error

    def _set_up(self) -> None:
        if self.handle is None:
            self.handle = self._look_up()
        self._identity = self._introduce()

    @property
    def key(self) -> object:
        """The same for all links of this process to one lock."""
        return self.namespace, self.name

    def forget_identity(self) -> None:
        """The server took us for dead: come back as somebody new."""
        self._identity = None

    @property
    def client(self) -> str:
        assert self._identity is not None
        return self._identity.identity.client

    @property
    def host(self) -> str:
        """The address of this process's node."""
        assert self._identity is not None
        return self._identity.host

    def who(self, label: str) -> Requester:
        me = self._identity
        assert me is not None
        return Requester(
            label=label, host=me.host, pid=me.identity.pid, actor_id=me.actor_id, client=me.identity.client
        )

    def register(self) -> None:
        """Ask the server to notice our death. Its answer is not waited for: the next poll tells if it is missing."""
        me = self._identity
        assert me is not None
        self.submit("watch", me.identity, [me.ref], me.liveness_actor)

    async def ask(self, method: str, *args: Any, timeout: float) -> Any:
        """Call the server. Raises TimeoutError, RemoteDied if it may come back, else `LockUnavailable`."""
        handle = self.handle
        try:
            answer = await self.answer(submit(getattr(handle, method), *args), timeout=timeout)
        except LockUnavailable:
            if not await self._has_successor(handle):
                raise
            answer = await self.answer(self.submit(method, *args), timeout=timeout)
        self._young_until = min(self._young_until, time.monotonic() + DYING)
        return answer

    def submit(self, method: str, *args: Any) -> Any:
        """Send a call; the reference to its answer. Raises nothing, even if Ray was shut down."""
        return submit(getattr(self.handle, method), *args)

    def let_go(self) -> None:
        """The actor is to end: its end is no reason to look for another one, or to make one."""
        self._make, self._young_until = None, -math.inf

    async def _has_successor(self, dead: Any) -> bool:
        """Whether another actor has taken, or now takes, the place of one that was dying when we found it."""
        with self._guard:
            if self.handle is not dead:
                return True
        if time.monotonic() > self._young_until:
            return False
        search = spawn(self._succeed, dead, name=f"wsync-{self.what}-succession")
        await wait_done(search)
        return search.exception() is None and search.result()

    def _succeed(self, dead: Any) -> bool:
        """In a thread: get or make the actor until it is another one than ``dead``."""
        deadline = time.monotonic() + SUCCESSION
        while time.monotonic() < deadline and ray_is_up():
            make = self._make
            try:
                handle = self._look_up() if make is None else make()
            except LockUnavailable:
                handle = dead
            with self._guard:
                if self.handle is not dead:
                    return True
                if handle != dead:
                    logger.warning("%s %r: the actor found was dying; another takes its place", self.what, self.name)
                    self.handle, self._young_until = handle, math.inf
                    return True
            pause(SUCCESSION_INTERVAL)
        return False

    def _look_after(self, found: Any) -> None:
        """In a thread: replace an actor that was dying when it was found, also if nobody here uses it: our handle may
        have been given to others, who look its name up again."""
        for seconds in LOOKS:
            pause(seconds)
            if self.handle is not found or self._make is None:
                return
            try:
                error = submit(found.__ray_ready__).future().exception(timeout=DYING)
            except TimeoutError:
                return  # busy, or starting: not dead
            neutral = None if error is None else remote_error(error)
            if isinstance(neutral, RemoteDied) and neutral.certain:
                self._succeed(found)
                return

    async def answer(self, ref: Any, *, timeout: float) -> Any:
        try:
            async with asyncio.timeout(timeout):
                return await await_ref(ref, what=f"{self.what} {self.name!r}")
        except RemoteRaised as error:
            raise LockError(f"the server of {self.what} {self.name!r} failed: {error}") from error.cause
        except RemoteDied as error:
            if error.certain:
                raise self.gone(error) from error
            raise

    def gone(self, why: object) -> LockUnavailable:
        return LockUnavailable(
            f"{self.what} {self.name!r} is gone: {why}. It lives as long as the process that created it, unless it was "
            "created with lifetime='detached'."
        )

    def _exists(self) -> bool:
        try:
            self._look_up()
        except LockUnavailable:
            return False
        return True

    def _look_up(self) -> Any:
        import ray

        try:
            return ray.get_actor(self.name, namespace=self.namespace)
        except ValueError as error:
            raise LockUnavailable(
                f"there is no {self.what} {self.name!r} in namespace {self.namespace or 'of this job'!r}: it was never "
                "created, or the process that created it has ended"
            ) from error

    def _introduce(self) -> _Identity:
        import ray

        return _Identity(
            key=_process_key(),
            identity=own_identity(uuid.uuid4().hex),
            ref=ray.put(b"wsync lock client"),
            # An actor dies with its owner.
            liveness_actor=ray.remote(LivenessActor).options(num_cpus=0).remote() if self.liveness_actor else None,
            host=node_address(),
            actor_id=ray.get_runtime_context().get_actor_id() or "",
        )


def _process_key() -> tuple[int, str]:
    """Changes with a fork and with a new connection to Ray, both of which make an identity useless."""
    import ray

    return os.getpid(), str(ray.get_runtime_context().get_worker_id())
