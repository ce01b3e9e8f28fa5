"""CUDA streams of our own, so that training neither waits for a broadcast nor makes one wait.

Whatever is queued on one stream runs in its order, and every thread starts on the default stream, which most trainers
use. So our copies and collectives are queued on streams of their own, which wait on the GPU for what made the tensors
and for nothing that was queued later. On the CPU all of this does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["SideStream", "queued_by_now"]


def queued_by_now(device: torch.device) -> list[Any]:
    """An event behind all that this thread's current stream of ``device`` has queued so far; none for the CPU."""
    return [torch.cuda.current_stream(device).record_event()] if device.type == "cuda" else []


class SideStream:
    """A stream on ``device`` that nobody else queues on; nothing where that is the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def current(self, *, after: Iterable[Any] = ()) -> Iterator[None]:
        """This is the thread's current stream, and its device the current device, within. What is queued there runs
        after ``after``, events of other streams."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            for event in after:
                self._stream.wait_event(event)
            yield

    def keep(self, tensor: torch.Tensor) -> None:
        """Whoever drops ``tensor``: its memory is not given to others before what is queued here now is over."""
        if self._stream is not None and tensor.is_cuda:
            tensor.record_stream(self._stream)

    def mark(self) -> Any:
        """An event behind all that is queued here now; None on the CPU."""
        return None if self._stream is None else self._stream.record_event()

    def synchronize(self) -> None:
        """Block until all that is queued here is over; in a thread of one's own."""
        if self._stream is not None:
            self._stream.synchronize()
