"""`BroadcastLock`: one source at a time, for all processes of a Ray cluster that know its name."""

from __future__ import annotations

from typing import Any

from async_wsync import arguments
from async_wsync.errors import LockUnavailable
from async_wsync.lock.hold import Hold, holdings
from async_wsync.lock.server import LockServer
from async_wsync.runtime.actor_client import ActorClient
from async_wsync.runtime.object_refs import RemoteDied
from async_wsync.runtime.threads import DaemonWorker

__all__ = ["BroadcastLock"]

STATUS_TIMEOUT = 5.0
#: What says which actor it is, and has an argument of its own.
ACTOR_NAMES = ("name", "namespace", "get_if_exists", "lifetime")


class BroadcastLock:
    """A handle on a named lock. Cheap to make, picklable, usable from any number of tasks.

    ``async with lock.hold(label="trainer") as held`` is the whole use; ``held.fence`` goes with every engine call.

    ``acquire_timeout``: limit of a `hold` that names none. ``warn_interval``: how often a wait logs whom it waits for.
    ``release_timeout``: how long a release is waited for; unconfirmed, it is left to the lease. ``liveness_actor``:
    keep a small actor that dies with this process, so that the server on another node notices that within 10 ms, not
    within 1 to 2 s. Seconds, all of them.
    """

    def __init__(
        self,
        *,
        name: str,
        namespace: str | None = None,
        handle: Any = None,
        ttl: float | None = None,
        acquire_timeout: float = 600.0,
        warn_interval: float = 30.0,
        release_timeout: float = 5.0,
        liveness_actor: bool = False,
    ) -> None:
        arguments.text("the name of a lock", name)
        arguments.text("namespace", namespace, none=True)
        limits = {
            "acquire_timeout": acquire_timeout,
            "warn_interval": warn_interval,
            "release_timeout": release_timeout,
        }
        for key, value in limits.items():
            arguments.seconds(key, value)
        arguments.seconds("ttl", ttl, none=True)
        arguments.flag("liveness_actor", liveness_actor)
        self.name = name
        self.namespace = namespace
        self._options: dict[str, Any] = {"ttl": ttl, "liveness_actor": liveness_actor, **limits}
        self._link = ActorClient(name=name, namespace=namespace, handle=handle, liveness_actor=liveness_actor)

    @classmethod
    def create(
        cls,
        *,
        name: str,
        namespace: str | None = None,
        ttl: float = 30.0,
        lifetime: str | None = None,
        server_options: dict[str, Any] | None = None,
        actor_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> BroadcastLock:
        """The lock called ``name``, made now if there is none; many processes may ask at once and share one.

        One that is found while it ends with its creator is made again, also when that shows only in the next seconds.
        It lives as long as the process that made it (and its handles), or with ``lifetime="detached"`` until
        `shutdown`. ``namespace``: Ray's, this job's by default. ``ttl``: the lease, seconds. ``server_options`` go
        to `LockServer`, ``actor_options`` to Ray, ``options`` as for `BroadcastLock`.
        """
        arguments.seconds("ttl", ttl)
        arguments.lifetime(lifetime)
        for_server = arguments.options("server_options", server_options, known=("waiter_silence", "pidfds"))
        if "waiter_silence" in for_server:
            arguments.seconds("server_options: waiter_silence", for_server["waiter_silence"])
        if "pidfds" in for_server:
            arguments.flag("server_options: pidfds", for_server["pidfds"])
        for_actor = arguments.options("actor_options", actor_options, reserved=ACTOR_NAMES)
        import ray

        lock = cls(name=name, namespace=namespace or ray.get_runtime_context().namespace, ttl=ttl, **options)
        ray_options = {
            "num_cpus": 0,  # schedulable on a full cluster
            "max_concurrency": 1,
            "max_restarts": -1,
            "max_task_retries": 0,  # a poll that Ray sent again by itself would be one that nobody counts
            "enable_task_events": False,
            **for_actor,
        }
        actor = ray.remote(LockServer).options(
            name=name, namespace=lock.namespace, get_if_exists=True, lifetime=lifetime, **ray_options
        )
        lock._link.get_or_make(lambda: actor.remote(name, ttl=ttl, **for_server))
        return lock

    @classmethod
    def connect(cls, *, name: str, namespace: str | None = None, **options: Any) -> BroadcastLock:
        """The lock called ``name``, which must exist by the time of its first use."""
        import ray

        return cls(name=name, namespace=namespace or ray.get_runtime_context().namespace, **options)

    def __repr__(self) -> str:
        state = "not looked up" if self._link.handle is None else "connected"
        return f"<BroadcastLock {self.name!r} in {self.namespace!r}: {state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # With the handle, so that Ray counts it: a lock lives as long as somebody holds one.
        return _rebuild, (self.name, self.namespace, self._link.handle, self._options)

    def hold(self, *, label: str, timeout: float | None = None, ttl: float | None = None) -> Hold:
        """The lock, for the length of an ``async with``.

        ``label`` names the holder to people. ``timeout``: seconds to wait for it, 0 to try once. ``ttl``: a lease
        shorter than the lock's own. Raises `AcquireTimeout` (with the lock's status), `SelfDeadlock`,
        `LockUnavailable`; on exit `LeaseLost` if the lease ended before the body did.
        """
        limit = self._options["acquire_timeout"] if timeout is None else timeout
        arguments.seconds("timeout", limit, zero=True)
        arguments.seconds("ttl", ttl, none=True)
        arguments.kind("label", label, str)
        return Hold(
            self._link,
            label=label,
            timeout=limit,
            ttl=self._options["ttl"] if ttl is None else ttl,
            warn_interval=self._options["warn_interval"],
            release_timeout=self._options["release_timeout"],
        )

    def refuse_holder(self) -> None:
        """Raise `SelfDeadlock` if the current task holds this lock. For work that is to hold it in another task."""
        holdings.check(self._link.key, self.name)

    async def status(self, *, timeout: float = STATUS_TIMEOUT) -> dict[str, Any]:
        """Plain data: ``held``, ``holder``, ``waiters``, ``last_fence``, ``quarantine_left``, ``transitions``."""
        answer: dict[str, Any] = await self._ask("status", timeout=timeout)
        return answer

    async def revoke(self, claim: str, *, timeout: float = STATUS_TIMEOUT) -> bool:
        """Take the lock from the holder of ``claim``; True if it held. The next grant has a higher fence."""
        return bool(await self._ask("revoke", claim, timeout=timeout))

    async def shutdown(self, *, timeout: float = STATUS_TIMEOUT) -> None:
        """End the lock's actor for everybody. Idempotent."""
        try:
            await self._link.ready(timeout)
        except LockUnavailable:
            return
        self._link.let_go()
        import ray

        worker = DaemonWorker("wsync-lock-shutdown")
        try:
            await worker.run(ray.kill, self._link.handle)
        finally:
            worker.close()

    async def _ask(self, method: str, *args: Any, timeout: float) -> Any:
        await self._link.ready(timeout)
        try:
            return await self._link.ask(method, *args, timeout=timeout)
        except TimeoutError as error:
            raise LockUnavailable(f"lock {self.name!r} did not answer within {timeout:g} s") from error
        except RemoteDied as error:
            raise LockUnavailable(f"lock {self.name!r} cannot be reached just now: {error}") from error


def _rebuild(name: str, namespace: str | None, handle: Any, options: dict[str, Any]) -> BroadcastLock:
    return BroadcastLock(name=name, namespace=namespace, handle=handle, **options)
