"""Update groups over NCCL. Two devices are needed: NCCL refuses two ranks on one."""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import time
from multiprocessing.connection import Connection

import pytest
import torch

from async_wsync.errors import BroadcastFailed
from async_wsync.runtime.loop_gap import LoopGapMeter
from async_wsync.runtime.update_group import Rendezvous, UpdateGroup, join_group
from async_wsync.types import GroupSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SIZE = 64 << 20


def engine(conn: Connection, spec: GroupSpec) -> None:
    device = torch.device("cuda", 1)
    member = join_group(spec, 1, member="engine-1", device=device)
    tensor = torch.zeros(SIZE, dtype=torch.uint8, device=device)
    member.broadcast([tensor])
    conn.send(int(tensor.sum(dtype=torch.int64)))
    if conn.recv() == "wait for nothing":
        started = time.monotonic()
        try:
            member.broadcast([tensor], timeout=1.0)
        except BroadcastFailed:
            conn.send(time.monotonic() - started)
    member.close()


async def connected() -> tuple[UpdateGroup, Connection]:
    rendezvous = await Rendezvous.open(
        address="127.0.0.1", backend="nccl", name="gpus", epoch=1, world_size=2, timeout=20.0, connect_timeout=60.0
    )
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=engine, args=(theirs, rendezvous.spec), daemon=True).start()
    return await rendezvous.complete({1: "engine-1"}, device=torch.device("cuda", 0)), ours


async def until_readable(conn: Connection) -> None:
    async with asyncio.timeout(60):
        while not conn.poll():
            await asyncio.sleep(0.005)


async def test_bytes_arrive_and_a_receive_without_a_sender_ends_at_its_own_limit() -> None:
    group, conn = await connected()
    tensor = torch.full((SIZE,), 2, dtype=torch.uint8, device="cuda:0")
    with LoopGapMeter() as meter:
        await group.broadcast([tensor])
        await until_readable(conn)
    assert conn.recv() == 2 * SIZE
    assert meter.longest < 0.1
    conn.send("wait for nothing")
    await until_readable(conn)
    assert conn.recv() < 5.0
    group.abort()
    await group.aclose(10.0)


async def test_an_abort_ends_a_broadcast_that_nobody_receives() -> None:
    group, conn = await connected()
    tensor = torch.full((SIZE,), 2, dtype=torch.uint8, device="cuda:0")
    await group.broadcast([tensor])
    await until_readable(conn)
    future = group.broadcast([tensor] * 8)
    await asyncio.sleep(0.5)
    group.abort()
    with pytest.raises(BroadcastFailed):
        await future
    await group.aclose(10.0)
