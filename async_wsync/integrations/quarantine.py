"""Engines whose call of an earlier bucket has no answer yet: one more call could take effect in the middle of the next.

Known to this process only: the frameworks' own locks tell nothing to other sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from async_wsync.errors import EngineTimeout

__all__ = ["quarantine", "refuse_quarantined"]

_unanswered: dict[Any, Future[Any]] = {}


def quarantine(engine: Any, call: Future[Any]) -> None:
    """Keep ``engine`` (an actor's handle) out until ``call``, the outcome of its last one, is there."""
    _unanswered[engine] = call
    call.add_done_callback(lambda done: _settled(engine, done))


def _settled(engine: Any, call: Future[Any]) -> None:
    if _unanswered.get(engine) is call:
        del _unanswered[engine]


def refuse_quarantined(engines: Sequence[Any]) -> None:
    """`EngineTimeout` if one of ``engines`` is quarantined."""
    names = tuple(f"rollout_engines[{i}] {engine!r}" for i, engine in enumerate(engines) if engine in _unanswered)
    if names:
        raise EngineTimeout(
            f"{', '.join(names)}: quarantined: the call of an earlier bucket has no answer yet. Nothing was sent; wait "
            "until it answers or its process ends, or replace it",
            engine=names[0],
            phase="receive",
            field="drain",
            waiting_for=names,
        )
