"""The control connection: a source's requests to an engine, beside Ray's queue of the actor's calls.

Ray runs an actor's calls on as many threads or tasks as its ``max_concurrency``. When requests for generations hold
all of them, a call of ours would wait behind these; and the requests, once the engine is paused, behind ours. So the
engine's process listens on a port of its own from the first hello on, and answers there in threads of its own.

The address and a secret token travel through Ray only: in the answer to that hello, and in Ray's key-value store
for sources that come while no call gets through. Each end proves that it knows the token before the other
unpickles anything. Whoever cannot connect goes on calling through Ray.
"""

from __future__ import annotations

import hmac
import json
import logging
import pickle
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any

from async_wsync.engines.failure import Failure
from async_wsync.engines.torch.messages import ControlAddress, Request
from async_wsync.runtime import cluster_kv
from async_wsync.runtime.foreign_code import contained
from async_wsync.runtime.threads import pause, spawn, start_daemon, wait_for

__all__ = ["ControlConnection", "ControlLost", "ControlServer"]

logger = logging.getLogger("async_wsync")

_CONNECT_LIMIT = 1.0  # seconds, to connect and to prove who one is
_AVOIDED_FOR = 60.0  # seconds
_DEAD_LINK = 10  # seconds without a sign of the other machine's kernel; a stopped process still gives it
_NONCE = 32
_LENGTH = struct.Struct(">Q")


class ControlLost(Exception):
    """The control connection is no use any more; the request may or may not have arrived."""


class _NotConnected(ControlLost):
    """There never was a connection."""


def _publish(key: str, address: ControlAddress) -> None:
    cluster_kv.put(key, json.dumps(asdict(address)).encode())


def _look_up(key: str) -> ControlAddress | None:
    """What was published under ``key``, maybe by a process that is gone. Blocks."""
    found = cluster_kv.get(key)
    try:
        return None if found is None else ControlAddress(**json.loads(found))
    except (ValueError, TypeError):
        return None  # of another version of this package


class ControlServer:
    """The engine's end. ``answer`` is called with each request, in a thread of its connection."""

    def __init__(self, answer: Callable[[Request], Any]) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self._address: ControlAddress | None = None
        self._published: set[str] = set()

    def open(self, host: str, key: str) -> ControlAddress | None:
        """Listen, once; the address, which is published under ``key``. None where ``host`` cannot be listened on."""
        with self._lock:
            if self._address is None:
                try:
                    listener = socket.create_server((host, 0), family=_family(host))
                except OSError as error:
                    logger.warning("no control connections, as nothing can listen on %s: %s", host, error)
                    return None
                self._address = ControlAddress(
                    host=host, port=listener.getsockname()[1], token=secrets.token_hex(_NONCE)
                )
                start_daemon(self._accept, listener, self._address.token, name="wsync-control")
            if key not in self._published:
                self._published.add(key)
                start_daemon(_publish, key, self._address, name="wsync-control-publish")
            return self._address

    def _accept(self, listener: socket.socket, token: str) -> None:
        with listener:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:  # out of descriptors, say
                    pause(0.1)
                    continue
                start_daemon(self._serve, connection, token, name="wsync-control-connection")

    def _serve(self, connection: socket.socket, token: str) -> None:
        with connection:
            try:
                _prove(connection, token, listens=True)
                _prepare(connection)
                while True:
                    _send(connection, self._answer_to(_receive(connection)))
            except (OSError, EOFError, pickle.UnpicklingError) as error:
                logger.debug("a control connection ended: %r", error)

    def _answer_to(self, data: bytes) -> bytes:
        try:
            with contained():
                return pickle.dumps(self._answer(pickle.loads(data)))
        except Exception as error:
            return pickle.dumps(Failure.of(error))


