"""`BucketPipeline` over real groups, with engines that answer, fall silent, or claim what was never received."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import torch

from async_wsync.engines.torch import messages as p
from async_wsync.engines.torch.receiver import WeightReceiver
from async_wsync.engines.update_codec import pack_update
from async_wsync.errors import EngineTimeout
from async_wsync.groups.manager import EngineGroup, GroupManager
from async_wsync.lock.null import NullLock
from async_wsync.progress import NoProgress
from async_wsync.protocols import RolloutEngine
from async_wsync.runtime.engine_calls import EngineCalls
from async_wsync.sources.bucket_stream import StagedBucket
from async_wsync.sources.reader import SourceReader
from async_wsync.sources.state_dict import StateDictSource
from async_wsync.transfer.layout import lay_out
from async_wsync.transfer.pack import stage
from async_wsync.transfer.tensors import param_meta
from async_wsync.types import BucketSpec, Call, Manifest, PauseMode, Timeouts, UpdateSpec, WireFormat
from async_wsync.update.context import BroadcasterContext, Settings, UpdateContext, UpdateRequest
from async_wsync.update.fleet import Fleet
from async_wsync.update.history import UpdateHistory
from async_wsync.update.pipeline import BucketAcknowledged, BucketPipeline, BucketStaged, BucketSubmitted, EngineDropped
from tests.support.receiver_driver import a_call, ask, connect
from tests.support.updates import update_of

LIMIT = 1.0
#: Far above what a socket takes in on its own, so that a broadcast that nobody enters does not end.
NUMEL = 8 * 1024 * 1024


class Member(RolloutEngine):
    """A receiver in this process, in a group of its own. ``does``: receive, nothing (and says so), or never answers."""

    name = ""
    num_ranks = 1
    wire_format = WireFormat.PACKED
    pipelined = True
    supports_fence = True

    def __init__(self, name: str, does: str) -> None:
        self.name, self.does = name, does
        self.model = {"w": torch.zeros(NUMEL)}
        self.receiver = WeightReceiver(self.model, name=name)

    async def receive(self, call: Call, update: UpdateSpec, bucket: BucketSpec) -> None:
        if self.does == "silence":
            await asyncio.get_running_loop().create_future()
        if self.does == "receive":
            await ask(self.receiver, p.Receive(update.update_id, bucket.index), a_call())


class CountedTransfer(BucketPipeline):
    steps = 0

    async def _wait(self, pull: Any) -> None:
        self.steps += 1
        await super()._wait(pull)


def a_context(members: tuple[Member, ...], source: SourceReader, *, least: int) -> UpdateContext:
    """What a broadcaster over these members makes for an update."""
    limits = Timeouts(bucket=LIMIT, idle=20.0)
    fleet = Fleet(members)
    groups = GroupManager(
        topology="per_engine",
        master_address=None,
        timeouts=limits,
        num_buffers=2,
        is_lost=fleet.roster.is_lost,
    )
    settings = Settings(
        bucket_bytes=1 << 30,
        num_buffers=2,
        timeouts=limits,
        backend="gloo",
        pause_mode=PauseMode.DRAIN,
        resume_policy="whole",
        on_engine_failure="drop",
        on_cancel="finish",
        lock_scope="update",
        topology="per_engine",
        min_engines=least,
        max_rebuilds=0,
    )
    broadcaster = BroadcasterContext(
        source="trainer", fleet=fleet, groups=groups, lock=NullLock(), settings=settings, progress=NoProgress()
    )
    request = UpdateRequest(version=1, targets=fleet.names, pause_mode=PauseMode.DRAIN)
    return broadcaster.for_update(request, reader=source, history=UpdateHistory(version=1, emit=lambda event: None))


async def send_to(
    *members: Member, least: int = 1
) -> tuple[tuple[str, ...], CountedTransfer, float, BaseException | None]:
    """One bucket to all; the names of the dropped, the transfer, the seconds, and what it raised."""
    tensor = torch.arange(NUMEL, dtype=torch.float32)
    update = update_of(Manifest(params=(param_meta("w", tensor),)), bucket_bytes=1 << 30)
    (bucket,) = update.buckets
    context = a_context(members, SourceReader(StateDictSource({"w": tensor})), least=least)
    calls = EngineCalls(context.cancellation.interrupt)
    groups: dict[EngineGroup, UpdateSpec] = {}
    for member in members:
        end = await connect([member.receiver], timeout=20.0)
        spec = update_of(update.manifest, bucket_bytes=1 << 30, group=end.spec.name)
        await ask(member.receiver, p.Begin(pack_update(spec)), a_call())
        context.fleet.roster[member.name].begin()
        groups[EngineGroup((member,), WireFormat.PACKED, end, (None,))] = spec

    async def buckets() -> AsyncIterator[StagedBucket]:
        wire = {WireFormat.PACKED: stage(lay_out(bucket, WireFormat.PACKED), {"w": tensor})}
        yield StagedBucket(bucket, wire, threading.Semaphore())

    transfer = CountedTransfer(context, calls, groups, one_at_a_time=False, may_drop=True)
    events: list[Any] = []
    began, error = time.monotonic(), None
    async with NullLock().hold(label="the test") as context.history.held:
        try:
            async for event in transfer.run(buckets()):
                events.append(event)  # noqa: PERF401 - what came before an error is kept
        except EngineTimeout as late:
            error = late
    seconds = time.monotonic() - began
    dropped = context.fleet.roster.left_out("dropped")
    assert {e.engine for e in events if isinstance(e, EngineDropped)} == set(dropped), "told of each"
    assert events[:2] == [BucketStaged(bucket), BucketSubmitted(bucket)]
    if error is None:
        (done,) = [e for e in events if isinstance(e, BucketAcknowledged)]
        assert set(done.engines) == {m.name for m in members} - set(dropped)
    for group in groups:
        group.abort()
    await calls.settle(limit=0.5)
    for group in groups:
        await group.source_end.aclose(2.0)
    await context.reader.aclose()
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
    assert dropped == ("silent",)
    assert LIMIT <= seconds < LIMIT + 1.0
    assert transfer.steps < 20, "nothing spins"


async def test_a_broadcast_that_nobody_answers_for_is_late_too() -> None:
    dropped, transfer, seconds, error = await send_to(Member("liar", "nothing"), Member("good", "receive"))
    assert (dropped, error) == (("liar",), None)
    assert LIMIT <= seconds < LIMIT + 1.0
    assert transfer.steps < 20, "nothing spins"
