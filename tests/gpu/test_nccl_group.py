"""Update groups over NCCL. Two devices are needed: NCCL refuses two ranks on one."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing as mp
import os
import threading
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from async_wsync.errors import BroadcastFailed
from async_wsync.groups.rendezvous import join_group
from async_wsync.groups.source_end import UpdateGroup
from async_wsync.runtime.loop_gap import LoopGapMeter
from tests.gpu.queued import busy_for
from tests.support.groups import opened

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SIZE = 64 << 20
MB = 1 << 20


def engine(conn: Connection, device_index: int) -> None:
    """Joins and receives as it is told, in a thread whose current device is not the group's."""
    device = torch.device("cuda", device_index)
    tensor = torch.zeros(SIZE, dtype=torch.uint8, device=device)
    member = None
    while True:
        verb, argument = conn.recv()
        if verb == "join":
            member = join_group(argument, 1, member="engine-1", device=device)
        elif verb == "receive":
            assert member is not None
            started = time.monotonic()
            try:
                member.broadcast([tensor], timeout=argument)
                conn.send(int(tensor.sum(dtype=torch.int64)))
            except BroadcastFailed as error:
                conn.send((time.monotonic() - started, str(error)))
        elif verb == "close":
            assert member is not None
            member.close()
            conn.send("closed")


class Engine:
    def __init__(self, device_index: int = 1) -> None:
        context = mp.get_context("spawn")
        self.conn, theirs = context.Pipe()
        self.process = context.Process(target=engine, args=(theirs, device_index), daemon=True)
        self.process.start()

    def tell(self, verb: str, argument: Any = None) -> None:
        self.conn.send((verb, argument))

    async def answer(self) -> Any:
        async with asyncio.timeout(60):
            while not self.conn.poll():
                await asyncio.sleep(0.005)
        return self.conn.recv()


async def connect(engine: Engine, device: int = 0, **options: Any) -> UpdateGroup:
    rendezvous = await opened(2, **{"backend": "nccl", "connect_timeout": 60.0, **options})
    engine.tell("join", rendezvous.spec)
    return await rendezvous.complete({1: "engine-1"}, device=torch.device("cuda", device))


@contextlib.asynccontextmanager
async def connected(device: int = 0, engine_device: int = 1) -> AsyncIterator[tuple[UpdateGroup, Engine]]:
    engine = Engine(engine_device)
    group = await connect(engine, device)
    try:
        yield group, engine
    finally:
        await group.aclose(10.0)
        engine.process.kill()


def filled(value: int, device: int = 0) -> torch.Tensor:
    return torch.full((SIZE,), value, dtype=torch.uint8, device=f"cuda:{device}")


async def test_bytes_arrive_and_a_receive_without_a_sender_ends_at_its_own_limit() -> None:
    async with connected() as (group, engine):
        engine.tell("receive", 20.0)
        with LoopGapMeter() as meter:
            await group.broadcast([filled(2)])
            assert await engine.answer() == 2 * SIZE
        assert meter.longest < 0.1
        engine.tell("receive", 1.0)
        seconds, why = await engine.answer()
        assert seconds < 5.0
        assert "not over after 1 s" in why
        group.abort()


async def test_an_abort_ends_a_broadcast_that_nobody_receives() -> None:
    async with connected() as (group, engine):
        engine.tell("receive", 20.0)
        await group.broadcast([filled(2)])
        await engine.answer()
        future = group.broadcast([filled(2)] * 8)
        await asyncio.sleep(0.5)
        assert not future.done()
        group.abort()
        with pytest.raises(BroadcastFailed):
            await future


@pytest.mark.parametrize(("source", "member"), [(0, 1), (1, 0)])
async def test_a_group_lives_on_the_device_of_the_tensors(source: int, member: int) -> None:
    assert torch.cuda.current_device() == 0
    async with connected(source, member) as (group, engine):
        assert group.device == torch.device("cuda", source)
        engine.tell("receive", 20.0)
        await group.broadcast([filled(3, source)])
        assert await engine.answer() == 3 * SIZE


