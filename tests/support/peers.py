"""Engine-like processes for group tests: each obeys commands over a pipe, every command in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from async_wsync.groups.member_end import GroupMember
from async_wsync.groups.rendezvous import Rendezvous, join_group
from async_wsync.groups.source_end import UpdateGroup
from async_wsync.runtime.threads import wait_done
from async_wsync.types import GroupSpec
from tests.support.groups import opened

T = TypeVar("T")


class Rig:
    """What lives in a peer's process: its memberships by group name, and what it takes to be a source itself."""

    def __init__(self) -> None:
        self.members: dict[str, GroupMember] = {}
        self.foreign: dict[str, Any] = {}
        self.rendezvous: Rendezvous | None = None
        self.group: UpdateGroup | None = None
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def ping(self) -> int:
        return os.getpid()

    def join(self, spec: GroupSpec, rank: int, name: str) -> str:
        self.members[spec.name] = join_group(spec, rank, member=name)
        return repr(self.members[spec.name])

    def join_as_engines_with_torchs_means_do(self, spec: GroupSpec, rank: int) -> None:
        """What engines do that know nothing of this library: torch's rendezvous and its group helper."""
        c10d: Any = torch.distributed.distributed_c10d
        url = f"tcp://{spec.master_address}:{spec.master_port}"
        limit = timedelta(seconds=spec.timeout)
        store, _, _ = next(c10d.rendezvous(url, rank, spec.world_size, timeout=limit))
        store = c10d.PrefixStore(spec.name, store)
        pg, _ = c10d._new_process_group_helper(
            spec.world_size, rank, [], spec.backend, store, group_name=spec.name, timeout=limit
        )
        c10d._world.pg_group_ranks[pg] = {i: i for i in range(spec.world_size)}
        self.foreign[spec.name] = pg

    def receive_with_torchs_means(self, group: str, size: int) -> int:
        tensor = torch.zeros(size, dtype=torch.uint8)
        torch.distributed.broadcast(tensor, src=0, group=self.foreign[group])
        return int(tensor.sum(dtype=torch.int64))

    def greet_and_go_away(self, spec: GroupSpec, rank: int, **lies: Any) -> None:
        """Says hello as a member, with ``lies`` in place of the truth, and never connects."""
        store = torch.distributed.TCPStore(spec.master_address, spec.master_port, is_master=False)  # type: ignore[attr-defined]
        hello = {"protocol": 1, "group": spec.name, "world_size": spec.world_size, "member": "liar", **lies}
        store.set(f"async_wsync/{spec.name}/hello/{rank}", json.dumps(hello))
        self.foreign[spec.name] = store

    def write(self, spec: GroupSpec, key: str, value: str) -> None:
        """Put ``value`` into a group's store, as a member of another mind might."""
        store = torch.distributed.TCPStore(spec.master_address, spec.master_port, is_master=False)  # type: ignore[attr-defined]
        store.set(f"async_wsync/{spec.name}/{key}", value)
        self.foreign[spec.name] = store

    def open_group(self, **options: Any) -> GroupSpec:
        self.rendezvous = self._on_loop(Rendezvous.open(**options))
        return self.rendezvous.spec

    def complete_group(self, members: dict[int, str]) -> str:
        assert self.rendezvous is not None
        self.group = self._on_loop(self.rendezvous.complete(members))
        return repr(self.group)

    def send(self, sizes: list[int]) -> None:
        group = self.group
        assert group is not None

        async def send() -> None:
            await group.broadcast([torch.ones(size, dtype=torch.uint8) for size in sizes])

        self._on_loop(send())

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def thread_names(self) -> list[str]:
        return sorted(thread.name for thread in threading.enumerate())

    def receive(self, group: str, sizes: list[int], timeout: float | None = None) -> list[int]:
        """Receives one uint8 tensor per size; returns the sum of each."""
        tensors = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        self.members[group].broadcast(tensors, timeout)
        return [int(t.sum(dtype=torch.int64)) for t in tensors]

    def abort(self, group: str) -> None:
        self.members[group].abort()

    def aborted(self, group: str) -> bool:
        return self.members[group].aborted

    def close(self, group: str) -> None:
        self.members.pop(group).close()

    def connections(self, group: str) -> int:
        return self.members[group]._group.connections()

    def usage(self) -> tuple[int, int]:
        """(open file descriptors, threads of all kinds)."""
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _serve(conn: Connection) -> None:
    torch.set_num_threads(1)
    rig, lock = Rig(), threading.Lock()

    def obey(request_id: int, verb: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        started = time.monotonic()
        try:
            outcome: tuple[bool, Any] = (True, getattr(rig, verb)(*args, **options))
        except Exception as error:
            outcome = (False, error)
        with lock, contextlib.suppress(OSError):
            conn.send((request_id, *outcome, started, time.monotonic()))

    while True:
        try:
            message = conn.recv()
        except EOFError:
            return
        threading.Thread(target=obey, args=message, daemon=True).start()


@dataclass
class Answer:
    """One call's answer. ``started`` and ``ended`` by time.monotonic(), which all processes of a machine share."""

    future: Future[Any] = field(default_factory=Future)
    started: float = 0.0
    ended: float = 0.0

    def result(self, timeout: float = 30.0) -> Any:
        return self.future.result(timeout)

    def error(self, timeout: float = 30.0) -> BaseException:
        error = self.future.exception(timeout)
        assert error is not None, f"it succeeded: {self.future.result()!r}"
        return error

    async def settled(self, timeout: float = 30.0) -> Answer:
        async with asyncio.timeout(timeout):
            await wait_done(self.future)
        return self


class Peer:
    """The test's handle of a peer process."""

    def __init__(self, name: str) -> None:
        self.name = name
        context = mp.get_context("spawn")
        self._conn, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True, name=name)
        self.process.start()
        theirs.close()
        self._answers: dict[int, Answer] = {}
        threading.Thread(target=self._listen, daemon=True, name=f"listen {name}").start()

    def start(self, verb: str, *args: Any, **options: Any) -> Answer:
        request_id, answer = len(self._answers), Answer()
        self._answers[request_id] = answer
        self._conn.send((request_id, verb, args, options))
        return answer

    def call(self, verb: str, *args: Any, **options: Any) -> Any:
        return self.start(verb, *args, **options).result(60)

    async def ask(self, verb: str, *args: Any, **options: Any) -> Any:
        """As `call`, on an event loop."""
        return (await self.start(verb, *args, **options).settled(60)).result()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.join(10)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        if self.process.is_alive():
            self.kill()
        self.process.close()
        self._conn.close()

    def _signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def _listen(self) -> None:
        while True:
            try:
                request_id, ok, value, started, ended = self._conn.recv()
            except (EOFError, OSError, TypeError):  # TypeError: closed meanwhile
                return
            answer = self._answers[request_id]
            answer.started, answer.ended = started, ended
            if ok:
                answer.future.set_result(value)
            else:
                answer.future.set_exception(value)


