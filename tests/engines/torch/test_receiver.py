"""`WeightReceiver` on its own: gate, fences, requests, manifests, torn tracking."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

from async_wsync.engines.failure import EngineSideError, Failure
from async_wsync.engines.receiving.weight_state import WeightState
from async_wsync.engines.torch import messages as p
from async_wsync.engines.torch.receiver import WeightReceiver
from async_wsync.engines.torch.targets import check_manifest
from async_wsync.engines.update_codec import pack_update, unpack_update, unpacked_checksums
from async_wsync.errors import (
    BaseMissing,
    EngineBusy,
    EngineFailed,
    EngineNotServing,
    EngineRejected,
    EngineReplaced,
    StaleCall,
    StaleFence,
)
from async_wsync.sources import StateDictSource
from async_wsync.transfer.checksum import model_digests
from async_wsync.types import Base, EngineState, Manifest, ParamMeta, PauseMode
from tests.support.receiver_driver import a_call, a_request, a_spec_of_nobody, ask, look, outcome, start
from tests.support.updates import manifest_of, update_of

EMPTY = Manifest(params=())


def a_receiver(**hooks: object) -> WeightReceiver:
    return WeightReceiver(nn.Linear(4, 3), **hooks)  # type: ignore[arg-type]


@contextmanager
def someone_inside(receiver: WeightReceiver) -> Iterator[threading.Event]:
    """A thread that serves until the event is set."""
    inside, leave = threading.Event(), threading.Event()

    def serve() -> None:
        with receiver.serving():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert inside.wait(10)
    try:
        yield leave
    finally:
        leave.set()
        thread.join(10)


async def an_empty_update(receiver: WeightReceiver, version: int, *, fence: int = 1) -> None:
    call = a_call(fence=fence)
    update = update_of(EMPTY, version=version, strict=False)
    await ask(receiver, p.Begin(pack_update(update)), call)
    await ask(receiver, p.End(update.update_id), call)
    await ask(receiver, p.Publish(version), call)


# ------------------------------------------------------------------------ hello


async def test_a_fresh_engine_is_stale_and_serves_what_it_was_built_with() -> None:
    receiver = a_receiver()
    info = await ask(receiver, p.Hello())
    assert (info.state, info.version, info.device) == (EngineState.STALE, None, "cpu")
    with receiver.serving() as version:
        assert version is None


async def test_each_receiver_has_an_incarnation_of_its_own_and_refuses_calls_meant_for_another() -> None:
    one, two = a_receiver(), a_receiver()
    first, second = (await ask(one, p.Hello())), (await ask(two, p.Hello()))
    assert first.incarnation != second.incarnation
    request = a_request(p.Resume(), incarnation=first.incarnation)
    two.weight_sync(request)
    with pytest.raises(EngineReplaced):
        await outcome(two, request.id)
    assert look(two, request.id).incarnation == second.incarnation


def test_a_receiver_that_was_never_initialised_says_what_to_call() -> None:
    class Engine(WeightReceiver):
        def __init__(self) -> None:
            pass

    with pytest.raises(RuntimeError, match="init_weight_receiver"):
        Engine().weight_sync(a_request(p.Hello()))


def test_no_method_is_a_coroutine_since_one_would_turn_every_actor_async() -> None:
    import inspect

    members = [getattr(WeightReceiver, name) for name in dir(WeightReceiver) if not name.startswith("__")]
    assert not [m for m in members if inspect.iscoroutinefunction(m) or inspect.isasyncgenfunction(m)]


# ------------------------------------------------------------------------ requests


async def test_a_request_that_arrives_twice_runs_once() -> None:
    ran = []
    receiver = a_receiver(on_flush=lambda: ran.append(1))
    request = a_request(p.Flush())
    for _ in range(3):
        receiver.weight_sync(request)
    await outcome(receiver, request.id)
    assert receiver.weight_sync(request).done
    assert ran == [1]


async def test_an_outcome_can_be_asked_for_again_after_its_reply_was_lost() -> None:
    receiver = a_receiver()
    request_id = start(receiver, p.Checksums())
    first = await outcome(receiver, request_id)
    assert await outcome(receiver, request_id) == first
    assert await unpacked_checksums(first) == model_digests(receiver._request_handler.actions.model.state_dict())


async def test_an_unknown_request_is_an_error_and_not_an_endless_wait() -> None:
    with pytest.raises(EngineFailed, match="not known"):
        await outcome(a_receiver(), "nobody's")


async def test_requests_are_answered_while_a_hook_blocks() -> None:
    release = threading.Event()
    receiver = a_receiver(on_pause=lambda mode: release.wait(30) and None)
    request_id = start(receiver, p.Pause(PauseMode.DRAIN))
    started = time.monotonic()
    for _ in range(20):
        await ask(receiver, p.Hello())
        assert not look(receiver, request_id).done
    await ask(receiver, p.Abort("no such group"))
    assert time.monotonic() - started < 5
    release.set()
    await outcome(receiver, request_id)


# ------------------------------------------------------------------------ errors on the wire


class Awkward(Exception):
    """Pickles, but can't be rebuilt."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


