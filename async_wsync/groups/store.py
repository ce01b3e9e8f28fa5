"""torch's TCPStore, entered and opened within our own limits.

Measured with torch 2.13: a client that reaches a silent foreign program ignores its own timeout; one that
finds nobody retries for all of it and logs a C++ stack each time; one client serves one call at a time.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection
from datetime import timedelta
from functools import partial

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from async_wsync.errors import RendezvousError
from async_wsync.groups import sockets
from async_wsync.groups.master_address import check_master_address
from async_wsync.runtime.threads import pause, run_bounded
from async_wsync.runtime.torch_threads import inside_store
from async_wsync.types import GroupSpec

__all__ = [
    "PrefixStore",
    "Store",
    "TCPStore",
    "enter_store",
    "first_line",
    "given_up_key",
    "open_store",
    "rendezvous_error",
    "shut_store",
]

logger = logging.getLogger(__name__)

#: Seconds for which a member tries again where nobody listens. The source listens before it tells anybody.
REFUSED_GRACE = 1.0


def open_store(address: str, port: int, name: str, connect_timeout: float) -> TCPStore:
    """Listen as group ``name``'s store; where ``port`` is taken, on a free one. Raises `RendezvousError` ("listen")."""
    try:
        check_master_address(address, limit=connect_timeout)
    except OSError as error:
        raise rendezvous_error(
            name, "listen", f"members cannot connect to master_address {address!r}: {error}"
        ) from error

    def listen(port: int) -> TCPStore:
        limit = timedelta(seconds=connect_timeout)
        with inside_store():
            return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=limit)

    for candidate in (port, 0) if port else (0,):
        try:
            return run_bounded(
                partial(listen, candidate),
                seconds=connect_timeout,
                name=f"listen {name}",
                on_expiry=lambda: None,
            )
        except (RuntimeError, TimeoutError) as error:
            if candidate and "EADDRINUSE" in str(error):
                logger.warning("port %d is taken; group %s listens on a free one", candidate, name)
                continue
            raise rendezvous_error(
                name, "listen", f"cannot listen at {address}:{candidate}: {first_line(error)}"
            ) from error
    raise AssertionError("unreachable")


def enter_store(spec: GroupSpec, deadline: float) -> TCPStore:
    """The source's store, as a client. ``deadline``: by time.monotonic(). Raises `RendezvousError` (step "reach")."""
    _check_listener(spec, deadline)
    return _enter(spec, deadline)


def _check_listener(spec: GroupSpec, deadline: float) -> None:
    """See that somebody listens: torch's client would retry for its whole timeout, and log a stack each time."""
    started = time.monotonic()
    while True:
        try:
            left = max(0.001, deadline - time.monotonic())
            with sockets.connected(spec.master_address, spec.master_port, timeout=left):
                return
        except OSError as error:
            now = time.monotonic()
            refused = isinstance(error, ConnectionRefusedError) and now < min(deadline, started + REFUSED_GRACE)
            if not refused:
                where = f"{spec.master_address}:{spec.master_port}"
                raise rendezvous_error(spec.name, "reach", f"nobody listens at {where}: {error}") from error
        pause(0.05)


def _enter(spec: GroupSpec, deadline: float) -> TCPStore:
    left = max(0.1, deadline - time.monotonic())
    ends = _ends(spec)
    before = sockets.find_connections(lambda _, peer: peer in ends)  # this process's own business with whoever it is

    def give_way() -> None:
        new = sockets.find_connections(lambda _, peer: peer in ends) - before
        sockets.break_connections(lambda _, peer: peer in ends, among=new)

    def enter() -> TCPStore:
        with inside_store():
            return TCPStore(spec.master_address, spec.master_port, is_master=False, timeout=timedelta(seconds=left))

    try:
        return run_bounded(
            enter,
            seconds=left,
            name=f"enter {spec.name}",
            on_expiry=give_way,
        )
    except (RuntimeError, TimeoutError) as error:
        where = f"{spec.master_address}:{spec.master_port}"
        if isinstance(error, TimeoutError):
            found = f"whoever listens at {where} did not answer as a torch store within {spec.connect_timeout:g} s"
            message = f"{found}; it may be another program that took the port"
        else:
            message = f"no torch store at {where}: {first_line(error)}"
        raise rendezvous_error(spec.name, "reach", message) from error


def given_up_key(spec: GroupSpec) -> str:
    """The key by which a source tells members on their way that there will be no group."""
    return f"async_wsync/{spec.name}/given-up"


def shut_store(spec: GroupSpec) -> None:
    """Break this process's connections to the store, on both sides: whoever still waits there gets an error.

    torch has no way to close a store; one lives as long as anything, a traceback even, refers to it.
    """
    ends = _ends(spec)
    sockets.break_connections(lambda local, peer: local in ends or peer in ends)


def _ends(spec: GroupSpec) -> frozenset[sockets.Address]:
    """The store's end of a connection, by each of its host's addresses."""
    return frozenset((host, spec.master_port) for host in sockets.resolve(spec.master_address))


def rendezvous_error(
    name: str, step: str, message: str, missing: Collection[int] = (), *, is_collective: bool = False
) -> RendezvousError:
    interfaces = ", ".join(
        f"{variable}={os.environ.get(variable, '(unset)')}" for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    )
    return RendezvousError(
        f"group {name}, {step}: {message} [{interfaces}]",
        group=name,
        phase="connect",
        step=step,
        missing_ranks=tuple(sorted(missing)),
        is_collective=is_collective,
    )


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
