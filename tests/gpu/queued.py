"""Work for a GPU's current stream that takes a known time."""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["busy_for"]

_CYCLES = 100_000_000


@cache
def _cycles_per_second() -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()  # type: ignore[no-untyped-call]
    torch.cuda._sleep(_CYCLES)
    end.record()  # type: ignore[no-untyped-call]
    end.synchronize()  # type: ignore[no-untyped-call]
    return float(_CYCLES / start.elapsed_time(end) * 1000)  # type: ignore[no-untyped-call]


def busy_for(seconds: float) -> None:
    """Keep the current stream busy; returns at once. Measures the clock first, when called for the first time."""
    torch.cuda._sleep(int(seconds * _cycles_per_second()))
