"""Sweeps over a changing fleet, a number of times each: `tests/ray` runs them in short, `tests/chaos` in full."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable
from typing import Any

import ray

from async_wsync import BroadcastLock, WeightBroadcaster
from async_wsync.testing import kill_at_every_event
from async_wsync.types import EventHook, UpdateEvent
from tests.fleet_rig import BUCKET_BYTES, LIMITS, Engines, SparePool, is_free, resources, source
from tests.lock_scenarios import Figures

SETTINGS: dict[str, Any] = {"timeouts": LIMITS, "progress": False, "bucket_bytes": BUCKET_BYTES}


class _Telling:
    """Passes events on to whoever is set, so that one broadcaster can serve many replays."""

    def __init__(self) -> None:
        self.hook: EventHook | None = None

    def __call__(self, event: UpdateEvent) -> None:
        if self.hook is not None:
            self.hook(event)


async def drop_sweep(*, victims: Iterable[str], points: Iterable[int] | None) -> Figures:
    """kill -9 of each victim at each event of an update with ``on_engine_failure="drop"``; then its replacement catches
    up without a word to the others."""
    engines, pool = await Engines.start(3), SparePool()
    lock = BroadcastLock.create(name=f"lock-{uuid.uuid4().hex[:8]}", ttl=8.0)
    telling = _Telling()
    figures = Figures("engine j killed at the i-th event, drop: seconds from the kill to the end of the update")
    version = 1
    good = runs = 0
    async with WeightBroadcaster(
        engines.adapters(), lock=lock, on_engine_failure="drop", on_event=telling, **SETTINGS
    ) as casting:
        await casting.update_weights(source(version), version=version)

        async def scenario(on_event: EventHook, victim: str) -> Any:
            nonlocal version
            version += 1
            telling.hook = on_event
            try:
                return await casting.update_weights(source(version), version=version)
            finally:
                telling.hook = None

        async for run in kill_at_every_event(scenario, victims, engines.kill, at=points):
            if not run.fired:
                continue
            runs += 1
            assert run.error is None, (run.at, run.event, run.error)
            figures.seconds.append(run.seconds_after)
            survivors = [name for name in engines.handles if name != run.victim]
            assert set(survivors) <= set(casting.current_engines()), (run.at, run.event, casting)
            late = {"resumed", "update_finished"}
            assert run.value.dropped == (run.victim,) or (run.event is not None and run.event.kind in late)
            assert all([await engines.holds(name, version) for name in survivors]), (run.at, run.event)
            assert await is_free(lock, within=0.5)
            await casting.replace_engine(run.victim, await engines.put(run.victim, await pool.take()))
            moment = time.time()
            assert await casting.catch_up(source(version)) is not None
            assert await engines.holds(run.victim, version)
            for name in survivors:
                assert not await engines.verbs_since(name, moment), (run.at, run.event)
            good += 1
    figures.repeats = runs
    figures.facts["survivors current"] = f"{good} of {runs}"
    await lock.shutdown()
    engines.close()
    pool.close()
    return figures


async def replace_many(*, times: int) -> Figures:
    """Replace an engine over and over; how much this process, the source, has grown by."""
    engines, pool = await Engines.start(2), SparePool(2)
    figures = Figures("engines replaced one after another: growth of the source", repeats=times)
    async with WeightBroadcaster(engines.adapters(), lock=None, **SETTINGS) as casting:
        await casting.update_weights(source(1), version=1)
        await _replace(casting, engines, pool, 2)  # the first time opens what stays open
        before = resources()
        members = len(casting.engine_states)
        for turn in range(times):
            began = time.monotonic()
            await _replace(casting, engines, pool, 3 + turn)
            figures.seconds.append(time.monotonic() - began)
        await asyncio.sleep(0.5)
        after = resources()
        assert len(casting.engine_states) == members
        assert len(casting.current_engines()) == members
    figures.facts = {key: after[key] - before[key] for key in ("fds", "threads")}
    engines.close()
    pool.close()
    return figures


async def _replace(casting: WeightBroadcaster, engines: Engines, pool: SparePool, version: int) -> None:
    old = engines.handles["e1"]
    await casting.replace_engine("e1", await engines.put("e1", await pool.take()))
    ray.kill(old)
    await casting.update_weights(source(version), version=version)
    assert await engines.holds("e1", version)
