"""Delays between tries. Pure: the caller draws the random number in [0, 1)."""

from __future__ import annotations

__all__ = ["full_jitter", "poll_delay"]


def poll_delay(hint: float, draw: float) -> float:
    """Seconds until the next poll: ``hint`` times U(0.5, 1), so that waiters do not march in step."""
    return hint * (0.5 + 0.5 * draw)


def full_jitter(failures: int, draw: float, *, base: float = 0.02, cap: float = 1.0) -> float:
    """Seconds to wait after ``failures`` transport errors in a row (1 for the first): U(0, min(cap, base * 2**n)).

    Jittered over the whole range, since one restart of a server fails all its clients at the same instant.
    """
    if failures < 1:
        return 0.0
    return draw * min(cap, base * 2.0 ** min(failures - 1, 60))
