"""Threads inside torch's store, and the interpreter's end.

One that comes back from C++ into an interpreter that is ending takes the process down with an abort. So before that
those that are inside are waited for a little, and none goes in any more.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from async_wsync.runtime.threads import pause

__all__ = ["EXIT_GRACE", "inside_store"]

#: Seconds that the interpreter's end waits for threads, and groups, to let go.
EXIT_GRACE = 1.0

_lock = threading.Lock()
_inside = 0
_ending = False
_exit_hook = threading.Lock()  # held once the hook is registered


@contextmanager
def inside_store() -> Iterator[None]:
    """Around short calls of a store in a daemon thread. RuntimeError, as the store's own, when the interpreter ends."""
    global _inside
    if _exit_hook.acquire(blocking=False):
        atexit.register(_at_exit)
    with _lock:
        if _ending:
            raise RuntimeError("the process ends")
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1


def _at_exit() -> None:
    global _ending
    with _lock:
        _ending = True
    deadline = time.monotonic() + EXIT_GRACE
    while _inside and time.monotonic() < deadline:
        pause(0.002)
