"""Forming a broadcaster's groups before the first update asks for them."""

from __future__ import annotations

from collections.abc import Callable

from async_wsync.errors import EngineFailed
from async_wsync.groups.manager import GroupManager
from async_wsync.protocols import HeldLock
from async_wsync.runtime.engine_calls import EngineCalls
from async_wsync.types import Call, EngineInfo
from async_wsync.update.context import Settings
from async_wsync.update.fleet import Fleet
from async_wsync.update.hello import greet
from async_wsync.update.locked_work import LockedWork

__all__ = ["connect_all"]


async def connect_all(
    fleet: Fleet,
    links: GroupManager,
    locked_work: LockedWork,
    settings: Settings,
    *,
    choose_backend: Callable[..., str],
    source: str,
    keep: bool,
) -> None:
    """Greet every engine, then form the groups under the lock. ``keep``: leave standing what was formed if it fails."""
    limits = settings.timeouts
    greeted: dict[str, EngineInfo] = {}

    async def greet_all() -> None:
        greeted.update(await _greet(fleet, settings, source))

    async def form(calls: EngineCalls, held: HeldLock) -> None:
        # The deadline is ours, and knows who is missing; an adapter that gave up first would blame its engine.
        call = Call(source=source, fence=held.fence, timeout=limits.connect + limits.drain)
        formed = False
        try:
            await links.ensure(
                [engine for engine in fleet.engines if engine.name in greeted],
                backend=choose_backend(list(greeted.values())),
                incarnation=lambda name: fleet.roster[name].incarnation,
                calls=calls,
                call=call,
            )
            formed = True
        finally:
            if not (formed or keep):
                await links.drop(links.all, call)

    await locked_work.run(form, before=greet_all)


async def _greet(fleet: Fleet, settings: Settings, source: str) -> dict[str, EngineInfo]:
    """The engines that answer. Raises the first `EngineFailed` if too few do."""
    records = {name: fleet.roster[name] for name in fleet.names}
    all_needed = settings.on_engine_failure == "raise"
    limit = settings.timeouts.connect
    answers = await greet(fleet.engines, records, source=source, limit=limit, field="connect", all_needed=all_needed)
    greeted = {name: answer for name, answer in answers.items() if isinstance(answer, EngineInfo)}
    too_few = all_needed or len(greeted) < settings.min_engines
    for answer in answers.values():
        if isinstance(answer, EngineFailed) and too_few:
            raise answer
    return greeted
