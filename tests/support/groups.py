"""Update groups of this process and engines, formed the way a broadcaster forms them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from async_wsync.groups.rendezvous import Rendezvous
from async_wsync.groups.source_end import UpdateGroup
from async_wsync.protocols import RolloutEngine
from async_wsync.types import Call


async def opened(world_size: int, **options: Any) -> Rendezvous:
    """A rendezvous for ``world_size`` ranks. ``options``: as for `Rendezvous.open`."""
    settings: dict[str, Any] = {"address": "127.0.0.1", "timeout": 20.0, "connect_timeout": 30.0, **options}
    settings.setdefault("name", f"test-{uuid.uuid4().hex[:8]}")
    settings.setdefault("backend", "gloo")
    return await Rendezvous.open(epoch=1, world_size=world_size, **settings)


async def joined(engines: Sequence[RolloutEngine], call: Call, *, hello: bool = True, **options: Any) -> UpdateGroup:
    """A group of this process as the source, and ``engines`` at the ranks after it."""
    rendezvous = await opened(1 + sum(engine.num_ranks for engine in engines), **options)
    members: dict[int, str] = {}
    joins = []
    for engine in engines:
        first = 1 + len(members)
        joins.append(engine.join(call, rendezvous.spec, rank_offset=first))
        members |= dict.fromkeys(range(first, first + engine.num_ranks), engine.name)
    group, *_ = await asyncio.gather(rendezvous.complete(members, hello=hello), *joins)
    return group