@pytest.mark.parametrize(("error", "kind"), [(KeyError("k"), KeyError), (Awkward(1, 2), EngineSideError)])
def test_an_engines_own_error_is_the_cause_of_what_the_source_raises(error: Exception, kind: type[Exception]) -> None:
    travelled = pickle.loads(pickle.dumps(Failure.of(error)))
    rebuilt = travelled.rebuild(engine="e0", phase="begin")
    assert isinstance(rebuilt, EngineFailed)
    assert (rebuilt.engine, rebuilt.phase) == ("e0", "begin")
    assert isinstance(rebuilt.__cause__, kind)
    assert str(error) in str(rebuilt)


def test_an_engines_weight_sync_error_keeps_its_type_and_facts() -> None:
    failure = Failure.of(EngineRejected("no", unknown=("a",)))
    rebuilt = failure.rebuild(engine="e0", phase="check", bucket=3)
    assert isinstance(rebuilt, EngineRejected)
    assert rebuilt.unknown == ("a",)
    assert rebuilt.bucket == 3
    stale = Failure.of(StaleFence("late", fence=1, seen=2)).rebuild(engine="e0", phase="end")
    assert isinstance(stale, StaleCall)
    assert (stale.fence, stale.seen) == (1, 2)
    assert isinstance(pickle.loads(pickle.dumps(stale)), StaleFence)


def test_an_update_spec_survives_packing() -> None:
    params = tuple(ParamMeta(name=f"p{i}", dtype="bfloat16", shape=(i, 2)) for i in range(1, 50))
    update = update_of(Manifest(params=params, aliases=(("q", "p1"),)), bucket_bytes=64, group="g", strict=False)
    assert unpack_update(pack_update(update)) == update


# ------------------------------------------------------------------------ the gate


async def test_a_pause_waits_for_those_inside_and_lets_nobody_in() -> None:
    receiver = a_receiver()
    with someone_inside(receiver) as leave:
        request_id = start(receiver, p.Pause(PauseMode.DRAIN))
        await asyncio.sleep(0.1)
        assert not look(receiver, request_id).done
        with pytest.raises(EngineNotServing) as shut:
            receiver.serving().__enter__()
        assert shut.value.state == "paused"
        leave.set()
        await outcome(receiver, request_id)


async def test_a_pause_that_nobody_heeds_fails_at_its_limit_and_leaves_the_gate_shut() -> None:
    receiver = a_receiver()
    with someone_inside(receiver):
        with pytest.raises(EngineBusy, match="still run"):
            await ask(receiver, p.Pause(PauseMode.DRAIN), a_call(timeout=0.1))
        with pytest.raises(EngineNotServing):
            receiver.serving().__enter__()
    await ask(receiver, p.Resume())
    with receiver.serving():
        pass


async def test_an_aborting_pause_asks_generations_to_end() -> None:
    receiver = a_receiver()
    assert not receiver.abort_requested
    await ask(receiver, p.Pause(PauseMode.ABORT))
    assert receiver.abort_requested
    await ask(receiver, p.Resume())
    assert not receiver.abort_requested


async def test_a_begin_shuts_the_gate_even_if_nobody_paused() -> None:
    receiver = a_receiver()
    update = update_of(EMPTY, strict=False)
    with someone_inside(receiver) as leave:
        request_id = start(receiver, p.Begin(pack_update(update)))
        await asyncio.sleep(0.1)
        assert not look(receiver, request_id).done
        with pytest.raises(EngineNotServing):
            receiver.serving().__enter__()
        leave.set()
        await outcome(receiver, request_id)
    with pytest.raises(EngineNotServing) as shut:
        receiver.serving().__enter__()
    assert shut.value.state == "updating"
    with pytest.raises(EngineFailed, match="updating"):
        await ask(receiver, p.Resume())


