from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

from async_wsync.errors import SourceError
from async_wsync.protocols import WeightSource
from async_wsync.sources import IterableSource, MasterWeightSource, ModuleSource, StateDictSource, participate
from async_wsync.types import Manifest, ParamMeta


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def names(source: WeightSource) -> list[str]:
    return [meta.name for meta in source.manifest().params]


def agrees_with_its_manifest(source: WeightSource) -> dict[str, torch.Tensor]:
    manifest = source.manifest()
    tensors = list(source.tensors())
    assert [name for name, _ in tensors] == [meta.name for meta in manifest.params]
    for meta, (_, tensor) in zip(manifest.params, tensors, strict=True):
        assert tuple(tensor.shape) == meta.shape
        assert not tensor.requires_grad
        assert source.casts or str(tensor.dtype) == f"torch.{meta.dtype}"
    return dict(tensors)


def test_a_module_is_sent_as_its_parameters_and_persistent_buffers() -> None:
    model = Tied()
    source = ModuleSource(model)
    assert isinstance(source, WeightSource)
    sent = agrees_with_its_manifest(source)
    assert sent.keys() == model.state_dict().keys() - {"head.weight"}
    assert "scratch" not in sent and "norm.num_batches_tracked" in sent
    assert sent["embed.weight"].data_ptr() == model.embed.weight.data_ptr()


def test_tied_weights_are_sent_once_and_named_as_aliases() -> None:
    manifest = ModuleSource(Tied()).manifest()
    assert manifest.aliases == (("head.weight", "embed.weight"),)
    assert len(names(ModuleSource(Tied(), tied="each"))) == len(manifest.params) + 1


def test_ties_are_found_in_a_state_dict_of_detached_tensors() -> None:
    state = Tied().state_dict()
    assert StateDictSource(state).manifest().aliases == (("head.weight", "embed.weight"),)


def test_other_views_of_one_memory_are_not_taken_for_ties() -> None:
    base = torch.randn(4, 4)
    views = {"all": base, "t": base.t(), "top": base[:2], "bits": base.view(torch.int32), "bottom": base[2:]}
    assert StateDictSource(views).manifest().aliases == ()
    agrees_with_its_manifest(StateDictSource(views))


def test_empty_tensors_are_not_taken_for_ties() -> None:
    assert StateDictSource({"a": torch.empty(0), "b": torch.empty(0)}).manifest().aliases == ()


