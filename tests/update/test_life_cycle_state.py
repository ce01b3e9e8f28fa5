"""The life cycle of a broadcaster, and the turns that follow it."""

from __future__ import annotations

import asyncio

import pytest

from async_wsync.errors import Cancelled, WeightSyncError
from async_wsync.lock.null import NullLock
from async_wsync.update.life_cycle import LifeCycle, Phase
from async_wsync.update.turns import Turns

CALLS = ("connect", "update_weights", "catch_up", "add_engines", "remove_engines", "replace_engine")


@pytest.mark.parametrize("call", CALLS)
def test_while_it_is_being_closed_nothing_begins(call: str) -> None:
    life = LifeCycle("b")
    life.closing()
    with pytest.raises(ValueError, match=f"{call}: b is being closed"):
        life.admit(call)


def test_a_closed_one_refuses_updates_and_opens_again_by_connect() -> None:
    life = LifeCycle("b")
    life.closing()
    life.closed()
    for call in ("update_weights", "catch_up"):
        with pytest.raises(ValueError, match=f"{call}: b is closed: connect\\(\\) it again"):
            life.admit(call)
    for call in ("connect", "add_engines", "remove_engines", "replace_engine"):
        life.admit(call)
    life.opened("connect")
    assert life.phase is Phase.OPEN
    for call in CALLS:
        life.admit(call)


@pytest.mark.parametrize("closed", [False, True])
def test_what_was_admitted_before_a_close_never_runs_after_it(closed: bool) -> None:
    life = LifeCycle("b")
    admitted = life.admit("connect")
    life.still_wanted("connect", admitted)
    life.closing()
    if closed:
        life.closed()
    with pytest.raises(Cancelled, match="b was closed during connect"):
        life.still_wanted("connect", admitted)


def test_a_connect_that_is_done_while_it_is_closed_does_not_open() -> None:
    life = LifeCycle("b")
    life.closing()
    with pytest.raises(Cancelled):
        life.opened("connect")
    assert life.phase is Phase.CLOSING


def test_a_connect_that_fails_closes_a_new_one_and_leaves_an_open_one_open() -> None:
    life = LifeCycle("b")
    life.failed_to_open()
    assert life.phase is Phase.CLOSED
    life.opened("connect")
    life.failed_to_open()
    assert life.phase is Phase.OPEN


class Work:
    """Ends when it is broken off."""

    def __init__(self) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def break_off(self, reason: Exception) -> None:
        self.over.set_exception(reason)


async def test_closing_breaks_off_whoever_has_the_turn_and_whoever_waits_for_it_and_then_runs_once() -> None:
    turns = Turns("b", NullLock())
    ended: list[str] = []

    async def take(call: str) -> None:
        work = Work()
        async with turns.take(call):
            with turns.running(call, work):
                await work.over

    async def end() -> None:
        assert turns.phase is Phase.CLOSING
        ended.append("end")
        await asyncio.sleep(0)

    calls = [asyncio.ensure_future(take(call)) for call in ("update_weights", "connect", "catch_up", "remove_engines")]
    await asyncio.sleep(0)
    await asyncio.gather(turns.close(end), turns.close(end), turns.close(end))
    assert ended == ["end"]
    assert turns.phase is Phase.CLOSED
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Cancelled] * 4
    assert all(isinstance(outcome, WeightSyncError) for outcome in outcomes)
    await turns.close(end)
    assert ended == ["end", "end"]


async def test_a_close_whose_caller_is_cancelled_closes_all_the_same() -> None:
    turns = Turns("b", NullLock())
    going_on = asyncio.Event()

    async def end() -> None:
        await going_on.wait()

    closing = asyncio.ensure_future(turns.close(end))
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.sleep(0)
    going_on.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert turns.phase is Phase.CLOSED