async def test_a_begin_that_finds_someone_inside_until_its_limit_changes_nothing() -> None:
    receiver = a_receiver()
    with someone_inside(receiver):
        with pytest.raises(EngineBusy):
            await ask(receiver, p.Begin(pack_update(update_of(EMPTY, strict=False))), a_call(timeout=0.1))
        assert receiver.weight_state is EngineState.STALE
        with receiver.serving():
            pass


async def test_a_request_may_wait_for_the_gate_to_open() -> None:
    receiver = a_receiver()
    await ask(receiver, p.Pause(PauseMode.DRAIN))
    entered = threading.Event()

    def serve() -> None:
        with receiver.serving(wait=20):
            entered.set()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert not entered.wait(0.1)
    await ask(receiver, p.Resume())
    assert entered.wait(10)
    thread.join(10)


async def test_waiting_on_an_event_loop_leaves_the_loop_free() -> None:
    receiver = a_receiver()
    await ask(receiver, p.Pause(PauseMode.DRAIN))

    async def serve() -> int | None:
        async with receiver.serving(wait=20) as version:
            return version

    task = asyncio.create_task(serve())
    await asyncio.sleep(0.05)
    assert not task.done()
    await ask(receiver, p.Resume())
    await asyncio.wait_for(task, 10)
    await ask(receiver, p.Pause(PauseMode.DRAIN))
    with pytest.raises(EngineNotServing, match="waited"):
        async with receiver.serving(wait=0.02):
            pass


# ------------------------------------------------------------------------ hooks


async def test_hooks_run_in_their_places() -> None:
    seen: list[str] = []

    class Engine(WeightReceiver):
        def on_pause(self, mode: PauseMode) -> None:
            seen.append(f"pause {mode}")

        def on_flush(self) -> bool:
            seen.append("flush")
            return True

        def on_update_end(self) -> None:
            seen.append("end")

        def on_resume(self) -> None:
            seen.append("resume")

    receiver = Engine(nn.Linear(2, 2))
    await ask(receiver, p.Pause(PauseMode.DRAIN))
    await ask(receiver, p.Flush())
    await an_empty_update(receiver, 1)
    await ask(receiver, p.Resume())
    assert seen == ["pause drain", "flush", "end", "resume"]


async def test_a_refused_flush_is_busy_and_a_raising_hook_is_the_cause() -> None:
    answers = iter([False, EngineBusy("later"), KeyError("cache"), None])

    def flush() -> bool | None:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    receiver = a_receiver(on_flush=flush)
    for _ in range(2):
        with pytest.raises(EngineBusy):
            await ask(receiver, p.Flush())
    with pytest.raises(EngineFailed) as failed:
        await ask(receiver, p.Flush())
    assert isinstance(failed.value.__cause__, KeyError)
    await ask(receiver, p.Flush())


async def test_a_failing_end_hook_keeps_the_version_from_being_published() -> None:
    def broken() -> None:
        raise OSError("requantize")

    receiver = a_receiver(on_update_end=broken)
    update = update_of(EMPTY, version=3, strict=False)
    await ask(receiver, p.Begin(pack_update(update)))
    with pytest.raises(EngineFailed) as failed:
        await ask(receiver, p.End(update.update_id))
    assert isinstance(failed.value.__cause__, OSError)
    with pytest.raises(EngineFailed, match="no update to it has ended"):
        await ask(receiver, p.Publish(3))
    assert receiver.weight_version is None


# ------------------------------------------------------------------------ fences


async def test_a_stale_fence_is_refused_by_every_verb_that_changes_something() -> None:
    receiver = a_receiver()
    await ask(receiver, p.Flush(), a_call(fence=9))
    update = pack_update(update_of(EMPTY, strict=False))
    verbs: list[p.Verb] = [
        p.Join(a_spec_of_nobody(), 1),
        p.Leave("g"),
        p.Abort("g"),
        p.Check(update),
        p.Pause(PauseMode.KEEP),
        p.Flush(),
        p.Begin(update),
        p.Receive("u", 0),
        p.End("u"),
        p.Publish(1),
        p.Resume(),
        p.Reset(),
        p.Checksums(),
    ]
    for verb in verbs:
        with pytest.raises(StaleFence) as stale:
            await ask(receiver, verb, a_call(source="old", fence=8))
        assert (stale.value.fence, stale.value.seen) == (8, 9)
    assert (await ask(receiver, p.Hello(), a_call(source="old", fence=0))).version is None


