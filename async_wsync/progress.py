"""Bars that move as buckets are acknowledged. A bar never fails an update.

The broadcaster calls ``start`` once an update, ``advance`` for every bucket that every engine has
acknowledged, and ``close`` once, whatever happens. `SafeProgress` keeps a broken bar harmless.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from tqdm import tqdm

from async_wsync import arguments
from async_wsync.protocols import Progress
from async_wsync.runtime.foreign_code import contained

__all__ = [
    "CallableProgress",
    "NoProgress",
    "ProgressState",
    "RayTqdmProgress",
    "SafeProgress",
    "TqdmProgress",
    "make_progress",
]

log = logging.getLogger(__name__)

LOG_FILE_INTERVAL = 10.0  # seconds before the first line, and between lines, where the output is not a terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressState:
    """What a progress callable is given. ``status``: running, done, failed or cancelled."""

    version: int
    done_bytes: int
    total_bytes: int
    done_buckets: int
    num_buckets: int
    status: str

    @property
    def fraction(self) -> float:
        return self.done_bytes / self.total_bytes if self.total_bytes else 1.0


class NoProgress:
    """Shows nothing."""

    def start(self, *, version: int, total_bytes: int, num_buckets: int) -> None:
        pass

    def advance(self, *, nbytes: int, bucket: int) -> None:
        pass

    def close(self, *, status: str) -> None:
        pass


class _Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """tqdm without its monitor thread and without its cross-process lock: this bar has one writer."""

    monitor_interval = 0


_Bar.set_lock(threading.RLock())


class TqdmProgress:
    """A tqdm bar in bytes on this process's standard error, or on ``file``.

    ``leave``: the full bar stays on the screen; one that failed stays in any case. Where the output is not a terminal,
    an update writes its last line, and one before that every `LOG_FILE_INTERVAL` seconds.
    """

    def __init__(self, *, file: TextIO | None = None, label: str = "weights", leave: bool = True) -> None:
        if file is not None and not all(callable(getattr(file, verb, None)) for verb in ("write", "flush", "isatty")):
            raise ValueError(f"file must be a text file (write, flush and isatty), got {file!r}")
        arguments.text("label", label)
        arguments.flag("leave", leave)
        self._file = file
        self._label = label
        self._leave = leave
        self._bar: _Bar | None = None

    def start(self, *, version: int, total_bytes: int, num_buckets: int) -> None:
        file = self._file if self._file is not None else sys.stderr
        quiet = 0.0 if file.isatty() else LOG_FILE_INTERVAL
        self._bar = _Bar(
            total=total_bytes,
            desc=f"{self._label} v{version}",
            unit="B",
            unit_scale=True,
            file=file,
            leave=self._leave,
            dynamic_ncols=True,
            mininterval=quiet or 0.1,
            delay=quiet,
        )

    def advance(self, *, nbytes: int, bucket: int) -> None:
        if self._bar is not None:
            self._bar.update(nbytes)

    def close(self, *, status: str) -> None:
        bar, self._bar = self._bar, None
        if bar is None:
            return
        if status != "done":
            bar.leave = True
            bar.set_description(f"{bar.desc} {status}", refresh=False)
        if bar.leave:
            bar.delay = 0.0  # tqdm would show nothing of a bar that closes within its delay
        bar.close()


class RayTqdmProgress:
    """A bar for a source inside a Ray actor: drawn by the driver, at most one log record a second."""

    def __init__(self, *, label: str = "weights") -> None:
        arguments.text("label", label)
        self._label = label
        self._bar: Any = None

    def start(self, *, version: int, total_bytes: int, num_buckets: int) -> None:
        from ray.experimental import tqdm_ray

        self._bar = tqdm_ray.tqdm(desc=f"{self._label} v{version}", total=total_bytes, unit="B")
        self._bar.refresh()  # the driver must know the bar before it hears that it closed

    def advance(self, *, nbytes: int, bucket: int) -> None:
        if self._bar is not None:
            self._bar.update(nbytes)

    def close(self, *, status: str) -> None:
        bar, self._bar = self._bar, None
        if bar is None:
            return
        if status != "done":
            bar.set_description(f"{bar._desc} {status}")
        bar.close()


class CallableProgress:
    """Calls ``fn`` with a `ProgressState` at the start, after every bucket and at the end."""

    def __init__(self, fn: Callable[[ProgressState], object]) -> None:
        arguments.function("fn", fn, none=False)
        self._fn = fn
        self._state = ProgressState(
            version=0, done_bytes=0, total_bytes=0, done_buckets=0, num_buckets=0, status="running"
        )

    def start(self, *, version: int, total_bytes: int, num_buckets: int) -> None:
        self._tell(
            ProgressState(
                version=version,
                done_bytes=0,
                total_bytes=total_bytes,
                done_buckets=0,
                num_buckets=num_buckets,
                status="running",
            )
        )

    def advance(self, *, nbytes: int, bucket: int) -> None:
        self._step(nbytes, 1, "running")

    def close(self, *, status: str) -> None:
        self._step(0, 0, status)

    def _step(self, nbytes: int, num_buckets: int, status: str) -> None:
        old = self._state
        self._tell(
            ProgressState(
                version=old.version,
                done_bytes=old.done_bytes + nbytes,
                total_bytes=old.total_bytes,
                done_buckets=old.done_buckets + num_buckets,
                num_buckets=old.num_buckets,
                status=status,
            )
        )

    def _tell(self, state: ProgressState) -> None:
        self._state = state
        self._fn(state)


class SafeProgress:
    """Wraps a bar so that it never raises and closes exactly once for every start.

    A bar that raises is logged once and left alone from then on, until the next start.
    """

    def __init__(self, inner: Progress) -> None:
        self._inner = inner
        self._open = False
        self._broken = False
        self._logged = False

    def start(self, *, version: int, total_bytes: int, num_buckets: int) -> None:
        self.close(status="failed")  # an update that was given up without a word
        self._open, self._broken = True, False
        self._guard(lambda: self._inner.start(version=version, total_bytes=total_bytes, num_buckets=num_buckets))

    def advance(self, *, nbytes: int, bucket: int) -> None:
        if self._open and not self._broken:
            self._guard(lambda: self._inner.advance(nbytes=nbytes, bucket=bucket))

    def close(self, *, status: str) -> None:
        if self._open:
            self._open = False
            self._guard(lambda: self._inner.close(status=status))

    def _guard(self, call: Callable[[], None]) -> None:
        try:
            with contained():
                call()
        except Exception:
            self._broken = True
            if not self._logged:
                self._logged = True
                log.warning("the progress bar raised; updates go on without it", exc_info=True)


def make_progress(progress: bool | Progress | Callable[[ProgressState], object]) -> SafeProgress:
    """The bar for a ``progress`` argument: True, False, a `Progress`, or a callable taking a `ProgressState`."""
    if isinstance(progress, SafeProgress):
        return progress
    if progress is True:
        return SafeProgress(RayTqdmProgress() if _inside_ray_actor() else TqdmProgress())
    if progress is False:
        return SafeProgress(NoProgress())
    if all(callable(getattr(progress, verb, None)) for verb in ("start", "advance", "close")):
        return SafeProgress(progress)  # type: ignore[arg-type]
    if callable(progress):
        return SafeProgress(CallableProgress(progress))
    raise ValueError(f"progress must be a bool, a Progress or a callable, got {progress!r}")


def _inside_ray_actor() -> bool:
    ray = sys.modules.get("ray")  # a process that never imported ray is no actor
    if ray is None or not ray.is_initialized():
        return False
    return ray.get_runtime_context().get_actor_id() is not None
