"""The datagram that tells a waiter of its turn. A wait that nobody ends would run into the test's own time limit."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from async_wsync.lock.wake_up import Bell, ring

NEVER = 10_000.0


def ring_at(bell: Bell) -> None:
    assert bell.address is not None
    ring(bell.address)


@pytest.fixture
def bell() -> Iterator[Bell]:
    with closing(Bell("127.0.0.1")) as bell:
        yield bell


async def test_a_ring_ends_the_wait(bell: Bell) -> None:
    waiting = asyncio.create_task(bell.wait(NEVER))
    await asyncio.sleep(0)
    ring_at(bell)
    await waiting


async def test_a_ring_before_the_wait_is_not_lost(bell: Bell) -> None:
    for _ in range(3):
        ring_at(bell)
        await bell.wait(NEVER)


async def test_without_a_ring_the_wait_ends_by_the_clock(bell: Bell) -> None:
    await bell.wait(0.01)
    await bell.wait(0.0)


async def test_a_cancelled_wait_leaves_nothing_behind(bell: Bell) -> None:
    waiting = asyncio.create_task(bell.wait(NEVER))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert bell._socket is not None
    assert not asyncio.get_running_loop().remove_reader(bell._socket)
    ring_at(bell)
    await bell.wait(NEVER)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
async def test_it_rings_over_ipv6() -> None:
    with closing(Bell("::1")) as bell:
        ring_at(bell)
        await bell.wait(NEVER)


async def test_without_a_socket_to_spare_it_waits_by_the_clock() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            socket.socket()
        bell = Bell("127.0.0.1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert bell.address is None
    await bell.wait(0.01)
    bell.close()


def test_who_cannot_be_reached_is_no_error() -> None:
    for address in (("127.0.0.1", 1), ("::1", 1)):
        ring(address)
