"""Driving a `WeightReceiver` without Ray: what `TorchEngine` does, by hand."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from torch import nn

from async_wsync.engines.torch import messages as p
from async_wsync.engines.torch.receiver import WeightReceiver
from async_wsync.groups.source_end import UpdateGroup
from async_wsync.types import Call, GroupSpec, UpdateSpec
from tests.support.groups import opened
from tests.support.updates import staged

POLL_INTERVAL = 0.002


def a_call(*, source: str = "trainer", fence: int = 1, timeout: float = 20.0) -> Call:
    return Call(source=source, fence=fence, timeout=timeout)


def a_request(verb: p.Verb, call: Call | None = None, **more: Any) -> p.Request:
    return p.Request(id=uuid.uuid4().hex, call=call or a_call(), verb=verb, **more)


def start(receiver: WeightReceiver, verb: p.Verb, call: Call | None = None) -> str:
    """Send the request; returns its request_id."""
    request = a_request(verb, call)
    receiver.weight_sync(request)
    return request.id


def look(receiver: WeightReceiver, request_id: str) -> p.Reply:
    return receiver.weight_sync(a_request(p.Poll(request_id)))


async def outcome(receiver: WeightReceiver, request_id: str, *, within: float = 20.0) -> Any:
    """Poll to the end; the value, or the error as a source would raise it."""
    async with asyncio.timeout(within):
        while not (reply := look(receiver, request_id)).done:
            await asyncio.sleep(POLL_INTERVAL)
    if reply.failure is not None:
        raise reply.failure.rebuild(engine="engine", phase="test")
    return reply.value


async def ask(receiver: WeightReceiver, verb: p.Verb, call: Call | None = None, *, within: float = 20.0) -> Any:
    return await outcome(receiver, start(receiver, verb, call), within=within)


async def connect(
    receivers: Sequence[WeightReceiver], call: Call | None = None, *, timeout: float = 20.0
) -> UpdateGroup:
    """A real group of this process's source with each receiver."""
    rendezvous = await opened(1 + len(receivers), timeout=timeout, connect_timeout=20.0)
    ranks = {rank: f"engine-{rank}" for rank in range(1, 1 + len(receivers))}
    joins = [ask(receiver, p.Join(rendezvous.spec, 1 + i), call) for i, receiver in enumerate(receivers)]
    group, *_ = await asyncio.gather(rendezvous.complete(ranks), *joins)
    return group


async def send_all(
    group: UpdateGroup, update: UpdateSpec, model: nn.Module, receivers: Sequence[WeightReceiver], call: Call
) -> None:
    for bucket in update.buckets:
        requests = [start(receiver, p.Receive(update.update_id, bucket.index), call) for receiver in receivers]
        await group.broadcast(staged(bucket, model))
        for receiver, request_id in zip(receivers, requests, strict=True):
            await outcome(receiver, request_id)


def a_spec_of_nobody() -> GroupSpec:
    """A group whose source does not exist."""
    return GroupSpec(
        name="nobody",
        backend="gloo",
        master_address="127.0.0.1",
        master_port=9,
        world_size=2,
        epoch=1,
        timeout=5.0,
        connect_timeout=5.0,
    )
