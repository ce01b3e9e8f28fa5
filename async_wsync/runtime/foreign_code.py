"""Where foreign code's exceptions cross over into ours: a source's, an engine adapter's, a hook's.

A CancelledError that foreign code raises would pass for the cancellation of our caller, whose TaskGroup then leaves
as if all were well; a SystemExit would end the loop in the middle of an update. Both are failures of that code. What
must get through is the cancellation of the very task that waits, the closing of a coroutine, and the exit that a
signal asks for.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import traceback
from types import TracebackType
from typing import Any, Literal

__all__ = ["ForeignExit", "as_raised", "contained", "ordinary"]


class ForeignExit(RuntimeError):
    """Foreign code raised what ends tasks, generators or processes (CancelledError, GeneratorExit, SystemExit,
    KeyboardInterrupt). ``__cause__`` is what it raised."""


def ordinary(error: BaseException) -> Exception:
    """``error`` itself if it is an Exception, else a `ForeignExit` with it as its cause."""
    if isinstance(error, Exception):
        return error
    exit_of_its = ForeignExit(f"raised {error!r}, though nobody asked it to end")
    exit_of_its.__cause__ = error
    return exit_of_its


def as_raised(error: BaseException) -> BaseException:
    """What the foreign code raised itself."""
    return error.__cause__ if isinstance(error, ForeignExit) and error.__cause__ is not None else error


class contained:
    """``with contained(): call()``: whatever foreign code raises in the block comes out as an Exception.

    ``awaits``: the block awaits, so that a cancellation of this task, or the closing of its coroutine, can come out
    of it, and does.
    """

    def __init__(self, *, awaits: bool = False) -> None:
        self._awaits = awaits
        self._task: asyncio.Task[Any] | None = None

    def __enter__(self) -> None:
        self._task = _running_task() if self._awaits else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if error is not None and not isinstance(error, Exception) and not self._is_meant_for_us(error):
            raise ordinary(error)
        return False

    def _is_meant_for_us(self, error: BaseException) -> bool:
        if isinstance(error, asyncio.CancelledError):
            return self._awaits and (self._task is None or self._task.cancelling() > 0)
        if isinstance(error, GeneratorExit):  # from outside, while the task did not run, or raised from inside
            return self._awaits and (self._task is None or self._task is not _running_task())
        return _is_by_a_signal(error)


def _running_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs here
        return None


def _is_by_a_signal(error: BaseException) -> bool:
    """True for the exit that a signal's handler asked for, wherever in the main thread it struck.

    A handler is called with the frame that it interrupted, which is also its caller: no other function is. Python's
    own handler of Ctrl-C has no frame: as long as it is in place, a KeyboardInterrupt is taken for its.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return True
    return any(_was_given_its_caller(frame) for frame, _ in traceback.walk_tb(error.__traceback__))


def _was_given_its_caller(frame: Any) -> bool:
    given = list(frame.f_locals.values())
    given += [item for value in given if isinstance(value, tuple) for item in value]
    return frame.f_back is not None and any(value is frame.f_back for value in given)
