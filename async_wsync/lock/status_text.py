"""What a lock's status says, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["describe_holder", "describe_wait"]


def describe_holder(holder: Mapping[str, Any] | None) -> str:
    """'trainer-1 (pid 123 on 10.0.0.1) for 41 s, now: bucket 3/12'"""
    if holder is None:
        return "nobody"
    text = f"{holder.get('label') or 'an unnamed holder'} (pid {holder.get('pid')} on {holder.get('host') or '?'})"
    text += f" for {holder.get('held_for', 0.0):.1f} s"
    if stage := holder.get("stage"):
        text += f", now: {stage}"
    return text


def describe_wait(name: str, waited: float, last: Any) -> str:
    """One line about a wait for lock ``name``; ``last`` is the newest `Waiting` answer, None if none came."""
    text = f"lock {name!r}: waiting for {waited:.1f} s"
    if last is None:
        return (
            f"{text}; the lock actor has never answered: it is not scheduled (no free CPU, or no node that fits), "
            "or it cannot be reached"
        )
    if last.quarantine_left > 0:
        text += f"; the lock server has restarted and grants nothing for another {last.quarantine_left:.1f} s"
    elif last.holder is None:
        text += "; free, but others are before us"
    else:
        text += f"; held by {describe_holder(last.holder)}"
    return f"{text}; {last.position} waiting before us"
