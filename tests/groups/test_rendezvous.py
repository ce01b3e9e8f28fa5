"""Forming a group: taken ports, foreign listeners, members that are missing, wrong, or late; each bounded and named."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from async_wsync.engines.receiving.group_membership import GroupMembership
from async_wsync.errors import EngineFailed, RendezvousError
from async_wsync.groups import master_address
from async_wsync.groups.rendezvous import Rendezvous, join_group
from async_wsync.groups.store import shut_store
from async_wsync.types import GroupSpec
from tests.support.groups import opened
from tests.support.peers import Fleet, Peer, connect, disconnect

#: Loose, for machines that do other things.
SOON = 5.0


def spec_at(port: int, *, connect_timeout: float = 1.0, address: str = "127.0.0.1") -> GroupSpec:
    return GroupSpec(
        name="astray",
        backend="gloo",
        master_address=address,
        master_port=port,
        world_size=2,
        epoch=1,
        timeout=20.0,
        connect_timeout=connect_timeout,
    )


@contextlib.contextmanager
def foreign_listener(answer: bytes | None = None, *, hangs_up: bool = False) -> Iterator[tuple[int, list[bytes]]]:
    """Some other program: reads, and says nothing, or ``answer``, or hangs up. Yields its port and what it read."""
    server, heard, open_sockets = socket.create_server(("127.0.0.1", 0)), [], []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                conn, _ = server.accept()
                open_sockets.append(conn)
                threading.Thread(target=talk, args=(conn,), daemon=True).start()

    def talk(conn: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if hangs_up:
                conn.close()
                return
            while data := conn.recv(4096):
                heard.append(data)
                if answer is not None:
                    conn.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield server.getsockname()[1], heard
    finally:
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        server.close()
        for conn in open_sockets:
            conn.close()


async def complete(rendezvous: Rendezvous, peers: list[Peer]) -> Any:
    return await rendezvous.complete({rank: peer.name for rank, peer in enumerate(peers, 1)})


# ------------------------------------------------------------------------------------ ports


async def test_a_port_that_somebody_took_is_replaced_by_a_free_one(fleet: Fleet) -> None:
    """Field case P1, at the source."""
    (peer,) = fleet.peers(1)
    with foreign_listener() as (port, heard):
        rendezvous = await opened(2, port=port)
        assert rendezvous.spec.master_port not in (0, port)
        join = peer.start("join", rendezvous.spec, 1, peer.name)
        group = await complete(rendezvous, [peer])
        (await join.settled()).result()
        assert not heard
    await disconnect(group, [peer])


async def test_a_free_port_that_was_asked_for_is_used(fleet: Fleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    rendezvous = await opened(2, port=port)
    assert rendezvous.spec.master_port == port
    await rendezvous.aclose()


def test_a_silent_foreign_listener_is_bounded_and_told() -> None:
    """Field case P1, at the joiner: torch's own client would wait there for ever."""
    with foreign_listener() as (port, heard):
        started = time.monotonic()
        with pytest.raises(RendezvousError, match="did not answer as a torch store within 1 s") as raised:
            join_group(spec_at(port), 1, member="engine-1")
        assert 0.9 < time.monotonic() - started < 1 + SOON
        assert heard, "the fault fired: the joiner did talk to the stranger"
    assert raised.value.step == "reach"
    assert f"127.0.0.1:{port}" in str(raised.value)
    assert "another program" in str(raised.value)
    limit = time.monotonic() + 10
    while any(thread.name == "enter astray" for thread in threading.enumerate()):
        assert time.monotonic() < limit, "the thread in torch's client must not stay"
        time.sleep(0.01)


@pytest.mark.parametrize("hangs_up", [True, False], ids=["hangs-up", "talks-nonsense"])
def test_a_foreign_listener_that_answers_is_bounded_too(hangs_up: bool) -> None:
    with foreign_listener(b"HTTP/1.1 400 Bad Request\r\n\r\n", hangs_up=hangs_up) as (port, _):
        started = time.monotonic()
        with pytest.raises(RendezvousError) as raised:
            join_group(spec_at(port), 1, member="engine-1")
        assert time.monotonic() - started < 1 + 2 * SOON
    assert raised.value.step == "reach"


