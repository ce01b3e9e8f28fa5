"""The two steps that are worth asking for again: dropping the cache, and going on."""

from __future__ import annotations

import asyncio
import itertools

from async_wsync.errors import EngineBusy, EngineDied, EngineFailed, EngineReplaced
from async_wsync.protocols import RolloutEngine
from async_wsync.runtime.backoff import full_jitter
from async_wsync.runtime.engine_calls import Sent
from async_wsync.types import Call

__all__ = ["GRACE", "flush", "not_resumed", "resume"]

#: Seconds past the limit within which the last try may still answer: its own words say more than "no answer".
GRACE = 0.25


async def flush(engine: RolloutEngine, call: Call, *, limit: float) -> None:
    """Drop the cache. An engine that refuses for now is asked again until the limit, and its last answer kept."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit
    for tries in itertools.count(1):
        delay = full_jitter(tries, 1.0)
        try:
            await engine.flush(call)
            return
        except EngineBusy as busy:
            if loop.time() + delay >= deadline:
                refused = f"{engine.name}: flush refused for {limit:g} s (Timeouts.flush)"
                raise EngineFailed(f"{refused}; its last answer: {busy}", engine=engine.name, phase="flush") from busy
        await asyncio.sleep(delay)


async def resume(engine: RolloutEngine, call: Call, *, limit: float) -> None:
    """Continuing twice does no harm, staying paused does: so try again until the limit, unless it is dead."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit
    for tries in itertools.count(1):
        delay = full_jitter(tries, 1.0)
        try:
            await engine.resume(call)
            return
        except (EngineDied, EngineReplaced):
            raise
        except EngineFailed:
            if loop.time() + delay >= deadline:
                raise
        await asyncio.sleep(delay)


def not_resumed(sent: Sent, limit: float) -> EngineFailed:
    """Why an engine was not told to go on, or did not take it."""
    failure = sent.failure
    if isinstance(failure, EngineFailed):
        return failure
    why = f"no answer within {limit:g} s (Timeouts.resume)" if failure is None else str(failure)
    error = EngineFailed(f"{sent.engine}: resume: {why}", engine=sent.engine, phase="resume")
    error.__cause__ = failure
    return error
