"""Forming a broadcaster's groups before the first update asks for them."""

from __future__ import annotations

from async_wsync.errors import EngineFailed
from async_wsync.protocols import HeldLock
from async_wsync.runtime.engine_calls import EngineCalls
from async_wsync.types import Call, EngineInfo
from async_wsync.update.context import BroadcasterContext
from async_wsync.update.hello import say_hello
from async_wsync.update.locked_work import LockedWork

__all__ = ["connect_all"]


async def connect_all(context: BroadcasterContext, locked_work: LockedWork, *, keep: bool) -> None:
    """Say hello to every engine, then form the groups under the lock. ``keep``: what was formed, if it fails."""
    fleet, groups, limits = context.fleet, context.groups, context.settings.timeouts
    there: dict[str, EngineInfo] = {}

    async def ask_all() -> None:
        there.update(await _who_is_there(context))

    async def form(calls: EngineCalls, held: HeldLock) -> None:
        # The deadline is ours, and knows who is missing; an adapter that gave up first would blame its engine.
        call = Call(source=context.source, fence=held.fence, timeout=limits.connect + limits.drain)
        formed = False
        try:
            await groups.ensure(
                [engine for engine in fleet.engines if engine.name in there],
                backend=context.pick_backend(list(there.values())),
                incarnation=lambda name: fleet.roster[name].incarnation,
                calls=calls,
                call=call,
            )
            formed = True
        finally:
            if not (formed or keep):
                await groups.drop(groups.all, call)

    await locked_work.run(form, before=ask_all)


async def _who_is_there(context: BroadcasterContext) -> dict[str, EngineInfo]:
    """The engines that answer. Raises the first `EngineFailed` if too few do."""
    fleet, settings = context.fleet, context.settings
    all_needed = settings.on_engine_failure == "raise"
    answers = await say_hello(
        fleet.engines,
        {name: fleet.roster[name] for name in fleet.names},
        source=context.source,
        limit=settings.timeouts.connect,
        field="connect",
        all_needed=all_needed,
    )
    there = {name: answer for name, answer in answers.items() if isinstance(answer, EngineInfo)}
    too_few = all_needed or len(there) < settings.min_engines
    for answer in answers.values():
        if isinstance(answer, EngineFailed) and too_few:
            raise answer
    return there
