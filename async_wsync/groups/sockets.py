"""This process's TCP connections, found by address.

Nothing in torch frees a blocked gloo collective. Shutting its sockets down does, in milliseconds, here and
at the peers, exactly as if this process had died. Linux only; elsewhere every function finds nothing, and
the group's own timeout is what bounds a blocked collective.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

__all__ = [
    "Address",
    "break_connections",
    "connected",
    "find_connections",
    "listeners",
    "local_address",
    "pack_address",
    "resolve",
    "unpack_address",
]

#: (IP address without brackets or zone, port)
Address = tuple[str, int]

_FD_DIR = "/proc/self/fd"

_duplicates: set[int] = set()
_duplicates_lock = threading.Lock()


def listeners() -> dict[int, Address]:
    """Every listening TCP socket of this process: inode to address."""
    found: dict[int, Address] = {}
    for _, sock in _tcp_sockets():
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            found[os.fstat(sock.fileno()).st_ino] = _plain(sock.getsockname())
    return found


def break_connections(match: Callable[[Address, Address], bool], *, among: Iterable[int] | None = None) -> int:
    """Shut down every connected TCP socket whose ``match(local, peer)`` is true; returns how many.

    ``among`` limits the search to these file descriptors: looking at all of a thousand takes 20 ms. Whoever reads or
    writes there, in this process or at the other end, gets an error or an end of file. The file descriptors stay their
    owner's.
    """
    return sum(1 for _, sock in _connected(match, among) if _shut_down(sock))


def find_connections(
    match: Callable[[Address, Address], bool], *, among: Iterable[int] | None = None
) -> frozenset[int]:
    """The file descriptors of the connections that `break_connections` would shut down."""
    return frozenset(fd for fd, _ in _connected(match, among))


def resolve(host: str) -> frozenset[str]:
    """All addresses of ``host``; empty where it has none."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return frozenset()
    return frozenset(_plain(info[4])[0] for info in infos)


def local_address(host: str, port: int) -> str | None:
    """The address of ours from which ``host`` is reached, or None where there is no way. Sends nothing."""
    try:
        family, kind, proto, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(target)
            return _plain(probe.getsockname())[0]
    except OSError:
        return None


@contextmanager
def connected(host: str, port: int, *, timeout: float) -> Iterator[socket.socket]:
    """A connection to (``host``, ``port``), closed on exit. Raises OSError, TimeoutError after ``timeout`` seconds."""
    with socket.create_connection((host, port), timeout=timeout) as sock:
        yield sock


def pack_address(address: Address) -> bytes:
    """The start of ``address`` as a C ``sockaddr_in`` or ``sockaddr_in6``."""
    host, port = address
    if ":" in host:
        return (
            struct.pack("=H", socket.AF_INET6) + struct.pack("!HI", port, 0) + socket.inet_pton(socket.AF_INET6, host)
        )
    return struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_pton(socket.AF_INET, host)


def unpack_address(raw: bytes) -> Address | None:
    """The address that a C ``sockaddr`` holds, or None where ``raw`` is something else."""
    if len(raw) < 24:
        return None
    family, port = struct.unpack("=H", raw[:2])[0], struct.unpack("!H", raw[2:4])[0]
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, raw[4:8]), port
    if family == socket.AF_INET6:
        return _plain((socket.inet_ntop(socket.AF_INET6, raw[8:24]), port))
    return None


def _tcp_sockets(among: Iterable[int] | None = None) -> Iterator[tuple[int, socket.socket]]:
    """(file descriptor, socket) of each open TCP socket; the socket object is a duplicate, closed when the next one is
    asked for.

    File descriptors come and go in other threads meanwhile. A duplicate cannot be swapped under our hands, so what
    is asked of it and done to it concerns one and the same socket.
    """
    if not sys.platform.startswith("linux"):
        return
    for number in map(int, os.listdir(_FD_DIR)) if among is None else among:
        sock = _duplicate(number)
        if sock is None:
            continue
        try:
            if sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6):
                yield number, sock
        finally:
            with _duplicates_lock:
                _duplicates.discard(sock.fileno())
                sock.close()


def _duplicate(number: int) -> socket.socket | None:
    """A duplicate of file descriptor ``number``; None where that is no socket, or itself the duplicate of a search that
    runs in another thread: taken for a connection of its own, it would seem lost a moment later."""
    try:
        if not os.readlink(f"{_FD_DIR}/{number}").startswith("socket:"):
            return None
        with _duplicates_lock:
            if number in _duplicates:
                return None
            fd = os.dup(number)
            _duplicates.add(fd)
    except OSError:
        return None
    try:
        return socket.socket(fileno=fd)
    except OSError:
        with _duplicates_lock:
            _duplicates.discard(fd)
            os.close(fd)
        return None


def _connected(
    match: Callable[[Address, Address], bool], among: Iterable[int] | None
) -> Iterator[tuple[int, socket.socket]]:
    for number, sock in _tcp_sockets(among):
        try:
            local, peer = _plain(sock.getsockname()), _plain(sock.getpeername())
        except OSError:
            continue  # listening, or not connected any more
        if match(local, peer):
            yield number, sock


def _shut_down(sock: socket.socket) -> bool:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True


def _plain(address: tuple[object, ...]) -> Address:
    host = str(address[0]).partition("%")[0].removeprefix("::ffff:")
    return host, int(str(address[1]))