def test_a_stranger_that_shares_the_stores_port_at_one_end_and_its_host_at_the_other_keeps_its_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as theirs, socket.create_server(("127.0.0.2", 0)) as probe:
        port = probe.getsockname()[1]
        probe.close()
        stranger = socket.create_connection(theirs.getsockname(), source_address=("127.0.0.2", port))
        their_end, _ = theirs.accept()
        with stranger, their_end:
            shut_store(spec_at(port))  # 127.0.0.1 at that port
            stranger.sendall(b"still")
            assert their_end.recv(10) == b"still"
            shut_store(spec_at(theirs.getsockname()[1]))
            assert stranger.recv(10) == b"", "a connection that does end there is broken"


def test_giving_up_on_a_foreign_listener_leaves_our_own_connections_to_it_alone() -> None:
    with foreign_listener() as (port, heard), socket.create_connection(("127.0.0.1", port)) as own:
        with pytest.raises(RendezvousError, match="did not answer as a torch store"):
            join_group(spec_at(port, connect_timeout=0.5), 1, member="engine-1")
        own.sendall(b"still")
        limit = time.monotonic() + SOON
        while b"still" not in heard:
            assert time.monotonic() < limit
            time.sleep(0.01)


def test_a_source_that_is_gone_is_told_long_before_the_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(RendezvousError, match="nobody listens") as raised:
        join_group(spec_at(port, connect_timeout=60.0), 1, member="engine-1")
    assert time.monotonic() - started < 1 + 2 * SOON
    assert raised.value.step == "reach"


def test_an_address_that_means_nothing_is_told() -> None:
    with pytest.raises(RendezvousError, match="nobody listens"):
        join_group(spec_at(4, address="no-such-host.invalid"), 1, member="engine-1")


