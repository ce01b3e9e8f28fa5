"""Awaiting Ray object references; the only file that knows Ray's exceptions.

Measured: cancelling an await on a reference never stops the remote call; ``asyncio.wait([ref])`` and
``create_task(ref)`` fail; a remote CancelledError makes a local TaskGroup exit as if all were well.
"""

from __future__ import annotations

import socket
import sys
from concurrent.futures import CancelledError, Future
from typing import Any

from async_wsync.errors import WeightSyncError
from async_wsync.runtime.threads import wait_done

__all__ = ["RemoteDied", "RemoteRaised", "await_ref", "node_address", "ray_is_up", "remote_error", "submit"]


class RemoteDied(WeightSyncError):
    """The process that was to answer is gone, or cannot be reached.

    ``certain`` is False where it may be alive behind a broken connection, and may have run the call.
    """

    what: str = ""
    certain: bool = True


class RemoteRaised(WeightSyncError):
    """The remote call raised. ``cause`` is its own exception, ``remote_traceback`` the text of its traceback."""

    what: str = ""
    cause: BaseException | None = None
    remote_traceback: str = ""


class _NeverSent:
    """In the place of a reference to the answer of a call that could not be sent."""

    def __init__(self, error: RemoteDied) -> None:
        self._error = error

    def future(self) -> Future[Any]:
        failed: Future[Any] = Future()
        failed.set_exception(self._error)
        return failed


def ray_is_up() -> bool:
    """Whether this process is connected to Ray. Most of Ray's own calls would start a cluster to find out."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def submit(method: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an actor's method, at once; the reference to its answer.

    If Ray was shut down in this process nothing is sent, and awaiting the reference raises `RemoteDied`.
    """
    if "ray" in sys.modules and not ray_is_up():
        return _NeverSent(RemoteDied("Ray was shut down in this process, and its actors with it"))
    return method.remote(*args, **kwargs)


async def await_ref(ref: Any, *, what: str = "") -> Any:
    """The value behind a Ray object reference.

    ``what`` names the call in the error. Raises `RemoteRaised` when the call raised (whatever it raised: a
    remote CancelledError does not become a local one) and `RemoteDied` when nobody is left to answer.
    Cancelling the await leaves the remote call alone; the reference can be awaited again.
    """
    future = ref.future()
    await wait_done(future)
    # What Ray raised is turned into ours before anything can take it for a local exception.
    error = CancelledError() if future.cancelled() else future.exception()
    if error is None:
        return future.result()
    raise _translate(error, what or "the remote call")


def remote_error(error: BaseException, *, what: str = "") -> WeightSyncError:
    """The neutral form of what a reference's own future failed with, for code that runs in threads."""
    return _translate(error, what or "the remote call")


def _translate(error: BaseException, what: str) -> WeightSyncError:
    if isinstance(error, RemoteDied):
        return error
    import ray.exceptions as rex

    # First: a task error that carries an actor's death tells of *another* actor, one that the callee talked to.
    if isinstance(error, rex.RayTaskError):
        return _raised(error, what)
    died = (
        rex.RayActorError,
        rex.WorkerCrashedError,
        rex.NodeDiedError,
        rex.ObjectLostError,
        rex.LocalRayletDiedError,
        rex.ActorUnschedulableError,
        rex.RuntimeEnvSetupError,
        rex.RpcError,
    )
    if isinstance(error, died):
        unsure = isinstance(error, rex.ActorUnavailableError | rex.RpcError)
        found = "cannot be reached" if unsure else "died"
        dead = RemoteDied(f"{what}: the process that runs it {found}: {_first_line(error)}", what=what)
        dead.certain = not unsure
        dead.__cause__ = error
        return dead
    raised = RemoteRaised(f"{what} failed: {type(error).__name__}: {_first_line(error)}", what=what, cause=error)
    raised.__cause__ = error
    return raised


def _raised(error: Any, what: str) -> RemoteRaised:
    import ray.exceptions as rex

    # Ray's dual exceptions (also a KeyError, say) hand on what they lack to the cause, which lacks it too.
    text = str(vars(error).get("traceback_str") or error)
    cause: BaseException = error
    while isinstance(cause, rex.RayTaskError) and isinstance(getattr(cause, "cause", None), BaseException):
        cause = cause.cause
    raised = RemoteRaised(f"{what} raised {type(cause).__name__}: {_first_line(cause)}", what=what, cause=cause)
    raised.remote_traceback = text
    raised.__cause__ = cause
    return raised


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "(no message)"


def node_address() -> str:
    """The address at which others reach this process: its Ray node's, or the host's where there is no Ray."""
    if ray_is_up():
        return str(sys.modules["ray"].util.get_node_ip_address())
    return host_address()


def host_address() -> str:
    """The address of the interface that leads outside, or the loopback's on a host without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address: a datagram socket sends nothing on connect
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
