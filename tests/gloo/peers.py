"""Engine-like processes for group tests: each obeys commands over a pipe, every command in a thread of its own."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

import torch

from async_wsync.runtime.update_group import GroupMember, join_group
from async_wsync.types import GroupSpec


class Rig:
    """What lives in a peer's process: its memberships by group name."""

    def __init__(self) -> None:
        self.members: dict[str, GroupMember] = {}

    def ping(self) -> int:
        return os.getpid()

    def join(self, spec: GroupSpec, rank: int, name: str) -> str:
        self.members[spec.name] = join_group(spec, rank, member=name)
        return repr(self.members[spec.name])

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
    rig, lock = Rig(), threading.Lock()

    def obey(ticket: int, verb: str, args: tuple[Any, ...]) -> None:
        started = time.monotonic()
        try:
            outcome: tuple[bool, Any] = (True, getattr(rig, verb)(*args))
        except Exception as error:
            outcome = (False, error)
        with lock, contextlib.suppress(OSError):
            conn.send((ticket, *outcome, time.monotonic() - started))

    while True:
        try:
            message = conn.recv()
        except EOFError:
            return
        threading.Thread(target=obey, args=message, daemon=True).start()


class Peer:
    """The test's handle of a peer process."""

    def __init__(self, name: str) -> None:
        self.name = name
        context = mp.get_context("spawn")
        self._conn, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True, name=name)
        self.process.start()
        theirs.close()
        self._answers: dict[int, Future[Any]] = {}
        self.seconds: dict[str, float] = {}
        threading.Thread(target=self._listen, daemon=True, name=f"listen {name}").start()

    def start(self, verb: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.verb = verb  # type: ignore[attr-defined]
        ticket = len(self._answers)
        self._answers[ticket] = future
        self._conn.send((ticket, verb, args))
        return future

    def call(self, verb: str, *args: Any, timeout: float = 30.0) -> Any:
        return self.start(verb, *args).result(timeout)

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(10)

    def pause(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def end(self) -> None:
        if self.process.is_alive():
            self.kill()
        self._conn.close()

    def _listen(self) -> None:
        while True:
            try:
                ticket, ok, value, seconds = self._conn.recv()
            except (EOFError, OSError):
                return
            future = self._answers[ticket]
            self.seconds[future.verb] = seconds  # type: ignore[attr-defined]
            if ok:
                future.set_result(value)
            else:
                future.set_exception(value)


@contextlib.contextmanager
def running_peers(count: int) -> Iterator[list[Peer]]:
    peers = [Peer(f"engine-{i}") for i in range(count)]
    try:
        for peer in peers:
            peer.call("ping", timeout=60)
        yield peers
    finally:
        for peer in peers:
            peer.end()