class Fleet:
    """Peers named engine-1, engine-2, ... kept between tests; dead ones are replaced when asked for."""

    def __init__(self) -> None:
        self._peers: list[Peer] = []

    def peers(self, count: int) -> list[Peer]:
        for i, peer in enumerate(self._peers):
            if not peer.process.is_alive():
                peer.end()
                self._peers[i] = Peer(f"engine-{i + 1}")
        while len(self._peers) < count:
            self._peers.append(Peer(f"engine-{len(self._peers) + 1}"))
        for answer in [peer.start("ping") for peer in self._peers[:count]]:
            answer.result(90)
        return self._peers[:count]

    def end(self) -> None:
        for peer in self._peers:
            peer.end()


async def connect(peers: Sequence[Peer], **options: Any) -> UpdateGroup:
    """A group of this process as the source and ``peers`` as ranks 1, 2, ..."""
    rendezvous = await opened(len(peers) + 1, **options)
    joins = [peer.start("join", rendezvous.spec, rank, peer.name) for rank, peer in enumerate(peers, 1)]
    group = await rendezvous.complete({rank: peer.name for rank, peer in enumerate(peers, 1)})
    for join in joins:
        (await join.settled()).result()
    return group


async def disconnect(group: UpdateGroup, peers: Sequence[Peer]) -> None:
    for peer in peers:
        if peer.process.is_alive():
            await peer.ask("close", group.spec.name)
    await group.aclose(5.0)
