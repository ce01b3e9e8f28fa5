"""A source in a process of its own, for tests that kill it."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing as mp
import os
import signal
from collections.abc import Iterator
from typing import Any

import torch

from async_wsync.types import GroupSpec
from tests.support.groups import opened

SENDS = [32 << 20] * 4  # bytes of each tensor that it sends, over and over


def _live(conn: Any) -> None:
    async def main() -> None:
        rendezvous = await opened(2, timeout=60.0, connect_timeout=30.0)
        conn.send(rendezvous.spec)
        group = await rendezvous.complete({1: "engine"})
        conn.send("formed")
        while not conn.poll():
            await asyncio.sleep(0.005)
        while True:
            await group.broadcast([torch.ones(nbytes, dtype=torch.uint8) for nbytes in SENDS])
        await group.aclose()

    asyncio.run(main())


class DyingSource:
    """``spec`` of its group; `formed` once its engine has joined; `send` without end; `kill`."""

    def __init__(self) -> None:
        self._conn, theirs = mp.get_context("spawn").Pipe()
        self._process = mp.get_context("spawn").Process(target=_live, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.spec: GroupSpec = self._receive()

    def _receive(self) -> Any:
        assert self._conn.poll(60), "the source is silent"
        return self._conn.recv()

    def formed(self) -> None:
        assert self._receive() == "formed"

    def send(self) -> None:
        self._conn.send("send")

    def kill(self) -> None:
        assert self._process.pid is not None
        if self._process.is_alive():
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.join(10)
        self._conn.close()


@contextlib.contextmanager
def a_dying_source() -> Iterator[DyingSource]:
    source = DyingSource()
    try:
        yield source
    finally:
        source.kill()
