"""A `WeightReceiver` in a real gloo group with the real source side."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from async_wsync.engines.torch import messages as p
from async_wsync.engines.torch.receiver import WeightReceiver
from async_wsync.engines.update_codec import pack_update
from async_wsync.errors import BroadcastFailed, EngineFailed, EngineNotServing, EngineRejected, StaleFence
from async_wsync.groups.rendezvous import join_group
from async_wsync.runtime.threads import spawn, wait_done
from async_wsync.transfer.layout import lay_out
from async_wsync.transfer.pack import stage
from async_wsync.transfer.tensors import param_meta
from async_wsync.types import EngineState, Manifest, PauseMode, WireFormat
from tests.support.dying_source import SENDS, a_dying_source
from tests.support.receiver_driver import a_call, ask, connect, look, outcome, send_all, start
from tests.support.updates import manifest_of, staged, update_of


def a_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    # A megabyte in one matrix, which travels from storage to storage, and small ones, which travel packed.
    return nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.Linear(512, 8))


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


async def test_an_update_arrives_and_is_served_once_it_is_published() -> None:
    trainer, models = a_model(1), [a_model(2), a_model(3)]
    receivers = [WeightReceiver(model) for model in models]
    call = a_call()
    group = await connect(receivers, call)
    update = update_of(manifest_of(trainer), version=7, bucket_bytes=10_000, group=group.spec.name)
    assert len(update.buckets) > 2
    for receiver in receivers:
        await ask(receiver, p.Pause(PauseMode.DRAIN), call)
        await ask(receiver, p.Begin(pack_update(update)), call)
    await send_all(group, update, trainer, receivers, call)
    for receiver, model in zip(receivers, models, strict=True):
        await ask(receiver, p.End(update.update_id), call)
        assert receiver.weight_version is None
        await ask(receiver, p.Publish(7), call)
        await ask(receiver, p.Resume(), call)
        with receiver.serving() as version:
            assert version == 7
        assert receiver.weight_state is EngineState.CURRENT
        assert same(trainer, model)
        await ask(receiver, p.Leave(group.spec.name), call)
    await group.aclose()


async def test_buckets_announced_out_of_order_are_received_in_order() -> None:
    trainer, model = a_model(1), a_model(2)
    receiver, call = WeightReceiver(model), a_call()
    group = await connect([receiver], call)
    update = update_of(manifest_of(trainer), bucket_bytes=10_000, group=group.spec.name)
    assert len(update.buckets) >= 3
    await ask(receiver, p.Begin(pack_update(update)), call)
    requests = [start(receiver, p.Receive(update.update_id, b.index), call) for b in reversed(update.buckets)]
    for bucket in update.buckets:
        await group.broadcast(staged(bucket, trainer))
    for request_id in requests:
        await outcome(receiver, request_id)
    await ask(receiver, p.End(update.update_id), call)
    assert same(trainer, model)
    await group.aclose()


async def test_an_abort_frees_a_blocked_receive_at_once_and_leaves_the_engine_torn() -> None:
    model = a_model(2)
    receiver, call = WeightReceiver(model), a_call()
    group = await connect([receiver], call, timeout=60.0)
    update = update_of(manifest_of(model), group=group.spec.name)
    await ask(receiver, p.Begin(pack_update(update)), call)
    request_id = start(receiver, p.Receive(update.update_id, 0), call)
    await asyncio.sleep(0.2)
    assert not look(receiver, request_id).done
    started = time.monotonic()
    await ask(receiver, p.Abort(group.spec.name), call)
    assert look(receiver, request_id).done, "the abort was answered before the receive thread had left"
    with pytest.raises(EngineFailed) as failed:
        await outcome(receiver, request_id)
    assert time.monotonic() - started < 5.0
    assert failed.value.is_collective
    assert receiver.weight_state is EngineState.TORN
    with pytest.raises(EngineNotServing):
        receiver.serving().__enter__()
    with pytest.raises(EngineFailed, match="torn"):
        await ask(receiver, p.Resume(), call)
    await group.aclose()


async def test_an_abort_before_anything_could_be_written_leaves_the_engine_whole() -> None:
    model = nn.Linear(8, 8)
    receiver, call = WeightReceiver(model), a_call()
    group = await connect([receiver], call)
    update = update_of(manifest_of(model), group=group.spec.name)
    assert not lay_out(update.buckets[0], WireFormat.PACKED).direct
    await ask(receiver, p.Begin(pack_update(update)), call)
    request_id = start(receiver, p.Receive(update.update_id, 0), call)
    await asyncio.sleep(0.2)
    await ask(receiver, p.Abort(group.spec.name), call)
    with pytest.raises(EngineFailed):
        await outcome(receiver, request_id)
    assert receiver.weight_state is EngineState.STALE
    with receiver.serving() as version:
        assert version is None
    await group.aclose()


async def test_nothing_written_after_an_abort_was_answered() -> None:
    trainer, model = a_model(1), a_model(2)
    receiver, call = WeightReceiver(model), a_call()
    group = await connect([receiver], call)
    update = update_of(manifest_of(model), group=group.spec.name)
    await ask(receiver, p.Begin(pack_update(update)), call)
    start(receiver, p.Receive(update.update_id, 0), call)
    await asyncio.sleep(0.1)
    await ask(receiver, p.Abort(group.spec.name), call)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    # A send may well "succeed" towards a member that is gone.
    await asyncio.gather(*(group.broadcast(staged(update.buckets[0], trainer)) for _ in "12"), return_exceptions=True)
    await asyncio.sleep(0.3)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    await group.aclose()


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.002, 0.004, 0.008, 0.016])
async def test_an_abort_in_the_middle_of_the_bytes_ends_them(delay: float) -> None:
    # 32 MB in matrices of 4 MB and some small tensors, over and over, so that an abort falls into the middle.
    trainer = {f"w{i}": torch.full((1024, 1024), 7.0) for i in range(8)} | {f"s{i}": torch.ones(99) for i in range(50)}
    model = {name: torch.zeros_like(tensor) for name, tensor in trainer.items()}
    receiver, call = WeightReceiver(model), a_call()
    group = await connect([receiver], call)
    manifest = Manifest(params=tuple(param_meta(n, t) for n, t in trainer.items()))
    update = update_of(manifest, bucket_bytes=1 << 30, group=group.spec.name)
    await ask(receiver, p.Begin(pack_update(update)), call)
    request_id = start(receiver, p.Receive(update.update_id, 0), call)
    sending = group.broadcast(stage(lay_out(update.buckets[0], WireFormat.PACKED), trainer))
    await asyncio.sleep(delay)
    await ask(receiver, p.Abort(group.spec.name), call)
    before = {name: tensor.clone() for name, tensor in model.items()}
    assert look(receiver, request_id).done
    await asyncio.sleep(0.1)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.items())
    assert receiver.weight_state is not EngineState.CURRENT
    with pytest.raises(EngineFailed):
        await ask(receiver, p.End(update.update_id), call)
    await asyncio.gather(sending, return_exceptions=True)
    await group.aclose()


async def test_a_torn_engine_is_healed_by_a_whole_update_only() -> None:
    trainer, model = a_model(1), a_model(2)
    receiver, call = WeightReceiver(model), a_call()
    group = await connect([receiver], call)
    update = update_of(manifest_of(trainer), bucket_bytes=10_000, group=group.spec.name)
    await ask(receiver, p.Begin(pack_update(update)), call)
    request_id = start(receiver, p.Receive(update.update_id, 0), call)
    await group.broadcast(staged(update.buckets[0], trainer))
    await outcome(receiver, request_id)
    with pytest.raises(EngineFailed, match="have not arrived"):
        await ask(receiver, p.End(update.update_id), call)
    await ask(receiver, p.Reset(), call)
    assert receiver.weight_state is EngineState.TORN

    full = manifest_of(trainer)
    rest = type(full)(params=full.params[-1:])
    part = update_of(rest, version=2, group=group.spec.name, strict=False)
    await ask(receiver, p.Begin(pack_update(part)), call)
    await send_all(group, part, trainer, [receiver], call)
    with pytest.raises(EngineRejected) as refused:
        await ask(receiver, p.End(part.update_id), call)
    assert full.params[0].name in refused.value.missing

    again = update_of(full, version=3, bucket_bytes=10_000, group=group.spec.name)
    await ask(receiver, p.Begin(pack_update(again)), call)
    await send_all(group, again, trainer, [receiver], call)
    await ask(receiver, p.End(again.update_id), call)
    assert receiver.weight_state is EngineState.TORN, "whole, but nobody published it"
    await ask(receiver, p.Publish(3), call)
    assert receiver.weight_state is EngineState.CURRENT
    assert same(trainer, model)
    await group.aclose()


async def test_a_higher_fence_breaks_off_the_receive_of_another_source() -> None:
    model = a_model(2)
    receiver = WeightReceiver(model)
    old, new = a_call(source="old", fence=5), a_call(source="new", fence=6)
    group = await connect([receiver], old, timeout=60.0)
    update = update_of(manifest_of(model), group=group.spec.name)
    await ask(receiver, p.Begin(pack_update(update)), old)
    request_id = start(receiver, p.Receive(update.update_id, 0), old)
    await asyncio.sleep(0.1)
    await ask(receiver, p.Pause(PauseMode.DRAIN), new)
    with pytest.raises(EngineFailed):
        await outcome(receiver, request_id, within=5.0)
    with pytest.raises(StaleFence):
        await ask(receiver, p.End(update.update_id), old)
    # It may still clean up what is its own.
    await ask(receiver, p.Abort(group.spec.name), old)
    await ask(receiver, p.Leave(group.spec.name), old)
    await group.aclose()


async def test_a_new_trainer_takes_over_the_session_that_a_dead_one_left_open() -> None:
    trainer, model = a_model(1), a_model(2)
    receiver = WeightReceiver(model)
    dead, alive = a_call(source="trainer-a", fence=5), a_call(source="trainer-b", fence=6)
    group = await connect([receiver], dead, timeout=60.0)
    update = update_of(manifest_of(model), group=group.spec.name)
    await ask(receiver, p.Begin(pack_update(update)), dead)
    request_id = start(receiver, p.Receive(update.update_id, 0), dead)
    await asyncio.sleep(0.1)
    assert not look(receiver, request_id).done

    again = await connect([receiver], alive)
    second = update_of(manifest_of(trainer), version=2, group=again.spec.name)
    await ask(receiver, p.Begin(pack_update(second)), alive)
    await send_all(again, second, trainer, [receiver], alive)
    await ask(receiver, p.End(second.update_id), alive)
    await ask(receiver, p.Publish(2), alive)
    assert receiver.weight_state is EngineState.CURRENT
    assert same(trainer, model)
    await group.aclose()
    await again.aclose()


async def test_a_source_may_have_two_groups_and_a_closed_one_is_given_up_at_the_next_join() -> None:
    receiver, call = WeightReceiver(a_model()), a_call()
    first, second = await connect([receiver], call), await connect([receiver], call)
    for group in (first, second):
        update = update_of(manifest_of(a_model()), group=group.spec.name)
        await ask(receiver, p.Begin(pack_update(update)), call)
    await first.aclose()
    third = await connect([receiver], call)
    update = update_of(manifest_of(a_model()), group=first.spec.name)
    with pytest.raises(EngineFailed, match="not joined"):
        await ask(receiver, p.Begin(pack_update(update)), call)
    await second.aclose()
    await third.aclose()


async def test_a_source_that_dies_in_the_middle_of_the_bytes_is_noticed_by_its_member_alone() -> None:
    with a_dying_source() as source:
        joining = spawn(lambda: join_group(source.spec, 1, member="engine"), name="join")
        source.formed()
        member = joining.result(20)
        tensors = [torch.zeros(nbytes, dtype=torch.uint8) for nbytes in SENDS]

        def receive_for_ever() -> None:
            while True:
                member.broadcast(tensors, 60.0)

        receiving = spawn(receive_for_ever, name="receive")
        source.send()
        async with asyncio.timeout(20):
            while not any(int(t[0]) for t in tensors):  # until bytes are under way
                await asyncio.sleep(0.01)
        assert not receiving.done()
        source.kill()
        started = time.monotonic()
        await wait_done(receiving)
        assert time.monotonic() - started < 5.0
        assert isinstance(receiving.exception(), BroadcastFailed)
        member.close()


async def test_groups_of_dead_sources_are_left_at_the_next_join() -> None:
    receiver = WeightReceiver(a_model())
    with a_dying_source() as source:
        await ask(receiver, p.Join(source.spec, 1), a_call(source="dying"), within=60.0)
        source.formed()
        alive = await connect([receiver], a_call(source="alive"))
        assert receiver._request_handler._receiving.memberships.names == {source.spec.name, alive.spec.name}
    await asyncio.sleep(0.2)
    another = await connect([receiver], a_call(source="another"))
    assert receiver._request_handler._receiving.memberships.names == {alive.spec.name, another.spec.name}
    await alive.aclose()
    await another.aclose()


async def test_two_sources_send_their_parts_of_one_update() -> None:
    trainer, model = a_model(1), a_model(2)
    receiver = WeightReceiver(model)
    calls = [a_call(source="stage-0", fence=1), a_call(source="stage-1", fence=2)]
    groups = [await connect([receiver], call) for call in calls]
    full = manifest_of(trainer)
    parts = []
    for params, group in zip((full.params[:3], full.params[3:]), groups, strict=True):
        spec = update_of(type(full)(params=params), version=4, group=group.spec.name, strict=False)
        parts.append(replace(spec, update_id="round-1"))
    calls = [a_call(source="stage-0", fence=3), a_call(source="stage-1", fence=4)]
    for call, group, part in zip(calls, groups, parts, strict=True):
        await ask(receiver, p.Begin(pack_update(part)), call)
        await send_all(group, part, trainer, [receiver], call)
    await ask(receiver, p.End("round-1"), calls[1])
    await ask(receiver, p.Publish(4), calls[1])
    assert receiver.weight_state is EngineState.CURRENT
    assert same(trainer, model)
    for group in groups:
        await group.aclose()


async def test_tied_weights_sent_once_reach_an_engine_that_does_not_tie_them() -> None:
    trainer = {"a": torch.randn(300, 300), "b": torch.randn(4)}
    engine = {"a": torch.zeros(300, 300), "tied": torch.zeros(300, 300), "b": torch.zeros(4), "also": torch.zeros(4)}
    receiver, call = WeightReceiver(engine), a_call()
    group = await connect([receiver], call)
    manifest = Manifest(
        params=tuple(param_meta(n, t) for n, t in trainer.items()), aliases=(("tied", "a"), ("also", "b"))
    )
    update = update_of(manifest, group=group.spec.name)
    await ask(receiver, p.Begin(pack_update(update)), call)
    request_id = start(receiver, p.Receive(update.update_id, 0), call)
    await group.broadcast(stage(lay_out(update.buckets[0], WireFormat.PACKED), trainer))
    await outcome(receiver, request_id)
    assert torch.equal(engine["tied"], trainer["a"])
    assert torch.equal(engine["also"], trainer["b"])
    await group.aclose()


async def test_nothing_of_an_update_stays_in_memory_or_in_threads() -> None:
    trainer = a_model(1)
    receiver, call = WeightReceiver(a_model(2)), a_call()
    threads = threading.active_count()
    group = await connect([receiver], call)
    update = update_of(manifest_of(trainer), group=group.spec.name)
    await ask(receiver, p.Begin(pack_update(update)), call)
    session = weakref.ref(receiver._request_handler.actions.weights.session)
    await send_all(group, update, trainer, [receiver], call)
    await ask(receiver, p.End(update.update_id), call)
    await ask(receiver, p.Publish(1), call)
    await ask(receiver, p.Leave(group.spec.name), call)
    await group.aclose()
    until = time.monotonic() + 10.0
    while (threading.active_count() > threads + 1 or session() is not None) and time.monotonic() < until:
        await asyncio.sleep(0.02)
        gc.collect()
    assert session() is None
    names = [t.name for t in threading.enumerate()]
    assert threading.active_count() <= threads + 1, names  # the receiver's own