def test_extra_state_of_modules_is_left_out() -> None:
    class Extra(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return {"not": "a tensor"}

        def set_extra_state(self, state: Any) -> None:
            pass

    assert names(ModuleSource(Extra(1, 1))) == ["weight", "bias"]


def test_rename_and_include_choose_what_the_engine_gets_to_see() -> None:
    source = ModuleSource(
        Tied(), rename=lambda name: f"model.{name}", include=lambda name: name.startswith("norm.") and "num" not in name
    )
    assert names(source) == [f"model.norm.{n}" for n in ("weight", "bias", "running_mean", "running_var")]
    agrees_with_its_manifest(source)


def test_a_cast_touches_floating_point_and_nothing_else() -> None:
    state = {
        "master": torch.randn(3),
        "half": torch.randn(3).half(),
        "steps": torch.tensor(3),
        "mask": torch.tensor([True]),
        "codes": torch.zeros(3, dtype=torch.float8_e4m3fn),
    }
    source = StateDictSource(state, dtype=torch.bfloat16)
    assert source.casts
    assert [m.dtype for m in source.manifest().params] == ["bfloat16", "bfloat16", "int64", "bool", "float8_e4m3fn"]
    sent = dict(source.tensors())
    assert sent["master"].data_ptr() == state["master"].data_ptr()  # cast while packing, no second copy here


def test_master_weights_declare_the_dtype_that_travels() -> None:
    masters = {"w": torch.randn(2, 2)}
    source = MasterWeightSource(masters, dtype=torch.bfloat16)
    assert source.manifest().params == (ParamMeta(name="w", dtype="bfloat16", shape=(2, 2)),)
    assert "bfloat16" in repr(source)


def test_a_source_sends_the_values_of_the_moment() -> None:
    model = torch.nn.Linear(2, 2)
    source = ModuleSource(model)
    before = {name: t.clone() for name, t in source.tensors()}
    with torch.no_grad():
        model.weight.add_(1)
    assert torch.equal(dict(source.tensors())["weight"], before["weight"] + 1)


with torch.device("meta"):
    META = torch.zeros(2)


@pytest.mark.filterwarnings("ignore:.*quantize.*:UserWarning", "ignore:.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning", "ignore:.*[Ss]parse.*:UserWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: META, "'bad' is a meta tensor"),
        (lambda: torch.eye(2).to_sparse(), "'bad' is not dense"),
        (lambda: torch.eye(2).to_sparse_csr(), "'bad' is not dense"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "'bad' is a quantized"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "'bad' is not dense"),
        (lambda: torch.nn.UninitializedParameter(), "'bad' is not initialized"),
        (lambda: [1.0, 2.0], "'bad' is a list"),
        (lambda: None, "'bad' is a NoneType"),
    ],
)
@pytest.mark.parametrize("kind", [StateDictSource, IterableSource])
def test_what_cannot_be_sent_is_refused_by_name(make: Any, message: str, kind: Any) -> None:
    state = {"good": torch.ones(1), "bad": make()}
    source = kind(state if kind is StateDictSource else list(state.items()))
    with pytest.raises(ValueError, match=message):
        source.manifest()


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'same' comes twice"):
        StateDictSource({"a": torch.ones(1), "b": torch.ones(1)}, rename=lambda _: "same").manifest()
    with pytest.raises(ValueError, match="'a' comes twice"):
        IterableSource([("a", torch.ones(1)), ("a", torch.ones(1))]).manifest()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModuleSource({}), "torch.nn.Module"),  # type: ignore[arg-type]
        (lambda: StateDictSource({}, tied="twice"), "tied"),  # type: ignore[arg-type]
        (lambda: StateDictSource({}, dtype=torch.int8), "floating point"),
        (lambda: IterableSource(3), "items"),  # type: ignore[arg-type]
        (lambda: IterableSource([("a",)]).manifest(), "pairs"),  # type: ignore[list-item]
        (lambda: IterableSource([(1, torch.ones(1))]).manifest(), "name must be a str"),  # type: ignore[list-item]
        (lambda: IterableSource(lambda: 3).manifest(), "not iterable"),  # type: ignore[arg-type,return-value]
    ],
)
def test_a_callers_mistake_is_a_value_error(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


PAIRS = [("a", torch.ones(2)), ("b", torch.zeros(3, dtype=torch.int32))]


def test_a_list_is_walked_as_often_as_needed() -> None:
    source = IterableSource(PAIRS)
    assert agrees_with_its_manifest(source).keys() == agrees_with_its_manifest(source).keys()


def test_a_callable_is_called_for_each_walk() -> None:
    walks = []

    def make() -> Iterator[tuple[str, torch.Tensor]]:
        walks.append(1)
        yield from PAIRS

    source = IterableSource(make)
    agrees_with_its_manifest(source)
    assert len(walks) == 2


def test_a_generator_is_collected_so_that_it_can_be_retried() -> None:
    source = IterableSource(pair for pair in PAIRS)
    agrees_with_its_manifest(source)
    agrees_with_its_manifest(source)


def test_a_generator_with_a_manifest_is_streamed_one_tensor_at_a_time_and_only_once() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def make() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(5):
            assert not any(ref() is not None for ref in alive)
            tensor = torch.ones(i)
            alive.append(weakref.ref(tensor))
            yield str(i), tensor
            del tensor

    manifest = Manifest(params=tuple(ParamMeta(name=str(i), dtype="float32", shape=(i,)) for i in range(5)))
    source = IterableSource(make(), manifest=manifest)
    assert source.manifest() is manifest
    for _, tensor in source.tensors():
        del tensor
    assert len(alive) == 5
    with pytest.raises(SourceError, match="callable"):
        next(source.tensors())


class AsyncPairs:
    """An async iterable whose walks record that they were closed."""

    def __init__(self) -> None:
        self.closed = 0

    async def __aiter__(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        try:
            for pair in PAIRS:
                await asyncio.sleep(0)
                yield pair
        finally:
            await asyncio.sleep(0)
            self.closed += 1


def test_an_async_iterable_is_walked_on_a_loop_of_its_own() -> None:
    items = AsyncPairs()
    agrees_with_its_manifest(IterableSource(items))
    assert items.closed == 2


def test_an_async_generator_is_collected_and_a_callable_is_not() -> None:
    agrees_with_its_manifest(IterableSource(aiter(AsyncPairs())))
    agrees_with_its_manifest(IterableSource(lambda: aiter(AsyncPairs())))


def test_a_walk_given_up_half_way_closes_what_it_walked() -> None:
    items = AsyncPairs()
    walk = IterableSource(items).tensors()
    next(walk)
    walk.close()  # type: ignore[attr-defined]
    assert items.closed == 1


def test_an_error_in_an_async_iterable_comes_out_as_it_is() -> None:
    async def broken() -> AsyncIterator[tuple[str, torch.Tensor]]:
        yield PAIRS[0]
        raise KeyError("lost shard")

    with pytest.raises(KeyError, match="lost shard"):
        IterableSource(broken).manifest()


def test_an_empty_source_has_an_empty_manifest() -> None:
    for source in (StateDictSource({}), IterableSource([]), IterableSource(iter(()))):
        assert source.manifest() == Manifest(params=())
        assert list(source.tensors()) == []


def test_the_device_is_that_of_the_tensors() -> None:
    assert StateDictSource({}).device is None
    assert ModuleSource(Tied()).device == torch.device("cpu")
    source = IterableSource(PAIRS)
    source.manifest()
    assert source.device == torch.device("cpu")


MANIFEST = IterableSource(PAIRS).manifest()


class Making:
    """Counts its walks, the tensors it made, and the walks that were ended."""

    def __init__(self) -> None:
        self.walks = self.made = self.ended = 0

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.walks += 1
        try:
            for name, tensor in PAIRS:
                self.made += 1
                yield name, tensor
        finally:
            self.ended += 1


def test_a_source_with_a_manifest_finds_its_device_at_the_first_tensor_and_sends_that_all_the_same() -> None:
    making = Making()
    source = IterableSource(making(), manifest=MANIFEST)
    assert source.device is None
    assert source.find_device() == source.find_device() == torch.device("cpu")
    assert (making.made, making.ended) == (1, 0)
    assert [name for name, _ in source.tensors()] == ["a", "b"]
    assert (making.walks, making.made, making.ended) == (1, 2, 1)
    with pytest.raises(SourceError, match="callable"):
        next(source.tensors())


def test_a_walk_that_can_be_had_again_is_closed_after_a_look_and_begun_anew() -> None:
    making = Making()
    source = IterableSource(making, manifest=MANIFEST)
    assert source.find_device() == torch.device("cpu")
    assert (making.walks, making.made, making.ended) == (1, 1, 1)
    assert [name for name, _ in source.tensors()] == ["a", "b"]
    assert (making.walks, making.ended) == (2, 2)


def test_a_walk_that_other_ranks_take_part_in_goes_on_after_a_look() -> None:
    making = Making()
    source = IterableSource(making, manifest=MANIFEST, collective=True)
    assert source.find_device() == torch.device("cpu")
    assert [name for name, _ in source.tensors()] == ["a", "b"]
    assert (making.walks, making.made) == (1, 2)
    assert [name for name, _ in source.tensors()] == ["a", "b"]
    assert making.walks == 2


def test_a_walk_given_up_right_after_a_look_lets_go_of_the_generator() -> None:
    making = Making()
    source = IterableSource(making(), manifest=MANIFEST)
    source.find_device()
    walk = source.tensors()
    next(walk)
    walk.close()  # type: ignore[attr-defined]
    assert (making.made, making.ended) == (1, 1)


def test_a_device_that_was_given_is_believed_and_nothing_is_looked_at() -> None:
    making = Making()
    source = IterableSource(making(), manifest=MANIFEST, device="cuda:1")
    assert source.find_device() == torch.device("cuda:1")
    assert [name for name, _ in source.tensors()] == ["a", "b"]
    assert source.device == torch.device("cuda:1")
    assert making.walks == 1
    with pytest.raises(ValueError, match="device must be"):
        IterableSource(PAIRS, device="nowhere")


def test_a_source_without_a_tensor_has_no_device() -> None:
    source = IterableSource(iter(()), manifest=Manifest(params=()))
    assert source.find_device() is None
    assert list(source.tensors()) == []


def test_taking_part_walks_the_whole_source() -> None:
    assert participate(IterableSource(PAIRS)) == 2
    assert not ModuleSource(Tied()).collective
