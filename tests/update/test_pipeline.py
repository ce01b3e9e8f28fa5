"""`BucketPipeline` over real groups, with engines that answer, fall silent, or claim what was never received."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from async_wsync.engines.torch import messages as p
from async_wsync.engines.torch.receiver import WeightReceiver
from async_wsync.errors import EngineTimeout
from async_wsync.groups.manager import Link
from async_wsync.runtime.engine_calls import EngineCalls, Interrupt
from async_wsync.sources.bucket_stream import StagedBucket
from async_wsync.transfer.layout import lay_out
from async_wsync.transfer.pack import stage
from async_wsync.transfer.tensors import param_meta
from async_wsync.types import BucketSpec, Manifest, UpdateSpec, WireFormat
from async_wsync.update.pipeline import BucketPipeline
from tests.support.receiver_driver import a_call, ask, connect
from tests.support.updates import update_of

LIMIT = 1.0
#: Far above what a socket takes in on its own, so that a broadcast that nobody enters does not end.
NUMEL = 8 * 1024 * 1024


@dataclass(eq=False)
class Member:
    """A receiver in this process, in a group of its own. ``does``: receive, nothing (and says so), or never answers."""

    name: str
    does: str
    model: dict[str, torch.Tensor] = field(default_factory=lambda: {"w": torch.zeros(NUMEL)})

    def __post_init__(self) -> None:
        self.receiver = WeightReceiver(self.model, name=self.name)

    async def receive(self, update: UpdateSpec, bucket: BucketSpec) -> None:
        if self.does == "silence":
            await asyncio.get_running_loop().create_future()
        if self.does == "receive":
            await ask(self.receiver, p.Receive(update.update_id, bucket.index), a_call())


class CountedTransfer(BucketPipeline):
    steps = 0

    async def _step(self, also: Iterable[asyncio.Future[Any]] = ()) -> None:
        self.steps += 1
        await super()._step(also)


async def send_to(*members: Member, least: int = 1) -> tuple[list[str], CountedTransfer, float, BaseException | None]:
    """One bucket to all; the names of the dropped, the transfer, the seconds, and what it raised."""
    tensor = torch.arange(NUMEL, dtype=torch.float32)
    update = update_of(Manifest(params=(param_meta("w", tensor),)), bucket_bytes=1 << 30)
    (bucket,) = update.buckets
    calls, dropped, links, updates = EngineCalls(Interrupt()), [], [], {}
    for member in members:
        group = await connect([member.receiver], timeout=20.0)
        links.append(Link((member,), WireFormat.PACKED, group, (None,)))  # type: ignore[arg-type]
        spec = update_of(update.manifest, bucket_bytes=1 << 30, group=group.spec.name)
        await ask(member.receiver, p.Begin(p.pack_update(spec)), a_call())
        updates[member.name] = spec

    async def buckets() -> AsyncIterator[StagedBucket]:
        wire = {WireFormat.PACKED: stage(lay_out(bucket, WireFormat.PACKED), {"w": tensor})}
        yield StagedBucket(bucket, wire, threading.Semaphore())

    def receive(member: Any, bucket: BucketSpec, link: Link) -> Coroutine[Any, Any, None]:
        return member.receive(updates[member.name], bucket)  # type: ignore[no-any-return]

    def isolate(name: str, failure: BaseException) -> bool:
        assert name not in dropped, "one record of who is dropped"

        if len(members) - len(dropped) - 1 < least:
            return False
        dropped.append(name)
        return True

    transfer = CountedTransfer(
        links=links,
        calls=calls,
        receive=receive,
        turn=nullcontext,
        submitted=lambda bucket: None,
        acknowledged=lambda bucket, names: acknowledged.extend(names),
        isolate=isolate,
        is_dropped=lambda name: name in dropped,
        bucket_limit=LIMIT,
        idle_limit=20.0,
        one_at_a_time=False,
        should_stop=lambda: None,
    )
    acknowledged: list[str] = []
    began, error = time.monotonic(), None
    try:
        await transfer.run(buckets())
        assert set(acknowledged) == {m.name for m in members} - set(dropped)
    except EngineTimeout as late:
        error = late
    seconds = time.monotonic() - began
    for link in links:
        link.abort()
    await calls.settle(limit=0.5)
    for link in links:
        await link.group.aclose(2.0)
    for member in members:
        if member.does == "receive" and error is None:
            assert torch.equal(member.model["w"], tensor)
    return dropped, transfer, seconds, error


async def test_an_engine_that_is_late_and_one_that_never_took_part_are_dropped_at_one_limit() -> None:
    members = Member("silent", "silence"), Member("liar", "nothing"), Member("good", "receive")
    dropped, transfer, seconds, error = await send_to(*members)
    assert error is None
    assert set(dropped) == {"silent", "liar"}
    assert LIMIT <= seconds < LIMIT + 1.0
    assert transfer.steps < 20, "nothing spins"


async def test_where_too_few_would_be_left_the_late_ones_end_the_transfer_at_the_limit() -> None:
    members = Member("silent", "silence"), Member("liar", "nothing"), Member("good", "receive")
    dropped, transfer, seconds, error = await send_to(*members, least=2)
    assert isinstance(error, EngineTimeout)
    assert dropped == ["silent"]
    assert LIMIT <= seconds < LIMIT + 1.0
    assert transfer.steps < 20, "nothing spins"


async def test_a_broadcast_that_nobody_answers_for_is_late_too() -> None:
    dropped, transfer, seconds, error = await send_to(Member("liar", "nothing"), Member("good", "receive"))
    assert (dropped, error) == (["liar"], None)
    assert LIMIT <= seconds < LIMIT + 1.0
    assert transfer.steps < 20, "nothing spins"
