"""The update groups between one source and its engines: which exist, which must, and how they go.

A group is never repaired. Whenever its members change, one restarts, or a collective fails, it is
dropped and another is built under a new name on a new port. All of it happens under the lock.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from async_wsync.arguments import MOST_SECONDS
from async_wsync.errors import EngineFailed, RendezvousError
from async_wsync.groups.master_address import plain_master_address
from async_wsync.groups.nccl import wire_device
from async_wsync.groups.rendezvous import Rendezvous
from async_wsync.groups.source_end import UpdateGroup
from async_wsync.protocols import RolloutEngine
from async_wsync.runtime.cancellation import settle
from async_wsync.runtime.engine_calls import EngineCalls, asked, told
from async_wsync.runtime.object_refs import node_address
from async_wsync.types import MEMBER_MARGIN, Call, Timeouts, WireFormat

__all__ = ["EngineGroup", "GroupManager", "Topology"]

logger = logging.getLogger("async_wsync")

Topology = Literal["shared", "per_engine"]
_ATTEMPTS = 3  # a fresh port each: whatever squatted the last one does not follow


@dataclass(eq=False, slots=True)
class EngineGroup:
    """One update group and the engines in it, which all read the same wire format."""

    engines: tuple[RolloutEngine, ...]
    wire: WireFormat
    source_end: UpdateGroup
    incarnations: tuple[str | None, ...]
    broken: bool = field(default=False)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(e.name for e in self.engines)

    def abort(self) -> None:
        self.broken = True
        self.source_end.abort()


class GroupManager:
    """The update groups of one broadcaster."""

    def __init__(
        self,
        *,
        topology: Topology,
        master_address: str | None,
        timeouts: Timeouts,
        num_buffers: int,
        is_lost: Callable[[str], bool],
    ) -> None:
        self._is_lost = is_lost
        self._topology = topology
        self._master_address = None if master_address is None else plain_master_address(master_address)
        self._timeouts = timeouts
        # A bucket may wait on the wire behind those announced before it. Our own limit, and the drain after it, are
        # the shorter ones; this one is for members that we can no longer reach.
        self._group_timeout = min(timeouts.bucket * num_buffers + timeouts.drain + MEMBER_MARGIN, MOST_SECONDS)
        self._groups: list[EngineGroup] = []
        self._epoch = 0

    @property
    def all(self) -> tuple[EngineGroup, ...]:
        return tuple(self._groups)

    def between(self, engines: Sequence[RolloutEngine]) -> list[tuple[RolloutEngine, ...]]:
        """The groups these engines belong in: one each, or one for all that read the same bytes."""
        if self._topology == "per_engine":
            return [(engine,) for engine in engines]
        by_wire: dict[WireFormat, list[RolloutEngine]] = {}
        for engine in engines:
            by_wire.setdefault(engine.wire_format, []).append(engine)
        return [tuple(members) for members in by_wire.values()]

    def _missing(
        self,
        engines: Sequence[RolloutEngine],
        backend: str,
        device: torch.device,
        incarnation: Callable[[str], str | None],
    ) -> tuple[list[EngineGroup], list[tuple[RolloutEngine, ...]]]:
        wanted = self.between(engines)
        fit: list[EngineGroup] = []
        missing: list[tuple[RolloutEngine, ...]] = []
        for members in wanted:
            known = tuple(incarnation(e.name) for e in members)
            for group in self._groups:
                same = group.engines == members and group.incarnations == known
                source_end = group.source_end
                if same and not group.broken and (source_end.spec.backend, source_end.device) == (backend, device):
                    fit.append(group)
                    break
            else:
                missing.append(members)
        return fit, missing

    async def ensure(
        self,
        engines: Sequence[RolloutEngine],
        *,
        backend: str,
        incarnation: Callable[[str], str | None],
        calls: EngineCalls,
        call: Call,
        keep_others: bool = False,
        source_device: torch.device | None = None,
    ) -> tuple[EngineGroup, ...]:
        """The groups of exactly these engines, building those that are missing.

        Groups that do not fit are dropped first, so that no engine is in two groups of ours at once, unless
        ``keep_others`` says that the engines left out are not to be disturbed. ``source_device``: where the source's
        tensors are, which is where NCCL sends from, if that is on CUDA.
        """
        device = wire_device(backend, source_device)
        fit, missing = self._missing(engines, backend, device, incarnation)
        targets = {e.name for e in engines}
        unfit = [k for k in self._groups if k not in fit and (k.broken or not keep_others or k.names <= targets)]
        await self.drop(unfit, call)
        for members in missing:
            fit.append(await self._build(members, backend, device, incarnation, calls, call))
        order = [tuple(e.name for e in members) for members in self.between(engines)]
        return tuple(sorted(fit, key=lambda group: order.index(tuple(e.name for e in group.engines))))

    async def _build(
        self,
        members: tuple[RolloutEngine, ...],
        backend: str,
        device: torch.device,
        incarnation: Callable[[str], str | None],
        calls: EngineCalls,
        call: Call,
    ) -> EngineGroup:
        out_of_time = time.monotonic() + self._timeouts.connect / 2
        for attempt in range(_ATTEMPTS):
            try:
                source_end = await self._connect(members, backend, device, calls, call)
                break
            except RendezvousError as error:
                # A member that did not come within the whole limit would not come to another port either.
                over = attempt + 1 == _ATTEMPTS or time.monotonic() > out_of_time or error.step == "listen"
                if over or calls.interrupt.reason is not None:
                    raise
                logger.warning("update group not formed, trying again on another port: %s", error)
        group = EngineGroup(members, members[0].wire_format, source_end, tuple(incarnation(e.name) for e in members))
        self._groups.append(group)
        return group

    async def _connect(
        self,
        members: tuple[RolloutEngine, ...],
        backend: str,
        device: torch.device,
        calls: EngineCalls,
        call: Call,
    ) -> UpdateGroup:
        limit = self._timeouts.connect
        self._epoch = max(self._epoch + 1, call.fence)
        opening = Rendezvous.open(
            address=self._master_address or node_address(),
            backend=backend,
            name=f"wsync-{self._epoch}-{uuid.uuid4().hex[:8]}",
            epoch=self._epoch,
            world_size=1 + sum(e.num_ranks for e in members),
            timeout=self._group_timeout,
            connect_timeout=limit,
        )
        rendezvous = await calls.race(opening)
        joins, ranks, offset = [], {}, 1
        # One that waits for another's join is freed once we tell all to leave: its adapter must not give up before.
        longer = replace(call, timeout=call.timeout + self._timeouts.close + MEMBER_MARGIN)
        for engine in members:
            join = asked(engine.join, longer, rendezvous.spec, rank_offset=offset)
            joins.append(calls.start(engine, "connect", join))
            ranks.update({offset + i: engine.name for i in range(engine.num_ranks)})
            offset += engine.num_ranks
        says_hello = members[0].wire_format is WireFormat.PACKED  # a foreign engine knows nothing of our hello
        forming = asyncio.get_running_loop().create_task(rendezvous.complete(ranks, hello=says_hello, device=device))
        formed = False
        try:
            # The rendezvous' own error knows which ranks are missing: give it the first word at the limit.
            await calls.first_failure(joins, also=(forming,), limit=limit + 1.0, field="connect")
            formed = True
        except RendezvousError as error:
            error.waiting_for = tuple(dict.fromkeys(ranks[rank] for rank in error.missing_ranks if rank in ranks))
            raise
        finally:
            if not formed:
                await self._give_up(forming, rendezvous, members, call)
        calls.forget(joins)
        return forming.result()

    async def _give_up(
        self, forming: asyncio.Task[UpdateGroup], rendezvous: Rendezvous, members: tuple[RolloutEngine, ...], call: Call
    ) -> None:
        forming.cancel()
        await settle([forming], timeout=self._timeouts.close)
        if forming.done() and not forming.cancelled() and forming.exception() is None:
            source_end = forming.result()
            source_end.abort()
            await source_end.aclose(self._timeouts.close)
        await rendezvous.aclose()
        await self._leave(members, rendezvous.spec.name, call)

    async def drop(self, groups: Sequence[EngineGroup], call: Call) -> None:
        """Close groups at both ends, within ``Timeouts.close``; what engines answer to `leave` changes nothing."""
        for group in groups:
            if group in self._groups:
                self._groups.remove(group)
        jobs = [self._drop_one(group, call) for group in groups]
        tasks = [asyncio.get_running_loop().create_task(job) for job in jobs]
        await settle(tasks, timeout=2 * self._timeouts.close)

    async def _drop_one(self, group: EngineGroup, call: Call) -> None:
        if group.broken:
            group.source_end.abort()
        await self._leave(group.engines, group.source_end.spec.name, call)
        await group.source_end.aclose(self._timeouts.close / 2)

    async def _leave(self, members: Sequence[RolloutEngine], name: str, call: Call) -> None:
        there = [e for e in members if not self._is_lost(e.name)]  # a silent one would hold up the others
        tasks = [asyncio.get_running_loop().create_task(_quietly(e, asked(e.leave, call, name))) for e in there]
        await settle(tasks, timeout=self._timeouts.close / 2)
        for task in tasks:
            task.cancel()


async def _quietly(engine: RolloutEngine, leaving: Awaitable[None]) -> None:
    try:
        await told(engine.name, "leave", leaving)
    except EngineFailed as error:
        logger.debug("engine %s did not leave its group cleanly: %s", engine.name, error)
