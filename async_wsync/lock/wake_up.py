"""The lock server tells the next in turn that the lock is free: one empty datagram, and the waiter polls at once.

It is a hint and no more. Polls go on without it, only further apart, so that a datagram that a firewall drops costs
some milliseconds, and one that a stranger sends costs one poll.
"""

from __future__ import annotations

import asyncio
import logging
import socket

__all__ = ["Bell", "ring"]

logger = logging.getLogger(__name__)

Address = tuple[str, int]


class Bell:
    """A waiter's end. ``host``: the address under which the lock server's node reaches this one. Without a socket to
    spare it never rings."""

    def __init__(self, host: str) -> None:
        self.address: Address | None = None
        self._socket: socket.socket | None = None
        try:
            self._socket = socket.socket(_family(host), socket.SOCK_DGRAM)
            self._socket.setblocking(False)
            self._socket.bind(("", 0))
            self.address = (host, self._socket.getsockname()[1])
        except OSError as error:
            logger.debug("polling without a bell: %s", error)

    async def wait(self, delay: float) -> None:
        """Until it rings, or ``delay`` seconds have passed."""
        if self._socket is None:
            await asyncio.sleep(delay)
            return
        loop = asyncio.get_running_loop()
        rung = loop.create_future()
        loop.add_reader(self._socket, self._heard, self._socket, rung)
        try:
            await asyncio.wait([rung], timeout=delay)
        finally:
            loop.remove_reader(self._socket)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _heard(self, bell: socket.socket, rung: asyncio.Future[None]) -> None:
        try:
            bell.recv(1)
        except OSError:
            return  # a datagram of ours that could not be delivered, or one with a wrong checksum
        if not rung.done():
            rung.set_result(None)


def ring(address: Address) -> None:
    """The server's end. Never waits, and never fails: who is not reached polls later."""
    try:
        with socket.socket(_family(address[0]), socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(b"", address)
    except OSError as error:
        logger.debug("the waiter at %s was not told of its turn: %s", address, error)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
