"""Whether the address at which members are to find the source can be that, seen before anybody waits for it.

torch's store listens on all interfaces, and then connects to itself under the address it was given: where that leads
nowhere, it retries for its whole timeout and logs a C++ stack each time.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any

from async_wsync.runtime.threads import run_bounded

__all__ = ["check_master_address", "plain_master_address"]

#: Seconds for a name server's answer, at most. An unknown name is known to be one in milliseconds.
LOOK_UP = 6.0
#: Seconds for a connection to ourselves through an address that is not one of this machine's.
LOOP_BACK = 0.8

_ADVICE = "give the address at which the engines reach this process, or none"


def plain_master_address(address: str) -> str:
    """``address`` as the sockets take it, without brackets. ValueError for what no engine could connect to."""
    if not isinstance(address, str):
        raise ValueError(f"master_address must be a string, got {address!r}")
    host = address[1:-1] if address[:1] == "[" and address[-1:] == "]" else address
    if not host or re.search(r"[\s/\[\]@]", host) or re.fullmatch(r"[^:]*:\d*", host):
        raise ValueError(f"master_address {address!r} is no IP address or host name (without a port): {_ADVICE}")
    if ":" not in host and host == address and not re.fullmatch(r"[\d.]+", host):
        return host  # a name
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"master_address {address!r} is no IP address: {_ADVICE}") from None
    if getattr(ip, "scope_id", None) is not None:
        raise ValueError(
            f"master_address {address!r} has a zone, which means something on this machine only: {_ADVICE}"
        )
    if ip.is_unspecified or ip.is_multicast:
        raise ValueError(f"master_address {address!r} is no address that an engine could connect to: {_ADVICE}")
    return host


def check_master_address(address: str, *, limit: float) -> None:
    """OSError, with the reason, where this process cannot be reached at ``address``. Blocks for a name server's answer,
    at most ``limit`` seconds, and for less than a second else."""
    infos = _look_up(address, min(limit, LOOK_UP))
    if any(_is_ours(family, sockaddr) for family, _, _, _, sockaddr in infos):
        return
    # Not one of this machine's interfaces; it may still lead here, as the outer address of a translated network does.
    reason = _loop_back([sockaddr[0] for *_, sockaddr in infos], time.monotonic() + LOOP_BACK)
    if reason is not None:
        raise OSError(f"no interface of this machine has the address, and connecting to it fails ({reason}): {_ADVICE}")


def _look_up(address: str, seconds: float) -> Sequence[tuple[int, int, int, str, tuple[Any, ...]]]:
    def look_up() -> Sequence[tuple[int, int, int, str, tuple[Any, ...]]]:
        return socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)

    try:
        return run_bounded(look_up, seconds=seconds, name=f"look up {address}", on_expiry=lambda: None)
    except socket.gaierror as error:
        raise OSError(f"the name cannot be resolved ({error.strerror}): {_ADVICE}") from error
    except TimeoutError as error:
        raise OSError(f"no name server answered within {seconds:g} s") from error


def _is_ours(family: int, sockaddr: tuple[Any, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(sockaddr)
    except OSError:
        return False
    return True


def _loop_back(hosts: Iterable[str], deadline: float) -> OSError | None:
    """None where a connection to one of ``hosts`` comes out at this process, else why the last one did not."""
    reason = OSError("it has no address")
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with closing(socket.create_server(("", 0), family=family, dualstack_ipv6=both)) as server:
        for host in hosts:
            try:
                _connect_to_self(server, host, deadline)
                return None
            except OSError as error:
                reason = error
    return reason


def _connect_to_self(server: socket.socket, host: str, deadline: float) -> None:
    left = max(0.001, deadline - time.monotonic())
    with socket.create_connection((host, server.getsockname()[1]), timeout=left) as ours:
        token = secrets.token_bytes(16)
        ours.sendall(token)
        server.settimeout(max(0.001, deadline - time.monotonic()))
        theirs, _ = server.accept()
        with theirs:
            theirs.settimeout(max(0.001, deadline - time.monotonic()))
            if theirs.recv(len(token)) != token:
                raise OSError("another process answered")
