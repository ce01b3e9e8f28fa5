"""Before the lock is even asked for: is every engine there, and is it the one we know?"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from async_wsync.calls import told
from async_wsync.core.engine_state import EngineRecord
from async_wsync.errors import EngineFailed, EngineTimeout
from async_wsync.types import Call, EngineInfo, EngineState, RolloutEngine

__all__ = ["greet"]

Answer = EngineInfo | EngineFailed


async def greet(
    engines: Sequence[RolloutEngine],
    records: Mapping[str, EngineRecord],
    *,
    source: str,
    limit: float,
    field: str = "begin",
) -> dict[str, Answer]:
    """Say hello to all and write down what they answer; who did not is lost. Raises for none of them.

    An engine that answers from another process than before has neither our group nor our weights: it is stale
    again. ``limit``: seconds for all of them together, from ``Timeouts.<field>``. A hello has no effect, so that one
    may be given up.
    """
    call = Call(source=source, fence=0, timeout=limit)
    answers = await asyncio.gather(*(_hello(engine, call, field) for engine in engines))
    for engine, answer in zip(engines, answers, strict=True):
        _write_down(records[engine.name], answer)
    return {engine.name: answer for engine, answer in zip(engines, answers, strict=True)}


async def _hello(engine: RolloutEngine, call: Call, field: str) -> Answer:
    try:
        async with asyncio.timeout(call.timeout) as limit:
            return await told(engine.name, "hello", engine.hello(call))
    except EngineFailed as error:
        return error
    except TimeoutError:
        assert limit.expired()
        return EngineTimeout(
            f"{engine.name}: no answer to hello within {call.timeout:g} s (Timeouts.{field})",
            engine=engine.name,
            phase="hello",
            field=field,
            seconds=call.timeout,
            waiting_for=(engine.name,),
        )


def _write_down(record: EngineRecord, answer: Answer) -> None:
    record.notes = []  # an update begins with its greeting; what is noted from here on is in its report
    if isinstance(answer, EngineInfo):
        record.error = record.phase = None
        if record.greet(answer):
            record.notes.append("restarted since the last update; its groups are rebuilt")
        return
    record.error, record.phase = str(answer), "hello"
    if record.state is not EngineState.LOST:
        record.lose()
