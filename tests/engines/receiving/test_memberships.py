"""Joining, leaving and being admitted, over real groups."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch

from async_wsync.engines.receiving.group_memberships import GroupMemberships
from async_wsync.engines.receiving.receiving_end import IncomingBucket, ReceivingEnd
from async_wsync.errors import EngineFailed, EngineReplaced, RendezvousError, StaleFence
from async_wsync.groups.source_end import UpdateGroup
from async_wsync.runtime.threads import wait_for
from async_wsync.types import Call
from tests.support.groups import opened
from tests.support.receiver_driver import a_call, a_spec_of_nobody
from tests.support.updates import update_of

CPU = torch.device("cpu")
TENSORS = {"w": torch.zeros(64)}


@pytest.fixture
async def end() -> AsyncIterator[ReceivingEnd]:
    made = ReceivingEnd(member="engine", device=lambda: CPU)
    yield made
    made.memberships.close()


async def connect(memberships: GroupMemberships, call: Call) -> UpdateGroup:
    rendezvous = await opened(2, timeout=60.0)
    joining = memberships.join(call, rendezvous.spec, 1)
    group, _ = await asyncio.gather(rendezvous.complete({1: "engine"}), wait_for(joining))
    return group


async def receiving(end: ReceivingEnd, call: Call) -> tuple[UpdateGroup, Future[None]]:
    """A group whose source never sends, and what the engine receives in it."""
    group = await connect(end.memberships, call)
    update = update_of(TENSORS, group=group.spec.name)
    end.begin(call, update, TENSORS)

    def job(incoming: IncomingBucket) -> None:
        incoming.receive_into([torch.zeros(256, dtype=torch.uint8)])

    return group, end.receive(call, update.update_id, 0, job)


async def test_a_group_that_could_not_be_joined_is_not_kept(end: ReceivingEnd) -> None:
    nobody = replace(a_spec_of_nobody(), connect_timeout=0.2)
    with pytest.raises(RendezvousError):
        await wait_for(end.memberships.join(a_call(), nobody, 1))
    assert end.memberships.names == set()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_outside_of_the_group_is_refused(end: ReceivingEnd, rank: int) -> None:
    with pytest.raises(EngineFailed, match="not in a group of 2"):
        end.memberships.join(a_call(), a_spec_of_nobody(), rank)


async def test_of_too_many_groups_those_joined_first_are_left() -> None:
    memberships = GroupMemberships(threading.Condition(), member="engine", device=lambda: CPU, most=2)
    groups = [await connect(memberships, a_call(source=f"source-{n}")) for n in range(4)]
    assert memberships.names == {group.spec.name for group in groups[-2:]}
    memberships.close()
    assert memberships.names == set()
    for group in groups:
        await group.aclose()


async def test_a_higher_fence_breaks_off_what_older_ones_receive(end: ReceivingEnd) -> None:
    old, new = a_call(source="old", fence=5), a_call(source="new", fence=6)
    end.admission.admit(old)
    group, received = await receiving(end, old)
    end.admission.admit(old)
    assert not received.done()
    end.admission.admit(new)
    with pytest.raises(EngineFailed) as broken:
        await asyncio.wait_for(wait_for(received), 5.0)
    assert broken.value.is_collective
    assert end.weights.session is None
    await group.aclose()


async def test_who_lost_the_lock_may_only_end_what_it_started(end: ReceivingEnd) -> None:
    old, new = a_call(source="old", fence=5), a_call(source="new", fence=6)
    group = await connect(end.memberships, old)
    end.admission.admit(new)
    with pytest.raises(StaleFence):
        end.admission.admit(old)
    with pytest.raises(StaleFence):
        end.admission.admit(a_call(source="another", fence=5), ends=group.spec.name)
    end.admission.admit(old, ends=group.spec.name)
    await wait_for(end.leave(group.spec.name))
    assert end.memberships.names == set()
    await group.aclose()


def test_a_call_that_is_meant_for_another_process_is_refused(end: ReceivingEnd) -> None:
    end.admission.check_incarnation(None)
    end.admission.check_incarnation(end.incarnation)
    with pytest.raises(EngineReplaced):
        end.admission.check_incarnation("of the process before")


@pytest.mark.parametrize("how", ["leave", "abort"])
async def test_an_update_is_closed_with_the_group_that_it_comes_from(end: ReceivingEnd, how: Any) -> None:
    group = await connect(end.memberships, a_call())
    end.begin(a_call(), update_of(TENSORS, group=group.spec.name), TENSORS)
    assert end.weights.session is not None
    await wait_for(getattr(end, how)("another group"))
    assert end.weights.session is not None
    await wait_for(getattr(end, how)(group.spec.name))
    assert end.weights.session is None
    await group.aclose()