@pytest.mark.parametrize("elsewhere", ["cpu", "cuda:1"])
async def test_a_tensor_that_is_elsewhere_ends_the_broadcast_by_name(elsewhere: str) -> None:
    async with connected() as (group, _):
        with pytest.raises(BroadcastFailed, match=f"a tensor on {elsewhere} cannot be sent in a group on cuda:0"):
            await group.broadcast([torch.zeros(8, dtype=torch.uint8, device=elsewhere)])


async def test_training_does_not_wait_for_a_broadcast() -> None:
    async with connected() as (group, engine):
        future = group.broadcast([filled(4)])
        await asyncio.sleep(0.2)
        trained = torch.cuda.current_stream().record_event()
        async with asyncio.timeout(5.0):
            while not trained.query():
                await asyncio.sleep(0.005)
        assert not future.done(), "nobody has received it yet"
        engine.tell("receive", 20.0)
        await future
        assert await engine.answer() == 4 * SIZE


async def test_a_broadcast_waits_for_what_made_its_tensors_and_not_for_later_training() -> None:
    async with connected() as (group, engine):
        tensor = filled(0)
        busy_for(1.0)
        tensor.fill_(5)
        engine.tell("receive", 20.0)
        future = group.broadcast([tensor])
        busy_for(4.0)
        later = torch.cuda.current_stream().record_event()
        await future
        assert not later.query(), "the broadcast waited for what was queued after it"
        assert await engine.answer() == 5 * SIZE


async def test_thirty_groups_give_back_memory_file_descriptors_and_threads() -> None:
    engine = Engine()

    async def once() -> None:
        group = await connect(engine)
        engine.tell("receive", 20.0)
        await group.broadcast([filled(1)])
        assert await engine.answer() == SIZE
        engine.tell("close")
        assert await engine.answer() == "closed"
        await group.aclose(20.0)

    def usage() -> tuple[list[int], int, int]:
        free = [torch.cuda.mem_get_info(device)[0] for device in (0, 1)]
        return free, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    for _ in range(3):
        await once()
    await asyncio.sleep(2.0)
    free, fds, threads = usage()
    for _ in range(30):
        await once()
    await asyncio.sleep(2.0)
    free_now, fds_now, threads_now = usage()
    engine.process.kill()
    assert all(before - now < 64 * MB for before, now in zip(free, free_now, strict=True)), (free, free_now)
    assert fds_now <= fds + 5
    assert threads_now <= threads + 5


def source_of_a_killed_engine(conn: Connection) -> None:
    """Survives: the watchdog's minute of waiting is shortened, so that it has its say within the test."""
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "100"
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"  # as torchrun sets it

    async def main() -> None:
        engine = Engine()
        group = await connect(engine, timeout=5.0)
        engine.tell("receive", 20.0)
        await group.broadcast([filled(1)])
        await engine.answer()
        future = group.broadcast([filled(1)] * 8)
        await asyncio.sleep(0.5)
        engine.process.kill()
        with contextlib.suppress(BroadcastFailed):
            await asyncio.wait_for(future, 15.0)
        assert future.done()
        assert group.aborted
        await asyncio.sleep(10.0)  # the watchdog looks every second
        await group.aclose(5.0)
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
        conn.send([thread.name for thread in threading.enumerate()])

    asyncio.run(main())


async def test_the_death_of_an_engine_does_not_end_the_sources_process() -> None:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=source_of_a_killed_engine, args=(theirs,))
    process.start()
    async with asyncio.timeout(120):
        while process.is_alive() and not ours.poll():
            await asyncio.sleep(0.05)
    assert ours.poll(), f"it died: exit code {process.exitcode}"
    assert "MainThread" in ours.recv()
    process.join(30)
    assert process.exitcode == 0
