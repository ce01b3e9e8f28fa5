"""Before the lock is even asked for: is every engine there, and is it the one we know?"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from async_wsync.errors import EngineFailed, EngineTimeout
from async_wsync.protocols import RolloutEngine
from async_wsync.runtime.engine_calls import asked, told, watched
from async_wsync.types import Call, EngineInfo, EngineState
from async_wsync.update.roster import EngineRecord

__all__ = ["say_hello"]

Answer = EngineInfo | EngineFailed

_AFTER_A_FAILURE = 0.25  # seconds: others that are dead too are named with it


async def say_hello(
    engines: Sequence[RolloutEngine],
    records: Mapping[str, EngineRecord],
    *,
    source: str,
    limit: float,
    field: str = "begin",
    all_needed: bool = False,
) -> dict[str, Answer]:
    """Say hello to all and write down what they answer; who did not is lost. Raises for none of them.

    ``all_needed``: one failure settles it. Those who have not answered shortly after it are neither waited for nor in
    the result, so that a dead engine is told at once though another is silent.

    An engine that answers from another process than before has neither our group nor our weights: it is stale
    again. ``limit``: seconds for all of them together, from ``Timeouts.<field>``. A hello has no effect, so that one
    may be given up.
    """
    call = Call(source=source, fence=0, timeout=limit)
    hellos = {
        engine.name: watched(_hello(engine, call, field), name=f"wsync hello {engine.name}") for engine in engines
    }
    try:
        await _answers(hellos.values(), all_needed=all_needed)
        answers = {name: task.result() for name, task in hellos.items() if task.done()}
    finally:
        for task in hellos.values():
            task.cancel()  # only where it is not done
    for name, answer in answers.items():
        _write_down(records[name], answer)
    return answers


async def _answers(hellos: Iterable[asyncio.Task[Answer]], *, all_needed: bool) -> None:
    waiting = set(hellos)
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if all_needed and waiting and any(isinstance(task.result(), EngineFailed) for task in done):
            await asyncio.wait(waiting, timeout=_AFTER_A_FAILURE)
            return


async def _hello(engine: RolloutEngine, call: Call, field: str) -> Answer:
    try:
        async with asyncio.timeout(call.timeout) as limit:
            return await told(engine.name, "hello", asked(engine.hello, call))
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
    record.notes = []  # an update begins with its hello; what is noted from here on is in its report
    if isinstance(answer, EngineInfo):
        record.error = record.phase = None
        if record.answered_hello(answer):
            record.notes.append("restarted since the last update; its groups are rebuilt")
        return
    record.error, record.phase = str(answer), "hello"
    if record.state is not EngineState.LOST:
        record.lose()
