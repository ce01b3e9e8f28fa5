"""Waiting for gloo's collectives from Python threads, in short steps.

Not by callbacks: gloo's threads call those whenever a collective ends, and one that ends while the interpreter does
takes the process down. Not in one long wait: gloo forgets a transfer that is half-way when its connection is lost, so
that its work ends with its timeout only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from async_wsync.groups.socket_watch import WATCH_INTERVAL, SocketWatch

__all__ = ["wait_for_gloo"]


def wait_for_gloo(work: Any, *, stop: Callable[[], bool], sockets: SocketWatch, deadline: float = math.inf) -> None:
    """Block until ``work`` is over. Raises RuntimeError: its own, or when ``stop()``, when a connection of the group
    is gone, or past ``deadline`` by time.monotonic(). After the latter three the work may still run."""
    while True:
        left = deadline - time.monotonic()
        try:
            work.wait(timedelta(seconds=max(0.001, min(left, WATCH_INTERVAL))))
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises the work's own error, or it has succeeded meanwhile
                return
            if stop():
                raise RuntimeError("the group was broken up") from None
            if not sockets.all_open:
                raise RuntimeError("a connection of the group was lost") from None
            if left <= 0:
                raise
