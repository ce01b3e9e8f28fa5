"""Replaying an update with a kill at each of its events."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from async_wsync.protocols import EventHook
from async_wsync.types import UpdateEvent

__all__ = ["KillRun", "kill_at_every_event"]

V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class KillRun(Generic[V]):
    """One replay. ``fired``: ``victim`` was killed as event number ``at`` (from 1), ``event``, was told.

    ``value`` or ``error``: how the scenario ended. ``seconds_after``: from the kill to that end.
    """

    victim: V
    at: int
    fired: bool
    events: tuple[UpdateEvent, ...]
    event: UpdateEvent | None = None
    value: Any = None
    error: Exception | None = None
    seconds_after: float = 0.0


async def kill_at_every_event(
    scenario: Callable[[EventHook, V], Awaitable[Any]],
    victims: Iterable[V],
    kill: Callable[[V], object],
    *,
    at: Iterable[int] | None = None,
) -> AsyncIterator[KillRun[V]]:
    """Run ``scenario(on_event, victim)`` over and over, and kill ``victim`` at its first event, its second, ...

    Give ``on_event`` to the `WeightBroadcaster`. ``kill(victim)`` is called on the loop, at once, when the event is
    told: ``os.kill`` it, with SIGKILL or SIGSTOP. ``at``: only these events. Ends, for each victim, with the first run
    that saw fewer events. Yields a `KillRun` after each; check states in the loop's body, and put a new engine in
    the victim's place there.
    """
    for victim in victims:
        for point in itertools.count(1) if at is None else at:
            run = await _replay(scenario, victim, kill, point)
            yield run
            if not run.fired:
                break


async def _replay(
    scenario: Callable[[EventHook, V], Awaitable[Any]], victim: V, kill: Callable[[V], object], point: int
) -> KillRun[V]:
    events: list[UpdateEvent] = []
    killed_at = 0.0

    def hook(event: UpdateEvent) -> None:
        nonlocal killed_at
        events.append(event)
        if len(events) == point:
            killed_at = time.monotonic()
            kill(victim)

    value, error = None, None
    try:
        value = await scenario(hook, victim)
    except Exception as failure:
        error = failure
    return KillRun(
        victim=victim,
        at=point,
        fired=len(events) >= point,
        events=tuple(events),
        event=events[point - 1] if len(events) >= point else None,
        value=value,
        error=error,
        seconds_after=time.monotonic() - killed_at if killed_at else 0.0,
    )
