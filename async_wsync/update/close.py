"""The end of a broadcaster's groups. Our own side always ends, whatever has become of the engines, the lock and Ray."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack

from async_wsync.errors import LockError
from async_wsync.runtime.cancellation import settle
from async_wsync.types import Call
from async_wsync.update.context import BroadcasterContext
from async_wsync.update.locked_work import enter

__all__ = ["close_groups"]

logger = logging.getLogger("async_wsync")

#: Seconds for our own end of groups that are broken up, after everything else has used up its time.
OWN_END = 0.5


async def close_groups(context: BroadcasterContext) -> None:
    """Tell the engines to leave, under the lock, and close all groups, within `Timeouts.close`. Raises nothing."""
    source, limit = context.source, context.settings.timeouts.close
    ends = [group.source_end for group in context.groups.all]
    if not ends:
        return
    create = asyncio.get_running_loop().create_task
    leaving = create(_leave(context), name=f"{source}: leave all groups")
    await settle([leaving], timeout=limit)
    if leaving.done():
        return
    logger.warning("%s: leaving the groups took longer than %g s (Timeouts.close) and was broken off", source, limit)
    leaving.cancel()
    for end in ends:
        end.abort()
    await settle([create(end.aclose(OWN_END)) for end in ends], timeout=OWN_END)


async def _leave(context: BroadcasterContext) -> None:
    source, groups, limit = context.source, context.groups, context.settings.timeouts.close
    try:
        async with AsyncExitStack() as stack:
            held = await enter(stack, context.lock, label=f"{source} close", timeout=limit / 2)
            await groups.drop(groups.all, Call(source=source, fence=held.fence, timeout=limit / 2))
    except Exception as error:
        why = str(error) if isinstance(error, LockError) else repr(error)
        # The engines notice that we have left.
        logger.warning("%s: closing without the lock: %s", source, why)
        for group in groups.all:
            group.abort()
        await groups.drop(groups.all, Call(source=source, fence=0, timeout=limit / 2))