async def test_a_pause_gives_up_waiting_once_a_higher_fence_is_seen() -> None:
    receiver = a_receiver()
    with someone_inside(receiver):
        request_id = start(receiver, p.Pause(PauseMode.DRAIN), a_call(source="old", fence=1, timeout=60))
        await asyncio.sleep(0.05)
        await ask(receiver, p.Flush(), a_call(source="new", fence=2), within=10)
        with pytest.raises(StaleFence):
            await outcome(receiver, request_id)


async def test_what_waited_behind_a_newer_source_is_refused_when_its_turn_comes() -> None:
    release = threading.Event()
    receiver = a_receiver(on_flush=lambda: release.wait(30))
    start(receiver, p.Flush(), a_call(fence=1))
    queued = start(receiver, p.Resume(), a_call(source="old", fence=1))
    newer = start(receiver, p.Checksums(), a_call(source="new", fence=2))
    release.set()
    with pytest.raises(StaleFence):
        await outcome(receiver, queued)
    await outcome(receiver, newer)


# ------------------------------------------------------------------------ manifests


async def test_a_manifest_that_does_not_fit_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    receiver = WeightReceiver(model)
    metas = {m.name: m for m in manifest_of(model).params}
    del metas["1.running_mean"]
    metas["0.bias"] = ParamMeta(name="0.bias", dtype="bfloat16", shape=(3,))
    metas["0.weight"] = ParamMeta(name="0.weight", dtype="float32", shape=(3, 4, 1))
    metas["new"] = ParamMeta(name="new", dtype="float32", shape=(1,))
    update = pack_update(update_of(Manifest(params=tuple(metas.values()))))
    for verb in (p.Check(update), p.Begin(update)):
        with pytest.raises(EngineRejected) as refused:
            await ask(receiver, verb)
        error = refused.value
        assert error.unknown == ("new",)
        assert error.missing == ("1.running_mean",)
        assert [m.split(":")[0] for m in error.mismatched] == ["0.weight", "0.bias"]
        assert "bfloat16" in str(error)
        assert "1.running_mean" in str(error)
    assert receiver.weight_state is EngineState.STALE


async def test_a_part_of_the_model_is_taken_where_the_update_is_not_strict() -> None:
    model = nn.Linear(4, 3)
    receiver = WeightReceiver(model)
    part = Manifest(params=manifest_of(model).params[:1])
    with pytest.raises(EngineRejected):
        await ask(receiver, p.Check(pack_update(update_of(part))))
    await an_empty_update(receiver, version=1)
    update = replace(update_of(part, strict=False), base=Base(version=1, update_id=None))
    notes = await ask(receiver, p.Check(pack_update(update)))
    assert "1 tensors keep" in notes[0]


async def test_a_name_tied_at_the_engine_need_not_be_sent() -> None:
    shared = torch.zeros(3, 3)
    receiver = WeightReceiver({"a": shared, "b": shared, "empty": torch.zeros(0), "void": torch.zeros(0)})
    manifest = Manifest(params=(ParamMeta(name="a", dtype="float32", shape=(3, 3)),))
    with pytest.raises(EngineRejected) as refused:
        await ask(receiver, p.Check(pack_update(update_of(manifest))))
    assert refused.value.missing == ("empty", "void"), "empty tensors share nothing"


async def check_part(receiver: WeightReceiver, names: set[str], base: Base | None) -> tuple[str, ...]:
    full = manifest_of(receiver._request_handler.actions.model)  # type: ignore[arg-type]
    part = Manifest(params=tuple(meta for meta in full.params if meta.name in names))
    update = replace(update_of(part, strict=False), base=base)
    return tuple(await ask(receiver, p.Check(pack_update(update))))


