"""Sockets that behave badly."""

from __future__ import annotations

import socket
from typing import Self

__all__ = ["PortSquatter"]


class PortSquatter:
    """Listens and never answers, as a program does that took the port you wanted. A context manager.

    ``port`` 0 takes a free one; read `port` afterwards. Connections are accepted by the kernel, and that is all.
    """

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.host = host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.bind((host, port))
            self._socket.listen(64)
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def visitors(self) -> int:
        """How many have connected since the last call. Each of them is hung up on now."""
        count = 0
        self._socket.setblocking(False)
        while True:
            try:
                self._socket.accept()[0].close()
            except BlockingIOError:
                return count
            count += 1
