"""The vLLM adapter and the receivers behind it, over real groups; `test_real.py` has the real vLLM."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from async_wsync import UpdateFailed, WeightBroadcaster
from async_wsync.engines.rejection import Findings
from async_wsync.engines.update_codec import update_from_json, update_to_json
from async_wsync.engines.vllm.control import unseen_replica
from async_wsync.engines.vllm.engine import VLLMEngine
from async_wsync.engines.vllm.messages import UNSEEN_REPLICA, Reply
from async_wsync.engines.vllm.names import _clashes, _Target
from async_wsync.errors import BaseMissing, EngineDied, EngineFailed, EngineRejected, RendezvousError, StaleFence
from async_wsync.runtime.object_refs import RemoteRaised
from async_wsync.sources import StateDictSource
from async_wsync.types import Call, EngineInfo, EngineState, PauseMode, Timeouts, UpdateSpec
from tests.support import updates
from tests.support.groups import joined
from tests.support.peers import Peer
from tests.support.receiver_driver import a_spec_of_nobody
from tests.support.vllm_double import Engine

BUCKET_BYTES = 4096
LIMITS = Timeouts(bucket=10.0, connect=20.0, drain=5.0, total=60.0)


def tensors(fill: float) -> dict[str, torch.Tensor]:
    wide = {f"layers.{i}.weight": torch.full((32, 32), fill + i) for i in range(6)}
    return {**wide, "norm": torch.full((7,), fill, dtype=torch.bfloat16), "scale": torch.tensor(fill)}


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(tensors(0.0), tensors(0.0))
    yield made
    made.close()


def adapter(engine: Engine, name: str = "vllm") -> VLLMEngine:
    return VLLMEngine(engine, name=name, num_ranks=len(engine.receivers))


class Unasked:
    """An adapter that says hello to its engine without comparing the number of ranks."""

    def __init__(self, inner: VLLMEngine) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def hello(self, by: Call) -> EngineInfo:
        ranks, self._inner.num_ranks = self._inner.num_ranks, len(self._inner._control.receivers)  # type: ignore[attr-defined]
        info = await self._inner.hello(by)
        self._inner.num_ranks = ranks
        return info


def broadcaster(*engines: VLLMEngine, **options: Any) -> WeightBroadcaster:
    settings: dict[str, Any] = {"lock": None, "backend": "gloo", "progress": False, "timeouts": LIMITS}
    settings |= {"bucket_bytes": BUCKET_BYTES, "master_address": "127.0.0.1"}
    return WeightBroadcaster(engines, **{**settings, **options})


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def call(*, fence: int | None = None, timeout: float = 10.0, source: str = "test") -> Call:
    return Call(source=source, fence=time.time_ns() // 1_000_000 if fence is None else fence, timeout=timeout)


update_of = partial(updates.update_of, bucket_bytes=BUCKET_BYTES, version=5)


async def test_every_rank_ends_with_what_was_sent(engine: Engine) -> None:
    async with broadcaster(adapter(engine)) as wb:
        for version in (1, 2):
            state = tensors(float(version))
            await wb.update_weights(StateDictSource(state), version=version)
            assert all(same(loader.tensors, state) for loader in engine.loaders)
            assert engine.version == str(version)
    assert [loader.kept for loader in engine.loaders] == [[True, True]] * 2
    assert engine.paused is None


async def test_two_engines_have_ranks_of_their_own(engine: Engine) -> None:
    other = Engine(tensors(0.0))
    async with broadcaster(adapter(engine), adapter(other, "other")) as wb:
        await wb.update_weights(StateDictSource(tensors(3.0)), version=1)
    assert all(same(loader.tensors, tensors(3.0)) for loader in [*engine.loaders, *other.loaders])
    other.close()


async def test_a_manifest_that_does_not_fit_is_refused_with_all_names(engine: Engine) -> None:
    state = tensors(1.0)
    del state["norm"]
    state |= {"scale": torch.zeros(2), "stranger": torch.zeros(3)}
    async with broadcaster(adapter(engine)) as wb:
        with pytest.raises(EngineRejected) as caught:
            await wb.update_weights(StateDictSource(state), version=1)
    error = caught.value
    assert (error.unknown, error.missing, error.mismatched) == (("stranger",), ("norm",), ("scale",))
    assert all(same(loader.tensors, tensors(0.0)) for loader in engine.loaders)


async def test_a_failure_while_loading_tears_the_engine_and_the_next_update_heals_it(engine: Engine) -> None:
    engine.loaders[1].bad_name = "layers.3.weight"
    one = adapter(engine)
    async with broadcaster(one) as wb:
        with pytest.raises(UpdateFailed, match=r"cannot load layers\.3\.weight") as caught:
            await wb.update_weights(StateDictSource(tensors(1.0)), version=1)
        assert isinstance(caught.value.__cause__, EngineFailed)
        assert (await one.hello(call())).state is EngineState.TORN
        assert engine.paused is not None
        engine.loaders[1].bad_name = None
        await wb.update_weights(StateDictSource(tensors(2.0)), version=2)
    assert all(same(loader.tensors, tensors(2.0)) for loader in engine.loaders)
    assert (await one.hello(call())).state is EngineState.CURRENT
    assert engine.paused is None


async def test_a_part_goes_only_to_engines_that_hold_what_it_builds_on(engine: Engine) -> None:
    newcomer = Engine(tensors(0.0), tensors(0.0))
    one, other, part = adapter(engine), adapter(newcomer, "other"), {"norm": tensors(2.0)["norm"]}
    async with broadcaster(one) as wb:
        await wb.update_weights(StateDictSource(tensors(1.0)), version=1)
        await wb.add_engines([other])
        report = await wb.update_weights(StateDictSource(part), version=2, strict=False)
        assert report.behind == ("other",)
        assert any("keep their old values" in note for note in report.engines["vllm"].notes)
        assert newcomer.paused is None
        assert newcomer.version == "default"
        assert all(same(loader.tensors, tensors(0.0)) for loader in newcomer.loaders)
        assert all(same(loader.tensors, {**tensors(1.0), **part}) for loader in engine.loaders)
        await wb.catch_up(StateDictSource({**tensors(1.0), **part}))
        report = await wb.update_weights(StateDictSource(part), version=3, strict=False)
        assert (report.behind, wb.current_engines()) == ((), ("vllm", "other"))
    newcomer.close()


async def test_a_torn_rank_refuses_a_part_before_anything_is_touched(engine: Engine) -> None:
    one, part = adapter(engine), {"norm": tensors(2.0)["norm"]}
    async with broadcaster(one) as wb:
        await wb.update_weights(StateDictSource(tensors(1.0)), version=1)
        engine.loaders[1].bad_name = "layers.3.weight"
        with pytest.raises(UpdateFailed, match="cannot load"):
            await wb.update_weights(StateDictSource(tensors(2.0)), version=2)
        engine.loaders[1].bad_name = None
        engine.paused = None  # what a pause would set again
        with pytest.raises(BaseMissing, match="may hold a mix"):
            await wb.update_weights(StateDictSource(part), version=3, strict=False)
        assert engine.paused is None
        assert wb.engine_states == {"vllm": EngineState.TORN}
        await wb.update_weights(StateDictSource(tensors(3.0)), version=4)
    assert all(same(loader.tensors, tensors(3.0)) for loader in engine.loaders)


async def test_a_whole_update_heals_what_was_torn_under_another_name(engine: Engine) -> None:
    one = adapter(engine)
    for receiver in engine.receivers:
        receiver._weights.suspect(["lm_head.weight"])  # the tied name, which this source does not send
    async with broadcaster(one) as wb:
        await wb.update_weights(StateDictSource(tensors(1.0)), version=1)
    assert (await one.hello(call())).state is EngineState.CURRENT


def test_two_names_that_fill_one_matrix_are_refused_unless_the_update_ties_them() -> None:
    def target(**given_by: int) -> _Target:
        return _Target(name="embed", tensor=torch.zeros(4, 8), wanted=32, storage=None, given_by=given_by)

    (clash,) = _clashes([target(embed=32, head=32)], {"embed": "embed", "head": "head"})
    assert "head" in clash
    assert "embed" in clash
    assert _clashes([target(embed=32, head=32)], {"embed": "embed", "head": "embed"}) == []
    assert _clashes([target(q=16, k=8, v=8)], {"q": "q", "k": "k", "v": "v"}) == []
    scale = _Target(name="scale", tensor=torch.zeros(()), wanted=1, storage=None, given_by={"q": 1, "k": 1})
    assert _clashes([scale], {"q": "q", "k": "k"}) == []


async def _begun(one: VLLMEngine, by: Call, *, timeout: float = 10.0) -> tuple[Any, UpdateSpec]:
    group = await joined([one], by, timeout=timeout)
    update = update_of(tensors(4.0), group=group.spec.name)
    await one.check(by, update)
    await one.pause(by, PauseMode.ABORT)
    await one.begin(by, update)
    return group, update


async def test_a_broadcast_that_never_comes_ends_in_time_and_says_that_it_is_not_its_fault(engine: Engine) -> None:
    one, by = adapter(engine), call(timeout=1.0)
    group, update = await _begun(one, by, timeout=1.0)
    began = time.monotonic()
    waiting = asyncio.create_task(one.receive(by, update, update.buckets[0]))
    await asyncio.sleep(0.2)
    assert (await one.hello(call())).state is EngineState.UPDATING
    with pytest.raises(EngineFailed) as caught:
        await waiting
    assert caught.value.is_collective
    assert time.monotonic() - began < 6.0
    await one.reset(call())
    assert not engine.active
    assert (await one.hello(call())).state is EngineState.STALE
    await group.aclose(5.0)


async def test_an_abort_frees_a_receive_at_once(engine: Engine) -> None:
    one, by = adapter(engine), call(timeout=60.0)
    group, update = await _begun(one, by, timeout=60.0)
    waiting = asyncio.create_task(one.receive(by, update, update.buckets[0]))
    await asyncio.sleep(0.2)
    began = time.monotonic()
    await one.abort(by, group.spec.name)
    with pytest.raises(EngineFailed):
        await waiting
    assert time.monotonic() - began < 5.0
    await group.aclose(5.0)


async def test_an_abort_between_buckets_closes_the_update_and_vllm_does_not_serve_until_its_own_is_closed(
    engine: Engine,
) -> None:
    one, by = adapter(engine), call()
    group, _ = await _begun(one, by)
    await one.abort(by, group.spec.name)
    assert [receiver.state for receiver in engine.receivers] == [EngineState.STALE] * 2
    assert engine.active
    with pytest.raises(EngineFailed, match="must not serve"):
        await one.resume(by)
    assert engine.paused is not None
    await one.reset(by)
    await one.resume(by)
    assert engine.paused is None
    await group.aclose(5.0)


async def test_a_group_that_could_not_be_joined_may_be_left_and_is_not_kept(engine: Engine) -> None:
    one, nobody = adapter(engine), replace(a_spec_of_nobody(), world_size=3, connect_timeout=0.2)
    with pytest.raises(EngineFailed, match="nobody listens"):
        await one.join(call(), nobody, rank_offset=1)
    assert [receiver._receiving.memberships.names for receiver in engine.receivers] == [set(), set()]
    await one.leave(call(), nobody.name)


async def test_a_session_that_another_source_left_open_is_closed_before_the_next_one(engine: Engine) -> None:
    one = adapter(engine)
    group, _ = await _begun(one, call(source="dead"))
    assert engine.active
    async with broadcaster(one) as wb:
        await wb.update_weights(StateDictSource(tensors(6.0)), version=9)
    assert all(same(loader.tensors, tensors(6.0)) for loader in engine.loaders)
    assert all(loader.kept == [False, True] for loader in engine.loaders)
    await group.aclose(5.0)


async def test_what_a_source_that_died_left_at_two_ranks_goes_with_the_next_one(engine: Engine) -> None:
    """The ranks stay connected with each other, so that one lost member must do."""
    vllm, source, by = adapter(engine), Peer("source"), call()
    options = {"address": "127.0.0.1", "timeout": 60.0, "connect_timeout": 30.0, "name": f"test-{uuid.uuid4().hex[:8]}"}
    spec = await source.ask("open_group", backend="gloo", epoch=1, world_size=3, **options)
    joining = asyncio.create_task(vllm.join(by, spec, rank_offset=1))
    await source.ask("complete_group", {1: "vllm", 2: "vllm"})
    await joining
    update = update_of(tensors(1.0), group=spec.name)
    await vllm.check(by, update)
    await vllm.pause(by, PauseMode.ABORT)
    await vllm.begin(by, update)
    memberships = [receiver._receiving.memberships.get(spec.name) for receiver in engine.receivers]
    assert [receiver.state for receiver in engine.receivers] == [EngineState.UPDATING] * 2
    source.kill()
    source.end()
    limit = time.monotonic() + 10.0
    while not all(membership is not None and membership.unusable for membership in memberships):
        assert time.monotonic() < limit, "nobody noticed"
        await asyncio.sleep(0.01)
    await vllm.hello(call(source="next"))
    assert [receiver.state for receiver in engine.receivers] == [EngineState.STALE] * 2
    group = await joined([vllm], call(source="next"), timeout=10.0)
    assert [receiver._receiving.memberships.get(spec.name) for receiver in engine.receivers] == [None, None]
    await group.aclose(5.0)


async def test_a_lower_fence_is_refused_by_every_verb_that_changes_something(engine: Engine) -> None:
    one, update = adapter(engine), update_of(tensors(1.0))
    await one.check(call(), update)
    stale = call(fence=1)
    for attempt in (one.check(stale, update), one.publish(stale, 1), one.reset(stale), one.end(stale, update)):
        with pytest.raises(StaleFence):
            await attempt


async def test_an_update_that_was_not_checked_does_not_begin(engine: Engine) -> None:
    one = adapter(engine)
    await one.pause(call(), PauseMode.KEEP)
    with pytest.raises(EngineFailed, match="not checked"):
        await one.begin(call(), update_of(tensors(1.0)))


async def test_an_engine_that_was_not_paused_does_not_begin(engine: Engine) -> None:
    one, update = adapter(engine), update_of(tensors(1.0))
    await one.check(call(), update)
    with pytest.raises(EngineFailed, match="not paused"):
        await one.begin(call(), update)


async def test_an_update_without_all_of_its_buckets_does_not_end(engine: Engine) -> None:
    one, by = adapter(engine), call()
    group, update = await _begun(one, by)
    with pytest.raises(EngineFailed, match="have not arrived"):
        await one.end(by, update)
    await one.reset(by)
    await group.aclose(5.0)


async def test_an_engine_that_dies_without_an_answer_is_found_out(engine: Engine) -> None:
    one = adapter(engine)
    engine.hang.clear()
    asking = asyncio.create_task(one.hello(call(timeout=30.0)))
    await asyncio.sleep(0.05)
    engine.dead = True
    began = time.monotonic()
    with pytest.raises(EngineDied, match="vllm"):
        await asking
    assert time.monotonic() - began < 3.0


@pytest.mark.parametrize("address", ["no-such-host.invalid", "203.0.113.7"])
async def test_an_address_that_no_engine_can_connect_to_fails_the_update_at_once(engine: Engine, address: str) -> None:
    started = time.monotonic()
    wb = broadcaster(adapter(engine), master_address=address)
    with pytest.raises(UpdateFailed, match=address) as raised:
        await wb.update_weights(StateDictSource(tensors(1.0)), version=1)
    assert time.monotonic() - started < 1.0 + 2.0
    assert isinstance(raised.value.__cause__, RendezvousError)
    assert raised.value.at_fault == ()
    assert {o.state for o in raised.value.outcomes.values()} == {EngineState.STALE}
    await wb.aclose()


def test_an_address_that_is_none_is_the_callers_mistake(engine: Engine) -> None:
    with pytest.raises(ValueError, match="has a zone"):
        broadcaster(adapter(engine), master_address="fe80::1%lo")


async def test_a_wrong_number_of_ranks_is_named_by_the_ranks_that_come(engine: Engine) -> None:
    """Where the adapter does not ask first, as ours does."""
    one = adapter(engine)
    one.num_ranks = 3
    wb = broadcaster(Unasked(one))  # type: ignore[arg-type]
    started = time.monotonic()
    with pytest.raises(UpdateFailed, match="2 ranks of its engine, and num_ranks=3 was given") as raised:
        await wb.update_weights(StateDictSource(tensors(1.0)), version=1)
    assert time.monotonic() - started < LIMITS.connect / 2
    assert raised.value.at_fault == ("vllm",)
    await wb.aclose()


async def test_a_wrong_number_of_ranks_is_said(engine: Engine) -> None:
    with pytest.raises(EngineFailed, match="2 ranks, and num_ranks=1"):
        await VLLMEngine(engine, name="vllm").hello(call())


def test_a_name_is_unknown_only_where_no_rank_has_a_use_for_it() -> None:
    stages = [Findings(unused=("b", "x"), notes=("n",)), Findings(unused=("a", "x"), notes=("n",))]
    merged = Findings.merge(stages)
    assert (merged.unknown, merged.bad, merged.notes) == (("x",), True, ("n",))
    assert not Findings.merge([Findings(unused=("b",)), Findings(unused=("a",))]).bad


def test_the_answer_of_an_unseen_replica_is_read_from_its_exception() -> None:
    reply = Reply(done=False, state="updating", incarnation="i").to_json()
    text = f"Call to collective_rpc method failed: Worker failed with error '{UNSEEN_REPLICA}{json.dumps(reply)}', see"
    assert unseen_replica(RemoteRaised(text, cause=RuntimeError(text))) == [reply]
    with pytest.raises(RemoteRaised):
        unseen_replica(RemoteRaised("something else", cause=RuntimeError("something else")))


def test_an_update_travels_as_text_unchanged() -> None:
    update = update_of(tensors(1.0), group="group")
    assert update_from_json(json.loads(json.dumps(update_to_json(update)))) == update
