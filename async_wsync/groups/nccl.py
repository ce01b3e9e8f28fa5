"""NCCL's part of an update group: its device, its stream, its errors, and its end.

Written against torch 2.13's sources, and never run where this was written, which had no GPU. What they say:

- A communicator lives on one device. A fresh thread's current device is cuda:0, whatever the tensors' is.
- NCCL's own stream first waits for the calling thread's current stream. A work's future is done once the work is
  queued, and its ``wait`` only makes the current stream wait; ``is_completed`` asks the GPU, and NCCL for errors.
- An asynchronous error, such as the death of a peer, is also noticed by the group's watchdog thread, which ends the
  process a minute later unless TORCH_NCCL_ASYNC_ERROR_HANDLING said otherwise when the group was made.
- A group that is freed without ``shutdown`` or ``abort`` warns, and aborts.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from async_wsync.groups.store import Store
from async_wsync.runtime.cuda_streams import SideStream
from async_wsync.types import GroupSpec

__all__ = ["NcclStream", "abort_group", "new_group", "shut_down", "wait_until_completed", "wire_device"]

logger = logging.getLogger(__name__)

#: Seconds by which NCCL's own limit lies above ours, which break a group off in an orderly way.
WATCHDOG_MARGIN = 60.0

#: What the watchdog of a group does about errors; torch has no option for it and reads it when a group is made.
_MODE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_LEAVES_THE_PROCESS_ALONE = ("0", "2")  # do nothing; abort the group
_mode_lock = threading.Lock()


def wire_device(backend: str, preferred: torch.device | None = None) -> torch.device:
    """Where the tensors of a collective lie at this process' end: the CPU for gloo. For NCCL ``preferred`` if that is
    on CUDA, else this thread's current device; ValueError where there is none."""
    if backend != "nccl":
        return torch.device("cpu")
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        lacks = "no CUDA device" if dist.is_nccl_available() else "a torch without NCCL"
        raise ValueError(f"backend 'nccl' cannot be used here: this process has {lacks}; use 'gloo', or 'auto'")
    if preferred is not None and preferred.type == "cuda" and preferred.index is not None:
        return preferred
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda", torch.cuda.current_device() if initialized else 0)


@contextmanager
def errors_left_to_us() -> Iterator[None]:
    """A group that is made within does not end the process over an asynchronous error.

    The environment is changed for as long as that takes, and only where it asks for another mode. A group that another
    thread makes in this very moment gets the same mode; whoever minds sets the variable to 0 or 2 for the process.
    """
    with _mode_lock:
        before = os.environ.get(_MODE)
        if before in _LEAVES_THE_PROCESS_ALONE:
            yield
            return
        os.environ[_MODE] = "2"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_MODE]
            else:
                os.environ[_MODE] = before


def new_group(spec: GroupSpec, rank: int, store: Store) -> Any:
    """A group that is not connected yet. Call it, and connect, with the group's device as the current one."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=spec.timeout + WATCHDOG_MARGIN)
    with errors_left_to_us():
        return dist.ProcessGroupNCCL(store, rank, spec.world_size, options)


class NcclStream:
    """Where a group's collectives are queued, and how one learns that they are over."""

    def __init__(self, device: torch.device) -> None:
        self._side = SideStream(device)
        self._last: Any = None

    def start(
        self,
        begin: Callable[[torch.Tensor], Any],
        tensors: Sequence[torch.Tensor],
        works: list[Any],
        *,
        after: Iterable[Any],
    ) -> None:
        """``begin`` a collective for each of ``tensors``, behind the events ``after``, and add the works to ``works``,
        those begun before a failure too."""
        with self._side.current(after=after):
            try:
                for tensor in tensors:
                    work = begin(tensor)
                    works.append(work)
                    work.wait()  # our stream waits for NCCL's, so that what waits for ours waits for both
                    self._side.keep(tensor)
            finally:
                self._last = self._side.mark()

    @property
    def idle(self) -> bool:
        """True once the GPU is done with all that was started, so that nothing can be read or written any more."""
        try:
            return self._last is None or bool(self._last.query())
        except RuntimeError:  # CUDA itself has failed in this process
            return True


def wait_until_completed(works: Sequence[Any], *, seconds: float, stop: threading.Event) -> None:
    """Block until ``works`` are over on the GPU. RuntimeError: their own, when ``stop`` is set, or after ``seconds``.

    Polls, since a wait for the GPU could not be broken off.
    """
    deadline, delay = time.monotonic() + seconds, 0.0002
    for work in works:
        while not work.is_completed():
            if stop.wait(delay):
                raise RuntimeError("the group was broken up")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the broadcast was not over after {seconds:g} s")
            delay = min(delay * 1.5, 0.005)
        work.wait()  # raises the work's own error


def shut_down(pg: Any) -> None:
    """Give back a group's communicator and its memory; in a daemon thread, as NCCL waits for others on this machine."""
    try:
        pg.shutdown()
    except Exception:
        logger.warning("NCCL did not shut a group down, which is aborted instead", exc_info=True)
        abort_group(pg)


def abort_group(pg: Any) -> None:
    """Break off what runs on the GPU and free the communicator; in a daemon thread."""
    try:
        pg.abort()
    except Exception:
        logger.warning("NCCL's abort failed", exc_info=True)
