"""Whether a gloo group's connections are still there.

When a connection is lost gloo fails the receives that still wait for their first byte, closes the socket, and forgets
the receive that is half-way: that one waits for its timeout. So whoever waits for a receive looks at the sockets. One
that is closed also means that gloo writes no more of its bytes into anybody's tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

__all__ = ["WATCH_INTERVAL", "SocketWatch"]

#: Seconds between two looks.
WATCH_INTERVAL = 0.05


class SocketWatch:
    """Watches file descriptors that somebody else owns. Their numbers may be used again, so inodes tell them apart."""

    def __init__(self, fds: Iterable[int]) -> None:
        self._inodes = {fd: inode for fd in fds if (inode := _inode(fd)) is not None}

    @property
    def sees(self) -> bool:
        """Whether there is anything to watch: not where sockets cannot be found, and not with NCCL."""
        return bool(self._inodes)

    def num_open(self) -> int:
        return sum(1 for fd, inode in self._inodes.items() if _inode(fd) == inode)

    @property
    def all_open(self) -> bool:
        return self.num_open() == len(self._inodes)

    @property
    def all_closed(self) -> bool:
        """True once every socket is known to be closed by its owner."""
        return self.sees and self.num_open() == 0


def _inode(fd: int) -> int | None:
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return None
