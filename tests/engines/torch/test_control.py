"""The control connection between a source and an engine, over real sockets, without Ray."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from async_wsync.engines.failure import Failure
from async_wsync.engines.torch import messages as p
from async_wsync.engines.torch.control import _CONNECT_LIMIT, ControlConnection, ControlLost, ControlServer
from async_wsync.testing.network import PortSquatter
from tests.support.receiver_driver import a_request
from tests.support.waiting import until


def a_server(answer: Callable[[p.Request], Any]) -> p.ControlAddress:
    address = ControlServer(answer).open("127.0.0.1", "")
    assert address is not None
    return address


def a_connection(address: p.ControlAddress) -> ControlConnection:
    connection = ControlConnection("")
    connection.use(address)
    return connection


def asking() -> p.Request:
    return a_request(p.Flush())


def num_threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


async def test_requests_are_answered_in_order_also_those_of_cancelled_callers() -> None:
    seen: list[str] = []

    def answer(request: p.Request) -> Any:
        seen.append(request.id)
        return request.id

    connection = a_connection(a_server(answer))
    requests = [asking() for _ in range(20)]
    tasks = [asyncio.create_task(connection.ask(request)) for request in requests]
    await asyncio.sleep(0)
    tasks[7].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert seen == [request.id for request in requests]
    assert [a for i, a in enumerate(answers) if i != 7] == [r.id for i, r in enumerate(requests) if i != 7]
    connection.close()


async def test_what_the_entry_point_raises_comes_back_as_a_failure() -> None:
    def answer(request: p.Request) -> Any:
        raise KeyError("lm_head")

    connection = a_connection(a_server(answer))
    failure = await connection.ask(asking())
    assert isinstance(failure, Failure)
    error = failure.rebuild(engine="e0", phase="flush")
    assert isinstance(error.__cause__, KeyError)
    assert str(error) == "e0: flush: KeyError: 'lm_head'"
    connection.close()


async def test_an_answer_that_cannot_be_pickled_is_a_failure_too() -> None:
    connection = a_connection(a_server(lambda request: threading.Lock()))
    assert isinstance(await connection.ask(asking()), Failure)
    connection.close()


async def test_a_source_that_does_not_know_the_token_gets_no_answer() -> None:
    seen: list[p.Request] = []
    address = a_server(seen.append)
    stranger = a_connection(replace(address, token="guessed"))
    with pytest.raises(ControlLost):
        await stranger.ask(asking())
    assert not stranger.usable
    assert not seen


async def test_nothing_of_a_listener_that_does_not_know_the_token_is_unpickled() -> None:
    other = a_server(lambda request: pytest.fail("asked"))
    connection = a_connection(replace(other, token="the engine's own"))
    with pytest.raises(ControlLost, match=r"does not know the token|hung up"):
        await connection.ask(asking())


async def test_a_listener_that_says_nothing_costs_a_second_once() -> None:
    with PortSquatter() as squatter:
        address = p.ControlAddress(host=squatter.host, port=squatter.port, token="t")
        connection = a_connection(address)
        started = time.monotonic()
        with pytest.raises(ControlLost):
            await connection.ask(asking())
        assert 0.9 < time.monotonic() - started < 2.0
        connection.use(address)
        assert not connection.usable, "it is not tried again with every hello"
        connection.use(replace(address, port=1))
        assert connection.usable


async def test_a_visitor_that_says_nothing_keeps_nobody_out_and_is_shown_the_door() -> None:
    address = a_server(lambda request: "fine")
    with socket.create_connection((address.host, address.port), timeout=5) as visitor:
        connection = a_connection(address)
        assert await connection.ask(asking()) == "fine"
        assert len(visitor.recv(64)) == 32, "its challenge"
        assert visitor.recv(64) == b"", "after a second it is hung up on"
    connection.close()


async def test_a_connection_that_was_silent_for_longer_than_connecting_may_take_is_still_used() -> None:
    connection = a_connection(a_server(lambda request: num_threads("wsync-control-connection")))
    before = await connection.ask(asking())
    await asyncio.sleep(_CONNECT_LIMIT + 0.3)
    assert await connection.ask(asking()) == before
    connection.close()


async def test_hanging_up_ends_the_exchange_under_way_and_the_threads_of_both_ends() -> None:
    entered, go = threading.Event(), threading.Event()

    def answer(request: p.Request) -> None:
        entered.set()
        go.wait(5)

    names = ("wsync-control-connection", "wsync-control-talk")
    earlier = set(threading.enumerate())  # those of other tests may end at any time
    connection = a_connection(a_server(answer))
    first, second = (asyncio.create_task(connection.ask(asking())) for _ in range(2))
    await until(entered.is_set)
    connection.close()
    for task in (first, second):
        with pytest.raises(ControlLost):
            await task
    go.set()
    await until(lambda: not any(t.name in names for t in set(threading.enumerate()) - earlier))


async def test_a_connection_that_is_forgotten_hangs_up() -> None:
    address = a_server(lambda request: "fine")
    gc.collect()  # connections of earlier tests
    before, fds = num_threads("wsync-control-talk"), len(os.listdir("/proc/self/fd"))
    connection = a_connection(address)
    assert await connection.ask(asking()) == "fine"
    del connection
    gc.collect()
    await until(lambda: num_threads("wsync-control-talk") == before)
    await until(lambda: len(os.listdir("/proc/self/fd")) <= fds)


async def test_one_that_was_hung_up_connects_anew_when_it_is_told_where() -> None:
    address = a_server(lambda request: "fine")
    connection = a_connection(address)
    assert await connection.ask(asking()) == "fine"
    connection.close()
    with pytest.raises(ControlLost):
        await connection.ask(asking())
    connection.use(address)
    assert await connection.ask(asking()) == "fine"
    connection.close()
