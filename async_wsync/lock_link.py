"""A client's line to the lock server: finding the actor, saying who we are, and one bounded call."""

from __future__ import annotations

import asyncio
import os
import uuid
from dataclasses import dataclass
from typing import Any

from async_wsync.core.lock_state import Who
from async_wsync.errors import LockError, LockUnavailable
from async_wsync.lock_watch import Beacon, ClientCard, own_card
from async_wsync.runtime.object_refs import RemoteDied, RemoteRaised, await_ref, node_address, ray_is_up, submit
from async_wsync.runtime.threads import DaemonWorker

__all__ = ["LockLink"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Identity:
    """This process, to one lock server. ``ref`` and ``beacon`` die with the process."""

    key: tuple[int, str]
    card: ClientCard
    ref: Any
    beacon: Any
    host: str
    actor_id: str


class LockLink:
    """Looks the actor up at first use, off the loop, and registers this process for the server's obituaries."""

    def __init__(self, *, name: str, namespace: str | None, handle: Any, beacon: bool, what: str = "lock") -> None:
        self.name = name
        self.what = what
        self.namespace = namespace
        self.handle = handle
        self.beacon = beacon
        self._identity: _Identity | None = None

    async def ready(self, timeout: float) -> None:
        """Raises `LockUnavailable` where there is no lock of this name, or Ray does not answer in time, or at all."""
        if not ray_is_up():  # each call of Ray below would start a cluster
            raise LockUnavailable(
                f"{self.what} {self.name!r}: Ray is not running in this process: ray.init() comes first"
            )
        if self.handle is not None and self._identity is not None and self._identity.key == _process_key():
            return
        # Both of these wait for Ray's control plane.
        worker = DaemonWorker("wsync-lock-setup")
        try:
            async with asyncio.timeout(timeout):
                if self.handle is None:
                    self.handle = await worker.run(self._look_up)
                self._identity = await worker.run(self._introduce)
        except TimeoutError as error:
            raise LockUnavailable(f"{self.what} {self.name!r}: Ray did not answer within {timeout:g} s") from error
        finally:
            worker.close()

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
        return self._identity.card.client

    @property
    def host(self) -> str:
        """The address of this process's node."""
        assert self._identity is not None
        return self._identity.host

    def who(self, label: str) -> Who:
        me = self._identity
        assert me is not None
        return Who(label=label, host=me.host, pid=me.card.pid, actor_id=me.actor_id, client=me.card.client)

    def register(self) -> None:
        """Ask the server to notice our death. Its answer is not waited for: the next poll tells if it is missing."""
        me = self._identity
        assert me is not None
        self.submit("watch", me.card, [me.ref], me.beacon)

    async def ask(self, method: str, *args: Any, timeout: float) -> Any:
        """Call the server. Raises TimeoutError, RemoteDied where it may come back, `LockUnavailable` where not."""
        return await self.answer(self.submit(method, *args), timeout=timeout)

    def submit(self, method: str, *args: Any) -> Any:
        """Send a call; the reference to its answer. Raises nothing, also where Ray was shut down."""
        return submit(getattr(self.handle, method), *args)

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
            card=own_card(uuid.uuid4().hex),
            ref=ray.put(b"wsync lock client"),
            # An actor dies with its owner.
            beacon=ray.remote(Beacon).options(num_cpus=0).remote() if self.beacon else None,
            host=node_address(),
            actor_id=ray.get_runtime_context().get_actor_id() or "",
        )


def _process_key() -> tuple[int, str]:
    """Changes with a fork and with a new connection to Ray, both of which make an identity useless."""
    import ray

    return os.getpid(), str(ray.get_runtime_context().get_worker_id())
