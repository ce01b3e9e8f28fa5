"""Finding and breaking this process's own connections by address."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from async_wsync.groups import sockets

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")


@contextlib.contextmanager
def connection(host: str = "127.0.0.1") -> Iterator[tuple[socket.socket, socket.socket]]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        client = socket.create_connection(server.getsockname()[:2])
        accepted, _ = server.accept()
        with client, accepted:
            yield client, accepted


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_only_the_matching_connection_is_broken_and_both_ends_see_it(host: str) -> None:
    with connection(host) as (client, accepted), connection(host) as (other, other_end):
        peer = client.getpeername()[:2]
        before = len(os.listdir("/proc/self/fd"))
        assert sockets.break_connections(lambda _, there: there == peer) == 1
        assert len(os.listdir("/proc/self/fd")) == before, "the file descriptors stay their owner's"
        client.settimeout(5)
        accepted.settimeout(5)
        assert client.recv(1) == b""
        assert accepted.recv(1) == b""
        other.sendall(b"fine")
        assert other_end.recv(10) == b"fine"


def test_the_accepted_end_is_found_by_its_local_address() -> None:
    with connection() as (client, accepted):
        local = client.getpeername()
        found = sockets.find_connections(lambda here, _: here == local)
        assert found == {accepted.fileno()}


def test_a_search_among_given_descriptors_looks_at_no_others_and_survives_closed_ones() -> None:
    with connection() as (client, _), connection() as (other, _):
        closed = os.dup(other.fileno())
        os.close(closed)
        assert sockets.find_connections(lambda *_: True, among={client.fileno(), closed, 0}) == {client.fileno()}


def test_searches_in_several_threads_do_not_find_each_others_duplicates() -> None:
    stop = threading.Event()

    def search() -> None:
        while not stop.is_set():
            sockets.find_connections(lambda *_: True)

    with connection() as (client, _):
        peer = client.getpeername()
        threads = [threading.Thread(target=search) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(300):
                assert sockets.find_connections(lambda _, there: there == peer) == {client.fileno()}
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_a_reused_descriptor_is_checked_by_its_address_again() -> None:
    with connection() as (client, _), connection() as (stranger, stranger_end):
        peer = client.getpeername()
        fds = sockets.find_connections(lambda _, there: there == peer)
        client.close()
        os.dup2(stranger.fileno(), next(iter(fds)))
        try:
            assert sockets.break_connections(lambda _, there: there == peer, among=fds) == 0
            stranger.sendall(b"fine")
            assert stranger_end.recv(10) == b"fine"
        finally:
            os.close(next(iter(fds)))


def test_breaking_few_among_many_descriptors_is_quick() -> None:
    with contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(connection()) for _ in range(100)]
        client, _ = pairs[50]
        best = 1.0
        for _ in range(5):
            started = time.perf_counter()
            sockets.break_connections(lambda *_: False, among={client.fileno()})
            best = min(best, time.perf_counter() - started)
    assert best < 0.005


def test_listeners_are_told_with_their_addresses() -> None:
    before = sockets.listeners()
    with socket.create_server(("127.0.0.1", 0)) as server:
        new = {inode: address for inode, address in sockets.listeners().items() if inode not in before}
        assert list(new.values()) == [server.getsockname()]
    assert sockets.listeners().keys() == before.keys()


@pytest.mark.parametrize("address", [("10.1.2.3", 4567), ("::1", 80), ("fe80::1:2", 65535)])
def test_addresses_survive_the_c_form(address: sockets.Address) -> None:
    assert sockets.unpack_address(sockets.pack_address(address).ljust(28, b"\0")) == address


def test_what_is_no_address_unpacks_to_none() -> None:
    assert sockets.unpack_address(b"") is None
    assert sockets.unpack_address(b"\xff" * 28) is None


def test_local_addresses_lead_to_their_hosts() -> None:
    assert sockets.local_address("127.0.0.1", 80) == "127.0.0.1"
    assert sockets.local_address("::1", 80) == "::1"
    assert sockets.local_address("no-such-host.invalid", 80) is None
    assert "127.0.0.1" in sockets.resolve("127.0.0.1")
    assert sockets.resolve("no-such-host.invalid") == frozenset()
