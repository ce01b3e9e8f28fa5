"""The lock server tells the next in turn that the lock is free: one empty datagram, and the waiter polls at once.

It is only a hint: the waiter goes on polling, further apart. A datagram that a firewall drops costs some milliseconds,
and one that somebody else sends costs one poll.
"""

from __future__ import annotations

import asyncio
import logging
import socket

__all__ = ["WakeUpSocket", "wake_up"]

logger = logging.getLogger(__name__)

Address = tuple[str, int]


class WakeUpSocket:
    """A waiter's end. ``host``: the address under which the lock server's node reaches this one. If the process can
    open no more sockets, `wait` always takes its whole delay."""

    def __init__(self, host: str) -> None:
        self.address: Address | None = None
        self._socket: socket.socket | None = None
        try:
            self._socket = socket.socket(_family(host), socket.SOCK_DGRAM)
            self._socket.setblocking(False)
            self._socket.bind(("", 0))
            self.address = (host, self._socket.getsockname()[1])
        except OSError as error:
            logger.debug("no socket to be woken up at, so this waiter only polls: %s", error)

    async def wait(self, delay: float) -> None:
        """Wait for a datagram, ``delay`` seconds at most."""
        if self._socket is None:
            await asyncio.sleep(delay)
            return
        loop = asyncio.get_running_loop()
        woken = loop.create_future()
        loop.add_reader(self._socket, self._receive, self._socket, woken)
        try:
            await asyncio.wait([woken], timeout=delay)
        finally:
            loop.remove_reader(self._socket)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _receive(self, waker: socket.socket, woken: asyncio.Future[None]) -> None:
        try:
            waker.recv(1)
        except OSError:
            return  # a datagram of ours that could not be delivered, or one with a wrong checksum
        if not woken.done():
            woken.set_result(None)


def wake_up(address: Address) -> None:
    """The server's end. Never waits, and never fails: a waiter that is not reached polls later."""
    try:
        with socket.socket(_family(address[0]), socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(b"", address)
    except OSError as error:
        logger.debug("the waiter at %s was not told of its turn: %s", address, error)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