class ControlConnection:
    """The source's end: requests are sent one after the other, each after the last one's answer.

    ``key``: under which the engine's address is published.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self._address: ControlAddress | None = None
        self._talk: _Talk | None = None
        self._avoided: ControlAddress | None = None
        self._avoided_until = 0.0

    def __del__(self) -> None:
        self.close()

    @property
    def usable(self) -> bool:
        """Whether there is an address that was not found to be dead."""
        return self._address is not None

    def use(self, address: ControlAddress | None) -> None:
        """From now on, ask there; unless that has failed a short while ago, and would cost as long again."""
        if address == self._avoided and time.monotonic() < self._avoided_until:
            address = None
        if address != self._address:
            self.close()
            self._address = address

    async def look_up(self) -> None:
        """Use what is published, if anything is."""
        self.use(await wait_for(spawn(_look_up, self.key, name="wsync-control-look-up")))

    async def ask(self, request: Request) -> Any:
        """The engine's answer, or the `Failure` of its entry point. Raises `ControlLost`, also where none is usable.

        Sent, after those before, even if the await is cancelled.
        """
        if self._address is None:
            raise ControlLost("no address is known")
        if self._talk is None:
            self._talk = _Talk(self._address)
        talk = self._talk
        try:
            return await wait_for(talk.exchange(request))
        except ControlLost as lost:
            if talk is self._talk:
                if isinstance(lost, _NotConnected):
                    self._avoid(self._address, lost)
                self.close()
            raise

    def _avoid(self, address: ControlAddress, why: ControlLost) -> None:
        logger.warning(
            "actor %s takes no control connections at %s port %d (%s): its calls go through Ray's queue",
            self.key,
            address.host,
            address.port,
            why,
        )
        self._avoided, self._avoided_until = address, time.monotonic() + _AVOIDED_FOR

    def close(self) -> None:
        """Hang up. Idempotent; may be used again."""
        talk, self._talk, self._address = self._talk, None, None
        if talk is not None:
            talk.hang_up()


class _Talk:
    """One connection, and the daemon thread that owns it: a socket that is garbage before it is closed is a warning."""

    def __init__(self, address: ControlAddress) -> None:
        self._address = address
        self._socket: socket.socket | None = None
        self._over = False
        self._requests: SimpleQueue[tuple[Request, Future[Any]] | None] = SimpleQueue()
        start_daemon(self._run, name="wsync-control-talk")

    def exchange(self, request: Request) -> Future[Any]:
        answer: Future[Any] = Future()
        self._requests.put((request, answer))
        return answer

    def hang_up(self) -> None:
        """From any thread: end the exchange that is under way, and those that wait."""
        self._over = True
        self._requests.put(None)
        if (connected := self._socket) is not None:
            try:
                connected.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it is over already

    def _run(self) -> None:
        while (waiting := self._requests.get()) is not None:
            request, answer = waiting
            try:
                answer.set_result(self._exchange(request))
            except Exception as error:
                answer.set_exception(error)
            del waiting, request, answer
        if self._socket is not None:
            self._socket.close()

    def _exchange(self, request: Request) -> Any:
        data = pickle.dumps(request)
        lost: type[ControlLost] = _NotConnected
        try:
            if self._socket is None:
                self._socket = socket.create_connection((self._address.host, self._address.port), _CONNECT_LIMIT)
                _prove(self._socket, self._address.token, listens=False)
                _prepare(self._socket)
            lost = ControlLost
            if self._over:
                raise EOFError("it was closed")
            _send(self._socket, data)
            return pickle.loads(_receive(self._socket))
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            self._over = True
            raise lost(f"{type(error).__name__}: {error}") from error


# -------------------------------------------------------------------------------- on the wire


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _prepare(connection: socket.socket) -> None:
    """From now on an answer, and the next request, may take any time; a link that is gone is noticed at either end."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limits = {
        "TCP_KEEPIDLE": _DEAD_LINK // 2,
        "TCP_KEEPINTVL": 2,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": _DEAD_LINK * 1000,
    }
    for name, value in limits.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _prove(connection: socket.socket, token: str, *, listens: bool) -> None:
    """Both ends show that they know the token, for random numbers of both. OSError where the other does not."""
    connection.settimeout(_CONNECT_LIMIT)
    mine = secrets.token_bytes(_NONCE)
    connection.sendall(mine)
    theirs = _exactly(connection, _NONCE)
    connection.sendall(_proof(token, listens, mine, theirs))
    if not hmac.compare_digest(_exactly(connection, _NONCE), _proof(token, not listens, theirs, mine)):
        raise ConnectionError("the other end does not know the token")


def _proof(token: str, listens: bool, own: bytes, other: bytes) -> bytes:
    return hmac.digest(token.encode(), (b"engine" if listens else b"source") + own + other, "sha256")


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _receive(connection: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return _exactly(connection, length)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        count = connection.recv_into(view[filled:])
        if count == 0:
            raise EOFError("the other end hung up")
        filled += count
    return bytes(data)