async def test_a_part_is_refused_in_check_unless_its_base_is_what_was_published_here() -> None:
    receiver = a_receiver()
    with pytest.raises(BaseMissing) as fresh:
        await check_part(receiver, {"bias"}, None)
    assert (fresh.value.missing, fresh.value.holds, fresh.value.torn) == (("weight",), None, False)
    assert await check_part(receiver, {"bias", "weight"}, None) == (), "it covers everything"
    await an_empty_update(receiver, version=7)
    held = (await ask(receiver, p.Hello())).update_id
    assert "keep their old values" in (await check_part(receiver, {"bias"}, Base(version=7, update_id=held)))[0]
    for base in (None, Base(version=6, update_id=None), Base(version=7, update_id="another source's")):
        with pytest.raises(BaseMissing, match=r"another update|version 7, ") as behind:
            await check_part(receiver, {"bias"}, base)
        assert behind.value.holds == 7


async def test_a_torn_engine_refuses_in_check_what_would_not_heal_it() -> None:
    receiver = a_receiver()
    await an_empty_update(receiver, version=7)
    receiver._request_handler.actions.weights.suspect(["weight"])
    with pytest.raises(BaseMissing, match="weight may hold a mix") as torn:
        await check_part(receiver, {"bias"}, Base(version=7, update_id=None))
    assert (torn.value.torn, torn.value.holds) == (True, None)
    await check_part(receiver, {"weight"}, Base(version=7, update_id=None))  # what it tore is sent again


async def test_a_tied_tensor_that_was_torn_under_one_name_is_healed_under_the_other() -> None:
    shared = torch.zeros(3)
    receiver = WeightReceiver({"a": shared, "b": shared, "c": torch.zeros(2)})
    receiver._request_handler.actions.weights.suspect(["b"])
    metas = (ParamMeta(name="a", dtype="float32", shape=(3,)), ParamMeta(name="c", dtype="float32", shape=(2,)))
    whole = Manifest(params=metas)
    assert await ask(receiver, p.Check(pack_update(update_of(whole)))) == ()
    weights = receiver._request_handler.actions.weights
    update = update_of(Manifest(params=metas))
    part = weights.begin(update, "trainer", receiver._request_handler.actions.model)  # type: ignore[arg-type]
    part.arrived.update(part.buckets)
    await ask(receiver, p.End(update.update_id))


def of(*names: str, aliases: tuple[tuple[str, str], ...] = (), tied: tuple[tuple[str, str], ...] = ()) -> Manifest:
    shapes = {"fused": (4, 4), "wide": (4, 4), "left": (4, 2), "right": (4, 2)}
    metas = tuple(ParamMeta(name=n, dtype="float32", shape=shapes.get(n, (2, 4))) for n in names)
    return Manifest(params=metas, aliases=aliases, tied=tied)


async def test_names_tied_here_and_sent_untied_are_refused_by_name() -> None:
    shared = torch.zeros(2, 4)
    receiver = WeightReceiver({"embed": shared, "head": shared, "other": torch.zeros(2, 4)})
    with pytest.raises(EngineRejected, match="one memory") as refused:
        await ask(receiver, p.Check(pack_update(update_of(of("embed", "head", "other")))))
    assert len(refused.value.mismatched) == 1
    assert "head" in refused.value.mismatched[0]
    assert "embed" in refused.value.mismatched[0]
    fine = (
        of("embed", "other"),
        of("head", "other"),
        of("embed", "other", aliases=(("head", "embed"),)),
        of("head", "other", aliases=(("embed", "head"),)),
        of("embed", "head", "other", tied=(("head", "embed"),)),
    )
    for manifest in fine:
        assert await ask(receiver, p.Check(pack_update(update_of(manifest)))) == ()
    for wrong in (
        of("embed", "other", aliases=(("head", "other"),)),
        of("other", "head", aliases=(("embed", "other"),)),
    ):
        with pytest.raises(EngineRejected, match="one memory"):
            await ask(receiver, p.Check(pack_update(update_of(wrong))))
    with pytest.raises(EngineRejected, match="head: sent, and named as an alias"):
        await ask(receiver, p.Check(pack_update(update_of(of("embed", "head", "other", aliases=(("head", "embed"),))))))


