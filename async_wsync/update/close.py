"""The end of a broadcaster's groups. Our own side always ends, whatever has become of the engines, the lock and Ray."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack

from async_wsync.errors import LockError
from async_wsync.groups.manager import GroupManager
from async_wsync.protocols import UpdateLock
from async_wsync.runtime.cancellation import settle
from async_wsync.types import Call
from async_wsync.update.locked_work import enter

__all__ = ["close_groups"]

logger = logging.getLogger("async_wsync")

#: Seconds for our own end of groups that are broken up, after everything else has used up its time.
OWN_END = 0.5


async def close_groups(links: GroupManager, lock: UpdateLock, *, source: str, limit: float) -> None:
    """Say farewell to the engines under the lock, and close all groups, within ``limit`` seconds. Raises nothing."""
    groups = [link.group for link in links.all]
    if not groups:
        return
    create = asyncio.get_running_loop().create_task
    farewell = create(_farewell(links, lock, source=source, limit=limit), name=f"{source}: farewell")
    await settle([farewell], timeout=limit)
    if farewell.done():
        return
    logger.warning("%s: the farewell took longer than %g s (Timeouts.close) and was broken off", source, limit)
    farewell.cancel()
    for group in groups:
        group.abort()
    await settle([create(group.aclose(OWN_END)) for group in groups], timeout=OWN_END)


async def _farewell(links: GroupManager, lock: UpdateLock, *, source: str, limit: float) -> None:
    try:
        async with AsyncExitStack() as stack:
            held = await enter(stack, lock, label=f"{source} close", timeout=limit / 2)
            await links.drop(links.all, Call(source=source, fence=held.fence, timeout=limit / 2))
    except Exception as error:
        why = str(error) if isinstance(error, LockError) else repr(error)
        # The engines notice that we have left.
        logger.warning("%s: closing without the lock: %s", source, why)
        for link in links.all:
            link.abort()
        await links.drop(links.all, Call(source=source, fence=0, timeout=limit / 2))
