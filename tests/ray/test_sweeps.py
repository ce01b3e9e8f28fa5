"""Short forms of the sweeps: a fault at some of the points of an update. `nox -s chaos` takes all of them."""

from __future__ import annotations

import signal

import pytest

from async_wsync import BroadcastLock
from tests.ray.fleet import Rig
from tests.sweeps import cancel_sweep, fault_sweep

# A busy machine: only what an update must reach on an idle one is measured in the chaos run.
SOON = 15.0


@pytest.mark.parametrize(("kind", "first"), [("once", 1), ("twice", 5), ("anyio", 9), ("timeout", 13)])
async def test_an_update_cancelled_at_any_await_leaves_everything_at_rest(
    rig: Rig, lock: BroadcastLock, kind: str, first: int
) -> None:
    figures = await cancel_sweep(rig, lock, kinds=[kind], at=range(first, 400, 29))  # type: ignore[list-item]
    print(f"\n{figures.line()}")
    assert not figures.wrong
    assert figures.fired >= 3


async def test_an_update_stopped_at_any_await_leaves_everything_at_rest(rig: Rig, lock: BroadcastLock) -> None:
    figures = await cancel_sweep(rig, lock, kinds=["once"], at=range(3, 400, 37), on_cancel="stop")
    print(f"\n{figures.line()}")
    assert not figures.wrong
    assert figures.fired >= 3


async def test_an_engine_killed_at_any_event_is_named_and_the_rest_is_whole_or_torn(
    rig: Rig, lock: BroadcastLock
) -> None:
    figures = await fault_sweep(rig, lock, victims=["e1"], at=[3, 6, 9, 16], soon=SOON)
    print(f"\n{figures.line()}")
    assert not figures.wrong
    assert figures.fired == 4


async def test_an_engine_stopped_at_any_event_costs_no_more_than_a_limit(rig: Rig, lock: BroadcastLock) -> None:
    figures = await fault_sweep(rig, lock, number=signal.SIGSTOP, victims=["e2"], at=[4, 10])
    print(f"\n{figures.line()}")
    assert not [wrong for wrong in figures.wrong if not wrong.endswith(" s")]
    assert figures.fired == 2
