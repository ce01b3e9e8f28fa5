"""Engines that come and go: a change of members happens wholly, or not at all.

First the groups of those that leave are closed, under the lock; the fleet changes last, in one synchronous step. So
whatever fails or is cancelled on the way, the members are the old ones or the new ones. A group that was closed in
vain is built again by the next update.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from async_wsync.errors import EngineFailed
from async_wsync.protocols import HeldLock, RolloutEngine
from async_wsync.runtime.cancellation import settle
from async_wsync.runtime.engine_calls import EngineCalls, asked, told
from async_wsync.types import Call
from async_wsync.update.context import BroadcasterContext
from async_wsync.update.locked_work import LockedWork

__all__ = ["change_members", "close_adapters"]

logger = logging.getLogger("async_wsync")


async def change_members(
    context: BroadcasterContext, locked_work: LockedWork, *, leaving: Sequence[str], joining: Sequence[RolloutEngine]
) -> None:
    """Let the engines ``leaving`` go and take in ``joining``. The groups have `Timeouts.close` to be left.

    Raises ValueError if the change makes no sense, and then, or for whatever the lock raises, nothing has changed.
    """
    fleet, groups, limit = context.fleet, context.groups, context.settings.timeouts.close
    if not fleet.after(leaving, joining):
        raise ValueError("that would leave no engine: close the broadcaster instead, or add others first")
    gone: list[RolloutEngine] = []

    def commit() -> None:
        gone.extend(fleet.exchange(leaving, joining))

    async def leave_and_commit(calls: EngineCalls, held: HeldLock) -> None:
        await groups.drop(theirs, Call(source=context.source, fence=held.fence, timeout=limit))
        commit()

    theirs = [group for group in groups.all if group.names & set(leaving)]
    try:
        if theirs:
            await locked_work.run(leave_and_commit)
        else:
            commit()
    finally:
        await close_adapters(gone, limit=limit)


async def close_adapters(engines: Iterable[RolloutEngine], *, limit: float) -> None:
    """Free what adapters hold, for ``limit`` seconds at most. Raises for none of them."""
    tasks = [asyncio.get_running_loop().create_task(_close(engine)) for engine in engines]
    await settle(tasks, timeout=limit)
    for task in tasks:
        task.cancel()  # only where it is not done


async def _close(engine: RolloutEngine) -> None:
    try:
        await told(engine.name, "aclose", asked(engine.aclose))
    except EngineFailed as error:
        logger.warning("closing the adapter of engine %s failed: %s", engine.name, error)
