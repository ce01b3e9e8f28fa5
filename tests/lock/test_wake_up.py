"""The datagram that tells a waiter of its turn. A wait that nobody ends would run into the test's own time limit."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from async_wsync.lock.wake_up import WakeUpSocket, wake_up

NEVER = 10_000.0


def wake(waker: WakeUpSocket) -> None:
    assert waker.address is not None
    wake_up(waker.address)


@pytest.fixture
def waker() -> Iterator[WakeUpSocket]:
    with closing(WakeUpSocket("127.0.0.1")) as waker:
        yield waker


async def test_a_datagram_ends_the_wait(waker: WakeUpSocket) -> None:
    waiting = asyncio.create_task(waker.wait(NEVER))
    await asyncio.sleep(0)
    wake(waker)
    await waiting


async def test_a_datagram_before_the_wait_is_not_lost(waker: WakeUpSocket) -> None:
    for _ in range(3):
        wake(waker)
        await waker.wait(NEVER)


async def test_without_a_datagram_the_wait_ends_by_the_clock(waker: WakeUpSocket) -> None:
    await waker.wait(0.01)
    await waker.wait(0.0)


async def test_a_cancelled_wait_leaves_nothing_behind(waker: WakeUpSocket) -> None:
    waiting = asyncio.create_task(waker.wait(NEVER))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert waker._socket is not None
    assert not asyncio.get_running_loop().remove_reader(waker._socket)
    wake(waker)
    await waker.wait(NEVER)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
async def test_it_wakes_up_over_ipv6() -> None:
    with closing(WakeUpSocket("::1")) as waker:
        wake(waker)
        await waker.wait(NEVER)


async def test_without_a_socket_to_spare_it_waits_by_the_clock() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            socket.socket()
        waker = WakeUpSocket("127.0.0.1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert waker.address is None
    await waker.wait(0.01)
    waker.close()


def test_who_cannot_be_reached_is_no_error() -> None:
    for address in (("127.0.0.1", 1), ("::1", 1)):
        wake_up(address)
