"""A group of this process with real `TorchEngine`s."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

from async_wsync import TorchEngine
from async_wsync.groups.rendezvous import Rendezvous
from async_wsync.groups.update_group import UpdateGroup
from async_wsync.types import Call


async def connect(engines: Sequence[TorchEngine], call: Call, *, timeout: float = 20.0) -> UpdateGroup:
    rendezvous = await Rendezvous.open(
        address="127.0.0.1",
        backend="gloo",
        name=f"test-{uuid.uuid4().hex[:8]}",
        epoch=1,
        world_size=1 + len(engines),
        timeout=timeout,
        connect_timeout=30.0,
    )
    joins = [engine.join(call, rendezvous.spec, rank_offset=1 + i) for i, engine in enumerate(engines)]
    ranks = {1 + i: engine.name for i, engine in enumerate(engines)}
    group, *_ = await asyncio.gather(rendezvous.complete(ranks), *joins)
    return group
