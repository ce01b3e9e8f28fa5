"""What Ray does to a driver's SIGTERM, put right."""

from __future__ import annotations

import signal
import sys
import threading

__all__ = ["end_quietly_on_sigterm"]


def end_quietly_on_sigterm() -> None:
    """Put Python's handler of SIGTERM in the place of the one that Ray's C++ part has put around it.

    That one prints a C++ stack, calls Python's, and aborts the process if it has not ended 3 s later, whatever it is
    still closing. Python's stays as it is: the one that Ray's Python part has set raises SystemExit. Does nothing
    without Ray, and outside of the main thread, which alone may do it.
    """
    ray = sys.modules.get("ray")
    if ray is None or threading.current_thread() is not threading.main_thread() or not ray.is_initialized():
        return
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None:  # None: it was not set by Python
        signal.signal(signal.SIGTERM, handler)