async def test_a_group_that_was_slow_to_form_says_what_may_have_held_it_up(
    fleet: Fleet, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = fleet.peers(1)
    await disconnect(await connect(peers), peers)
    assert "name server" not in caplog.text
    monkeypatch.setattr("async_wsync.groups.rendezvous.SLOW", 0.0)
    await disconnect(await connect(peers), peers)
    assert "name server" in caplog.text


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("no-such-host.invalid", "cannot be resolved"),
        ("203.0.113.7", "no interface of this machine"),
        ("2001:db8::7", "no interface of this machine"),
    ],
)
async def test_an_address_that_leads_elsewhere_is_refused_at_once(
    address: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    with pytest.raises(RendezvousError, match=reason) as raised:
        await opened(2, address=address, connect_timeout=60.0)
    assert time.monotonic() - started < 1.0 + SOON
    assert raised.value.step == "listen"
    assert address in str(raised.value)
    await asyncio.sleep(0.1)
    assert "frame #" not in capfd.readouterr().err, "torch was not even asked"


@pytest.mark.parametrize(
    "address",
    ["fe80::1%lo", "127.0.0.1:29500", "[::1]:29500", "tcp://127.0.0.1", "[127.0.0.1", "127.0.0.300", "", "::"],
)
async def test_what_is_no_address_for_engines_is_the_callers_mistake(address: str) -> None:
    with pytest.raises(ValueError, match="master_address"):
        await opened(2, address=address)


def test_an_address_outside_that_leads_back_here_will_do() -> None:
    """As behind an address translation, which no interface of the machine knows of."""
    assert master_address._loop_back(["127.0.0.1"], time.monotonic() + SOON) is None
    assert master_address._loop_back(["203.0.113.7"], time.monotonic() + SOON) is not None


@pytest.mark.parametrize("address", ["::1", "[::1]"])
async def test_ipv6_works(fleet: Fleet, address: str) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    peers = fleet.peers(2)
    group = await connect(peers, address=address)
    assert group.spec.master_address == "::1"
    assert group._group.connections() == 2
    answers = [peer.start("receive", group.spec.name, [100_000]) for peer in peers]
    await group.broadcast([torch.ones(100_000, dtype=torch.uint8)])
    for answer in answers:
        assert (await answer.settled()).result() == [100_000]
    waiting = peers[0].start("receive", group.spec.name, [100_000])
    await asyncio.sleep(0.2)
    started = time.monotonic()
    group.abort()
    await waiting.settled(10)
    assert waiting.error()
    assert waiting.ended - started < SOON
    await disconnect(group, peers)


# ---------------------------------------------------------------------------------- members


async def test_a_member_that_never_comes_is_named_and_the_others_are_told(fleet: Fleet) -> None:
    """Field case H3, first half."""
    peers = fleet.peers(2)
    rendezvous = await opened(4, connect_timeout=1.5)
    joins = [peers[0].start("join", rendezvous.spec, 1, "engine-1"), peers[1].start("join", rendezvous.spec, 3, "e3")]
    started = time.monotonic()
    with pytest.raises(RendezvousError, match=r"rank 2 \(the missing one\) said no hello within 1.5 s") as raised:
        await rendezvous.complete({1: "engine-1", 2: "the missing one", 3: "e3"})
    assert 1.4 < time.monotonic() - started < 1.5 + SOON
    assert raised.value.missing_ranks == (2,)
    assert raised.value.step == "hello"
    assert "GLOO_SOCKET_IFNAME=" in str(raised.value)
    assert "NCCL_SOCKET_IFNAME=" in str(raised.value)
    for join in joins:
        await join.settled(10)
        assert isinstance(join.error(), RendezvousError)


async def test_a_member_that_greets_and_never_connects_is_named(fleet: Fleet) -> None:
    peers = fleet.peers(2)
    rendezvous = await opened(3, connect_timeout=2.0)
    await peers[1].ask("greet_and_go_away", rendezvous.spec, 2)
    join = peers[0].start("join", rendezvous.spec, 1, "engine-1")
    started = time.monotonic()
    with pytest.raises(RendezvousError) as raised:
        await rendezvous.complete({1: "engine-1", 2: "engine-2"})
    assert time.monotonic() - started < 2.0 + SOON
    assert raised.value.step == "connect"
    assert raised.value.missing_ranks == (2,)
    await join.settled(10)
    error = join.error()
    assert isinstance(error, RendezvousError)
    assert error.step == "connect"


async def test_a_member_killed_on_its_way_is_bounded(fleet: Fleet) -> None:
    peers = fleet.peers(2)
    rendezvous = await opened(3, connect_timeout=2.0)
    completing = asyncio.create_task(rendezvous.complete({1: "engine-1", 2: "engine-2"}))
    peers[0].start("join", rendezvous.spec, 1, "engine-1")
    await asyncio.sleep(0.3)
    peers[0].kill()
    join = peers[1].start("join", rendezvous.spec, 2, "engine-2")
    with pytest.raises(RendezvousError) as raised:
        await completing
    assert raised.value.missing_ranks == (1,)
    await join.settled(10)
    assert isinstance(join.error(), RendezvousError)


@pytest.mark.parametrize(
    ("lie", "told"),
    [
        ({"world_size": 5}, "world_size 5 instead of 2"),
        ({"group": "another"}, "group 'another' instead of"),
        ({"protocol": 99}, "protocol 99 instead of 1"),
        ({"num_ranks": 2}, "2 ranks of its engine, and num_ranks=1 was given"),
    ],
    ids=["world-size", "name", "protocol", "num-ranks"],
)
async def test_a_member_of_another_mind_is_refused(fleet: Fleet, lie: dict[str, Any], told: str) -> None:
    (peer,) = fleet.peers(1)
    rendezvous = await opened(2)
    await peer.ask("greet_and_go_away", rendezvous.spec, 1, **lie)
    with pytest.raises(RendezvousError, match=told) as raised:
        await complete(rendezvous, [peer])
    assert raised.value.step == "hello"
    assert raised.value.missing_ranks == (1,)
    assert "liar" in str(raised.value)


@pytest.mark.parametrize("greeting", ["[]", "no json", "7"])
async def test_a_greeting_of_nonsense_ends_the_rendezvous_and_names_its_rank(fleet: Fleet, greeting: str) -> None:
    (peer,) = fleet.peers(1)
    rendezvous = await opened(2)
    await peer.ask("write", rendezvous.spec, "hello/1", greeting)
    with pytest.raises(RendezvousError, match=r"rank 1 \(engine-1\) said a hello that cannot be read"):
        await complete(rendezvous, [peer])


@pytest.mark.parametrize("go", ['{"announcing": 5, "eager": true}', '{"eager": true}'])
async def test_a_source_that_answers_nonsense_leaves_nothing_behind_at_the_member(fleet: Fleet, go: str) -> None:
    (peer,) = fleet.peers(1)
    rendezvous = await opened(2)
    await peer.ask("write", rendezvous.spec, "go/1", go)
    join = peer.start("join", rendezvous.spec, 1, "engine-1")
    error = (await join.settled(10)).error()
    assert isinstance(error, RendezvousError)
    assert error.step == "connect"
    async with asyncio.timeout(10):
        while any(rendezvous.spec.name in name for name in await peer.ask("thread_names")):
            await asyncio.sleep(0.02)
    await rendezvous.aclose()


async def test_the_second_member_at_a_rank_is_refused(fleet: Fleet) -> None:
    peers = fleet.peers(2)
    rendezvous = await opened(2)
    first = peers[0].start("join", rendezvous.spec, 1, "engine-1")
    await asyncio.sleep(0.3)
    second = await peers[1].start("join", rendezvous.spec, 1, "engine-2").settled()
    assert "rank 1 is taken" in str(second.error())
    group = await rendezvous.complete({1: "engine-1"})
    (await first.settled()).result()
    await disconnect(group, peers[:1])


async def test_a_cancelled_rendezvous_tells_its_members_and_leaves_nothing(fleet: Fleet) -> None:
    peers = fleet.peers(2)

    async def once() -> None:
        rendezvous = await opened(3, connect_timeout=30.0)
        join = peers[0].start("join", rendezvous.spec, 1, "engine-1")
        completing = asyncio.create_task(complete(rendezvous, peers))
        await asyncio.sleep(0.2)
        started = time.monotonic()
        completing.cancel()
        await asyncio.wait([completing])
        assert completing.cancelled()
        await rendezvous.aclose()
        assert "over" in repr(rendezvous)
        await join.settled(10)
        assert isinstance(join.error(), RendezvousError)
        assert join.ended - started < SOON

    await once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await once()
    limit = time.monotonic() + 10
    while len(os.listdir("/proc/self/fd")) > before:
        assert time.monotonic() < limit, "file descriptors stayed behind"
        await asyncio.sleep(0.02)


async def test_a_rendezvous_cancelled_while_it_connects_drops_the_group(fleet: Fleet) -> None:
    peers = fleet.peers(2)
    rendezvous = await opened(3, connect_timeout=30.0)
    await peers[1].ask("greet_and_go_away", rendezvous.spec, 2)
    join = peers[0].start("join", rendezvous.spec, 1, "engine-1")
    completing = asyncio.create_task(complete(rendezvous, peers))
    await asyncio.sleep(0.5)
    assert not completing.done()
    completing.cancel()
    await asyncio.wait([completing])
    await join.settled(10)
    assert isinstance(join.error(), RendezvousError)
    limit = time.monotonic() + 10
    while any(rendezvous.spec.name in thread.name for thread in threading.enumerate()):
        assert time.monotonic() < limit, [thread.name for thread in threading.enumerate()]
        await asyncio.sleep(0.02)


async def test_mistakes_of_the_caller_are_value_errors(fleet: Fleet) -> None:
    with pytest.raises(ValueError, match="at least 2 ranks"):
        await opened(1)
    with pytest.raises(ValueError, match="mpi"):
        await Rendezvous.open(
            address="127.0.0.1", backend="mpi", name="g", epoch=1, world_size=2, timeout=1, connect_timeout=1
        )
    rendezvous = await opened(3)
    with pytest.raises(ValueError, match="ranks 1 to 2"):
        await rendezvous.complete({1: "one"})
    with pytest.raises(ValueError, match="rank 3"):
        join_group(rendezvous.spec, 3, member="three")
    await rendezvous.aclose()
    await rendezvous.aclose()


ENDS = """
import asyncio, signal, sys
from async_wsync.groups.rendezvous import Rendezvous

async def main():
    options = dict(address="127.0.0.1", backend="gloo", name="g", epoch=1, timeout=60, connect_timeout=60)
    rendezvous = await Rendezvous.open(world_size=2, **options)
    print(rendezvous.spec.master_port, flush=True)
    await rendezvous.complete({1: "engine-1"})

signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
loop = asyncio.new_event_loop()  # never closed, so that its tasks go with the interpreter
loop.run_until_complete(main())
"""


def test_a_source_that_is_ended_while_it_waits_for_members_ends_quietly() -> None:
    source = subprocess.Popen([sys.executable, "-c", ENDS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert source.stdout is not None
        assert int(source.stdout.readline())
        time.sleep(0.2)  # it has begun to listen for hellos, or will the same moment
        source.send_signal(signal.SIGTERM)
        _, err = source.communicate(timeout=30)
    finally:
        source.kill()
    assert source.returncode == signal.SIGTERM, err
    for complaint in ("frame #", "terminate called", "Fatal Python error"):
        assert complaint not in err


# ---------------------------------------------------------------------- sources that come again


def test_a_new_source_takes_over_the_engines_of_a_killed_one_under_the_same_name(fleet: Fleet) -> None:
    """Field case P2: the trainer dies in a broadcast; its engines serve the next one."""
    engines = fleet.peers(2)
    names = {1: "engine-1", 2: "engine-2"}
    for turn in range(2):
        source = Peer(f"source-{turn}")
        source.call("ping")
        options = {"address": "127.0.0.1", "timeout": 60.0, "connect_timeout": 30.0, "name": "the-same-name"}
        spec = source.call("open_group", backend="gloo", epoch=1, world_size=3, **options)
        joins = [engine.start("join", spec, rank, engine.name) for rank, engine in enumerate(engines, 1)]
        source.call("complete_group", names)
        for join in joins:
            join.result()
        received = [engine.start("receive", "the-same-name", [1000]) for engine in engines]
        source.call("send", [1000])
        assert [answer.result() for answer in received] == [[1000], [1000]]
        waiting = [engine.start("receive", "the-same-name", [1000]) for engine in engines]
        time.sleep(0.3)
        killed = time.monotonic()
        source.kill()
        for answer in waiting:
            answer.error(10)
            assert answer.ended - killed < SOON
        source.end()
        if turn:
            for engine in engines:
                engine.call("close", "the-same-name")


# --------------------------------------------------------------- engines that know nothing of us


async def test_engines_that_join_with_torchs_own_means_are_served_and_freed(fleet: Fleet) -> None:
    peers = fleet.peers(2)
    rendezvous = await opened(3, timeout=60.0)
    name = rendezvous.spec.name
    joins = [p.start("join_as_engines_with_torchs_means_do", rendezvous.spec, rank) for rank, p in enumerate(peers, 1)]
    group = await rendezvous.complete({1: "engine-1", 2: "engine-2"}, interop=True)
    for join in joins:
        (await join.settled()).result()
    assert group._group.connections() == 2, "their addresses are found in gloo's own records"
    received = [peer.start("receive_with_torchs_means", name, 1_000_000) for peer in peers]
    await group.broadcast([torch.full((1_000_000,), 2, dtype=torch.uint8)])
    for answer in received:
        assert (await answer.settled()).result() == 2_000_000
    waiting = [peer.start("receive_with_torchs_means", name, 1_000_000) for peer in peers]
    await asyncio.sleep(0.3)
    started = time.monotonic()
    group.abort()
    for answer in waiting:
        await answer.settled(10)
        assert answer.error()
        assert answer.ended - started < SOON
    await group.aclose(5.0)
    for peer in peers:  # what such a group leaves in a process is torch's; start afresh
        peer.kill()


async def test_ours_and_foreign_members_can_share_a_group(fleet: Fleet) -> None:
    peers = fleet.peers(2)
    rendezvous = await opened(3)
    joins = [
        peers[0].start("join", rendezvous.spec, 1, "engine-1"),
        peers[1].start("join_as_engines_with_torchs_means_do", rendezvous.spec, 2),
    ]
    group = await rendezvous.complete({1: "engine-1", 2: "foreign"}, hello=[1])
    for join in joins:
        (await join.settled()).result()
    received = [
        peers[0].start("receive", group.spec.name, [1000]),
        peers[1].start("receive_with_torchs_means", group.spec.name, 1000),
    ]
    await group.broadcast([torch.ones(1000, dtype=torch.uint8)])
    assert [(await answer.settled()).result() for answer in received] == [[1000], 1000]
    await group.aclose(5.0)
    peers[1].kill()
    await peers[0].ask("close", group.spec.name)


async def test_a_foreign_member_that_never_comes_is_bounded_and_named(fleet: Fleet) -> None:
    rendezvous = await opened(2, connect_timeout=1.5, timeout=60.0)
    started = time.monotonic()
    with pytest.raises(RendezvousError, match=r"rank 1 \(sglang\) did not connect within 1.5 s") as raised:
        await rendezvous.complete({1: "sglang"}, interop=True)
    assert time.monotonic() - started < 1.5 + SOON
    assert raised.value.missing_ranks == (1,)


@pytest.mark.parametrize("how", ["abort", "close"])
def test_a_seat_given_up_while_it_joins_says_so_at_once(how: str) -> None:
    with foreign_listener() as (port, heard):
        membership = GroupMembership(spec_at(port, connect_timeout=60.0), 1, source="trainer", fence=1, member="e0")
        joining = membership.join()
        deadline = time.monotonic() + SOON
        while not heard:  # it is in torch's hands, which would keep it for a minute
            assert time.monotonic() < deadline
            time.sleep(0.01)
        getattr(membership, how)()
        with pytest.raises(EngineFailed, match="while it was joined"):
            joining.result(timeout=SOON)
        membership.close()
