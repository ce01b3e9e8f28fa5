"""How the lock server learns that a holder's process is gone, fastest first.

- On the same machine: a pidfd. The kernel tells within milliseconds, and is never wrong.
- With a `LivenessActor` (a small actor that the client owns and that dies with it): about 10 ms, on any node.
- Everywhere: a Ray reference that the client owns. Asking for its value fails 1 to 2 s after the owner's death.

A stopped process or a cut link shows in none of them: that is what leases are for.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_wsync.runtime.object_refs import RemoteDied, remote_error
from async_wsync.runtime.threads import start_daemon

__all__ = ["ClientIdentity", "LivenessActor", "LivenessWatch", "own_identity"]

logger = logging.getLogger(__name__)

REF_INTERVAL = 0.1
REF_TIMEOUT = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientIdentity:
    """A process, as another process on its machine can recognise it. ``machine`` is empty if it cannot be."""

    client: str
    pid: int = 0
    machine: str = ""
    started: str = ""


class LivenessActor:
    """Lives as long as its owner. The server's call to `wait` never returns; it fails when the owner dies."""

    def ready(self) -> None: ...

    def wait(self) -> None:
        threading.Event().wait()


def own_identity(client: str) -> ClientIdentity:
    pid = os.getpid()
    return ClientIdentity(client=client, pid=pid, machine=_machine(), started=_start_time(pid))


def _machine() -> str:
    """Boot and pid namespace: equal in two processes only if a pid means the same to both."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    try:
        # The command's name may hold spaces and brackets; field 22 is the 20th after its closing one.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


class LivenessWatch:
    """Watches clients in threads of its own, and collects who died and how that was seen.

    `drain` is for the server's methods, which so need no lock and never wait. A client is watched from `watch`
    to its death; its reference is asked only while `heard` says that the client holds or waits.
    """

    def __init__(self, *, pidfds: bool = True, memory: float = 60.0) -> None:
        self._dead: deque[tuple[str, str]] = deque()
        self._known: dict[str, ClientIdentity] = {}
        self._refs: dict[str, Any] = {}
        self._actors: dict[str, Any] = {}
        self._heard: dict[str, float] = {}
        self._ways: dict[str, list[str]] = {}
        self._memory = memory
        self._pids = _PidWatch(self._report) if pidfds and hasattr(os, "pidfd_open") else None
        self._wake = threading.Event()
        self._ref_thread: threading.Thread | None = None

    def knows(self, client: str) -> bool:
        return client in self._known

    def heard(self, client: str) -> None:
        self._heard[client] = time.monotonic()
        if not self._wake.is_set():
            self._wake.set()

    def how(self, client: str) -> list[str]:
        """The ways in which this client's death would be noticed, of "pid", "liveness_actor" and "ref"."""
        return list(self._ways.get(client, ()))

    def watch(self, identity: ClientIdentity, ref: Any, liveness_actor: Any) -> None:
        """Start watching ``identity``. A client that is watched already stays watched as it is."""
        if identity.client in self._known:
            return
        self._known[identity.client] = identity
        ways = self._ways[identity.client] = []
        if self._pids is not None and identity.machine and identity.machine == _machine() and self._pids.add(identity):
            ways.append("pid")
        if liveness_actor is not None:
            # The server owns these references, so that their failure is that actor's death and not the
            # client's word.
            ready = liveness_actor.ready.remote()
            ready.future().add_done_callback(lambda future: _add_way(ways, future))
            call = liveness_actor.wait.remote()
            call.future().add_done_callback(lambda future: self._actor_died(identity.client, future))
            self._actors[identity.client] = (liveness_actor, ready, call)
        if ref is not None and not ways:
            ways.append("ref")
            self._refs[identity.client] = ref
            self.heard(identity.client)
            if self._ref_thread is None:
                self._ref_thread = start_daemon(self._ask_refs, name="wsync-lock-references")

    def drain(self) -> list[tuple[str, str]]:
        """(client, how it was seen) for each death since the last call."""
        if not self._dead:
            return []
        dead = []
        while self._dead:
            dead.append(self._dead.popleft())
        for client, _ in dead:
            self._known.pop(client, None)
            self._refs.pop(client, None)
            self._actors.pop(client, None)
            self._heard.pop(client, None)
            self._ways.pop(client, None)
        return dead

    def _report(self, client: str, why: str) -> None:
        logger.info("lock client %s: %s", client, why)
        self._dead.append((client, why))

    def _actor_died(self, client: str, future: Future[Any]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is None:
            return
        neutral = remote_error(error)
        if isinstance(neutral, RemoteDied) and neutral.certain:
            self._report(client, "its process died (its actor is gone)")

    def _ask_refs(self) -> None:
        pause = threading.Event()  # never set
        while True:
            oldest = time.monotonic() - self._memory
            active = [(c, r) for c, r in list(self._refs.items()) if self._heard.get(c, 0.0) > oldest]
            for client, ref in active:
                if _owner_died(ref) and self._refs.pop(client, None) is not None:
                    self._report(client, "its process died (reference)")
            if active:
                pause.wait(REF_INTERVAL)
            else:
                self._wake.clear()
                self._wake.wait(5.0)


def _add_way(ways: list[str], ready: Future[Any]) -> None:
    if not ready.cancelled() and ready.exception() is None:
        ways.append("liveness_actor")


def _owner_died(ref: Any) -> bool:
    future: Future[Any] = ref.future()
    try:
        error = future.exception(timeout=REF_TIMEOUT)
    except TimeoutError:
        return False  # on its way out, or a slow cluster: asked again
    return error is not None and isinstance(remote_error(error), RemoteDied)


class _PidWatch:
    """One thread that waits on pidfds."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report
        self._epoll = select.epoll()
        self._clients: dict[int, str] = {}
        self._thread: threading.Thread | None = None

    def add(self, identity: ClientIdentity) -> bool:
        """Watch this process. False if we are not allowed to."""
        try:
            fd = os.pidfd_open(identity.pid)
        except ProcessLookupError:
            self._report(identity.client, "its process died (pid)")
            return True
        except OSError as error:
            logger.info("lock client %s cannot be watched by its pid: %s", identity.client, error)
            return False
        if _start_time(identity.pid) != identity.started:
            os.close(fd)  # the pid is another process's by now
            self._report(identity.client, "its process died (pid)")
            return True
        self._clients[fd] = identity.client
        self._epoll.register(fd, select.EPOLLIN)
        if self._thread is None:
            self._thread = start_daemon(self._run, name="wsync-lock-pids")
        return True

    def _run(self) -> None:
        while True:
            for fd, _ in self._epoll.poll():
                self._epoll.unregister(fd)
                os.close(fd)
                self._report(self._clients.pop(fd), "its process died (pid)")