def test_views_that_overlap_are_one_memory_and_views_that_interleave_are_not() -> None:
    fused, wide = torch.zeros(4, 4), torch.zeros(4, 4)
    targets = {"fused": fused, "top": fused[:2], "bottom": fused[2:], "left": wide[:, :2], "right": wide[:, 2:]}
    check_manifest(of("top", "bottom", "left", "right"), targets, strict=False)
    check_manifest(of("fused"), targets, strict=False)
    for names in (("fused", "top"), ("fused", "bottom")):
        with pytest.raises(EngineRejected, match="one memory"):
            check_manifest(of(*names), targets, strict=False)
    with pytest.raises(EngineRejected, match="one memory"):
        check_manifest(of("wide", "left"), {"wide": wide, "left": wide[:, :2]}, strict=False)
    twice = {"left": wide[:, :2], "right": wide[:, 2:], "again": wide[:, 2:]}
    metas = tuple(ParamMeta(name=name, dtype="float32", shape=(4, 2)) for name in twice)
    with pytest.raises(EngineRejected, match="one memory"):
        check_manifest(Manifest(params=metas), twice, strict=False)


def test_a_manifest_says_which_tensors_it_sends_twice() -> None:
    shared = torch.zeros(2, 4)
    mapping = {"embed": shared, "head": shared, "other": torch.zeros(2, 4)}
    each, once = StateDictSource(mapping, tied="each").manifest(), StateDictSource(mapping).manifest()
    assert (each.tied, each.aliases) == ((("head", "embed"),), ())
    assert (once.tied, once.aliases) == ((), (("head", "embed"),))
    assert unpack_update(pack_update(update_of(each))).manifest == each
    assert each.fingerprint() != Manifest(params=each.params).fingerprint()


async def test_an_alias_of_what_is_not_sent_and_a_meta_target_are_refused() -> None:
    receiver = WeightReceiver({"a": torch.zeros(2, device="meta"), "b": torch.zeros(2)})
    manifest = Manifest(params=(ParamMeta(name="a", dtype="float32", shape=(2,)),), aliases=(("b", "ghost"),))
    with pytest.raises(EngineRejected) as refused:
        await ask(receiver, p.Check(pack_update(update_of(manifest))))
    assert len(refused.value.mismatched) == 2


# ------------------------------------------------------------------------ versions


async def test_versions_do_not_go_back_under_one_fence_but_may_after_a_restart() -> None:
    receiver = a_receiver()
    await an_empty_update(receiver, 5, fence=1)
    with pytest.raises(EngineFailed, match="older"):
        await an_empty_update(receiver, 4, fence=1)
    await an_empty_update(receiver, 2, fence=2)
    assert receiver.weight_version == 2
    await ask(receiver, p.Publish(2), a_call(fence=2))
    with pytest.raises(EngineFailed):
        await ask(receiver, p.Publish(3), a_call(fence=2))


async def test_a_begin_needs_its_group() -> None:
    receiver = a_receiver()
    update = update_of(manifest_of(nn.Linear(4, 3)), group="never joined")
    with pytest.raises(EngineFailed, match="not joined"):
        await ask(receiver, p.Begin(pack_update(update)))
    assert receiver.weight_state is EngineState.STALE
    with receiver.serving():
        pass


async def test_receive_and_end_need_an_open_update() -> None:
    receiver = a_receiver()
    for verb in (p.Receive("u", 0), p.End("u")):
        with pytest.raises(EngineFailed, match="not open"):
            await ask(receiver, verb)


async def test_a_join_that_finds_nobody_fails_and_may_be_tried_again() -> None:
    receiver = a_receiver()
    for _ in range(2):
        with pytest.raises(EngineFailed):
            await ask(receiver, p.Join(a_spec_of_nobody(), 1))


def test_a_tensor_is_suspect_until_a_version_with_all_of_it_is_published() -> None:
    weights = WeightState()
    whole = update_of(manifest_of(nn.Linear(2, 2)), version=1)
    weights.begin(whole, "s", {})
    assert weights.state is EngineState.UPDATING
    weights.break_off()
    assert weights.state is EngineState.STALE, "nothing was written"

    weights.begin(whole, "s", {})
    weights.suspect(["weight"])
    weights.break_off()
    assert weights.state is EngineState.TORN

    part = update_of(Manifest(params=whole.manifest.params[1:]), version=2)
    weights.begin(part, "s", {}).arrived.update(b.index for b in part.buckets)
    with pytest.raises(EngineRejected, match="torn"):
        weights.check_complete(part.update_id)

    again = update_of(whole.manifest, version=3)
    weights.begin(again, "s", {}).arrived.update(b.index for b in again.buckets)
    weights.end(weights.check_complete(again.update_id))
    assert weights.state is EngineState.TORN, "nobody published it"
    weights.publish(3, fence=1)
    assert weights.state is EngineState.CURRENT
