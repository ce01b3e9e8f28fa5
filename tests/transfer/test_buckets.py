from __future__ import annotations

import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_wsync.transfer import layout as layouts
from async_wsync.transfer.checksum import model_digests
from async_wsync.transfer.layout import lay_out
from async_wsync.transfer.pack import Stager, stage
from async_wsync.transfer.plan import plan_buckets
from async_wsync.transfer.tensors import dtype_name, param_meta, param_nbytes, torch_dtype
from async_wsync.transfer.unpack import ReceiveBuffers
from async_wsync.types import BucketSpec, Manifest, ParamMeta, WireFormat
from tests.support.tensors import DTYPES, LAYOUTS, random_tensor, rearranged
from tests.support.updates import manifest_of

FORMATS = list(WireFormat)


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def models(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    count = draw(st.integers(0, 12))
    model = {}
    for index in range(count):
        tensor = random_tensor(draw(st.sampled_from(DTYPES)), draw(shapes), draw(st.integers(0, 1000)))
        model[f"layer.{index}.weight"] = rearranged(tensor, draw(st.sampled_from(LAYOUTS)))
    return model


def send(wire: list[torch.Tensor], buffers: list[torch.Tensor]) -> None:
    assert [t.shape for t in wire] == [t.shape for t in buffers]
    assert {t.dtype for t in [*wire, *buffers]} <= {torch.uint8}
    for source, target in zip(wire, buffers, strict=True):
        assert source.is_contiguous() and target.is_contiguous()
        target.copy_(source)


def through_the_wire(
    model: dict[str, torch.Tensor], targets: dict[str, torch.Tensor], wire: WireFormat, bucket_bytes: int
) -> None:
    for bucket in plan_buckets(manifest_of(model), bucket_bytes=bucket_bytes):
        tensors = {meta.name: model[meta.name] for meta in bucket.params}
        sender, receiver = lay_out(bucket, wire), lay_out(bucket, wire)
        assert sender == receiver
        wire_tensors = stage(sender, tensors)
        assert tuple(t.nbytes for t in wire_tensors) == sender.buffer_sizes
        landing = ReceiveBuffers(receiver, targets)
        send(wire_tensors, landing.buffers)
        landing.apply()


@settings(max_examples=150, deadline=None)
@given(
    model=models(),
    wire=st.sampled_from(FORMATS),
    bucket_bytes=st.integers(1, 400),
    limit=st.sampled_from([0, 1, 40, 1000]),
    target_layout=st.sampled_from(["plain", "transposed", "strided", "column", "parameter"]),
)
def test_every_byte_arrives_whatever_the_dtype_shape_and_strides(
    model: dict[str, torch.Tensor], wire: WireFormat, bucket_bytes: int, limit: int, target_layout: str
) -> None:
    kept, layouts.DIRECT_BYTES = layouts.DIRECT_BYTES, limit
    try:
        targets = {}
        for name, tensor in model.items():
            zero = random_tensor(dtype_name(tensor.dtype), tuple(tensor.shape), 77)
            targets[name] = rearranged(zero, target_layout)
        through_the_wire(model, targets, wire, bucket_bytes)
        assert model_digests(targets) == model_digests(model)
    finally:
        layouts.DIRECT_BYTES = kept


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.integers(0, 50), max_size=30), bucket_bytes=st.integers(1, 60))
def test_a_plan_keeps_the_order_and_overfills_only_for_a_single_tensor(sizes: list[int], bucket_bytes: int) -> None:
    params = tuple(ParamMeta(name=str(i), dtype="uint8", shape=(size,)) for i, size in enumerate(sizes))
    plan = plan_buckets(Manifest(params=params), bucket_bytes=bucket_bytes)
    assert tuple(meta for bucket in plan for meta in bucket.params) == params
    assert [bucket.index for bucket in plan] == list(range(len(plan)))
    for bucket in plan:
        assert bucket.params
        assert bucket.nbytes == sum(map(param_nbytes, bucket.params))
        assert bucket.nbytes <= bucket_bytes or sum(param_nbytes(m) > 0 for m in bucket.params) == 1
    for before, after in itertools.pairwise(plan):
        first = next(param_nbytes(m) for m in after.params if param_nbytes(m))
        assert before.nbytes + first > bucket_bytes


@pytest.mark.parametrize("place", [0, 3, 6])
def test_a_tensor_ten_times_the_bucket_travels_alone(place: int) -> None:
    sizes = [10] * 6
    sizes.insert(place, 1000)
    params = tuple(ParamMeta(name=str(i), dtype="uint8", shape=(size,)) for i, size in enumerate(sizes))
    plan = plan_buckets(Manifest(params=params), bucket_bytes=100)
    assert [m.name for bucket in plan if bucket.nbytes > 100 for m in bucket.params] == [str(place)]
    assert tuple(m for bucket in plan for m in bucket.params) == params


def test_an_empty_manifest_needs_no_bucket() -> None:
    assert plan_buckets(Manifest(params=()), bucket_bytes=1) == ()


@pytest.mark.parametrize("bucket_bytes", [0, -1])
def test_a_bucket_size_that_is_not_positive_is_refused(bucket_bytes: int) -> None:
    with pytest.raises(ValueError, match="bucket_bytes"):
        plan_buckets(Manifest(params=()), bucket_bytes=bucket_bytes)


def test_sixteen_thousand_small_tensors_are_one_bucket() -> None:
    params = tuple(ParamMeta(name=str(i), dtype="float32", shape=(8,)) for i in range(16_000))
    (bucket,) = plan_buckets(Manifest(params=params), bucket_bytes=1 << 20)
    assert len(lay_out(bucket, WireFormat.PACKED).buffer_sizes) == 1


def test_an_atomic_group_is_never_cut() -> None:
    names = ["a.weight", "a.weight_scale", "b.weight", "x", "b.weight_scale", "c.weight", "c.weight_scale"]
    params = tuple(ParamMeta(name=name, dtype="uint8", shape=(10,)) for name in names)
    plan = plan_buckets(
        Manifest(params=params), bucket_bytes=10, atomic_groups=[re.escape("x"), r"(.*)\.weight(?:_scale)?"]
    )
    assert [[m.name for m in bucket.params] for bucket in plan] == [
        ["a.weight", "a.weight_scale"],
        ["b.weight", "x", "b.weight_scale"],
        ["c.weight", "c.weight_scale"],
    ]


def test_a_bad_atomic_pattern_is_refused() -> None:
    with pytest.raises(ValueError, match="atomic_groups"):
        plan_buckets(Manifest(params=()), bucket_bytes=10, atomic_groups=["("])


def one_bucket(model: dict[str, torch.Tensor]) -> BucketSpec:
    (bucket,) = plan_buckets(manifest_of(model), bucket_bytes=1 << 40)
    return bucket


def test_a_large_contiguous_tensor_is_sent_from_its_storage_into_the_targets_storage() -> None:
    big = torch.nn.Parameter(torch.randn(layouts.DIRECT_BYTES // 4))
    layout = lay_out(one_bucket({"big": big, "small": torch.ones(3)}), WireFormat.PACKED)
    flat, direct = stage(layout, {"big": big, "small": torch.ones(3)})
    assert (flat.nbytes, direct.data_ptr()) == (12, big.data_ptr())
    target = torch.nn.Parameter(torch.zeros_like(big))
    landing = ReceiveBuffers(layout, {"big": target, "small": torch.zeros(3)})
    assert landing.buffers[1].data_ptr() == target.data_ptr()


def test_offsets_are_multiples_of_the_item_size_and_leave_no_gap() -> None:
    model = {name: random_tensor(name, (3,), 1) for name in DTYPES}
    for wire in (WireFormat.PACKED, WireFormat.FLATTENED):
        layout = lay_out(one_bucket(model), wire)
        end = 0
        for slot in layout.flat:
            assert slot.offset == end and slot.offset % torch_dtype(slot.meta.dtype).itemsize == 0
            end += slot.nbytes
        assert end == layout.flat_nbytes
        assert sorted(m.name for m in layout.params) == sorted(model)


def test_a_conjugate_view_is_sent_as_the_values_it_shows() -> None:
    lazy = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj()
    assert lazy.is_conj() and lazy.is_contiguous()
    for wire in FORMATS:
        target = {"z": torch.zeros(2, dtype=torch.complex64)}
        through_the_wire({"z": lazy}, target, wire, 1 << 20)
        assert torch.equal(target["z"], lazy.resolve_conj())


@pytest.mark.parametrize("size", [4, layouts.DIRECT_BYTES])
def test_a_tensor_is_cast_to_the_dtype_its_meta_declares(size: int) -> None:
    master = torch.randn(size)
    meta = param_meta("w", master, dtype=torch.bfloat16)
    bucket = BucketSpec(index=0, params=(meta,), nbytes=param_nbytes(meta))
    layout = lay_out(bucket, WireFormat.PACKED)
    target = {"w": torch.zeros(size, dtype=torch.bfloat16)}
    landing = ReceiveBuffers(layout, target)
    send(stage(layout, [master]), landing.buffers)
    landing.apply()
    assert torch.equal(target["w"], master.bfloat16())
    assert master.dtype is torch.float32


def test_inference_tensors_and_parameters_can_be_targets() -> None:
    with torch.inference_mode():
        frozen = {"a": torch.zeros(3), "b": torch.zeros(4, 2).t()}
    frozen["c"] = torch.nn.Parameter(torch.zeros(2))
    model = {"a": torch.randn(3), "b": torch.randn(2, 4), "c": torch.randn(2)}
    through_the_wire(model, frozen, WireFormat.PACKED, 1 << 20)
    assert model_digests(frozen) == model_digests(model)
    assert frozen["c"].requires_grad


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({}, "no target for 'w'"),
        ({"w": torch.zeros(3)}, "'w' is float32"),
        ({"w": torch.zeros(2, dtype=torch.float64)}, "'w' is float64"),
    ],
)
def test_a_target_that_does_not_fit_is_refused_before_anything_is_received(
    target: dict[str, torch.Tensor], message: str
) -> None:
    layout = lay_out(one_bucket({"w": torch.zeros(2)}), WireFormat.PACKED)
    with pytest.raises(ValueError, match=message):
        ReceiveBuffers(layout, target)


def test_a_bucket_with_a_tensor_too_few_or_a_strange_one_is_not_staged() -> None:
    model = {"a": torch.zeros(2), "b": torch.zeros(3)}
    layout = lay_out(one_bucket(model), WireFormat.PACKED)
    stager = Stager(layout)
    stager.add("a", model["a"])
    with pytest.raises(ValueError, match="'c'"):
        stager.add("c", model["a"])
    with pytest.raises(ValueError, match="'b'"):
        stager.add("b", model["a"])
    with pytest.raises(ValueError, match="1 of 2"):
        stager.finish()
    with pytest.raises(ValueError, match="lacks 'b'"):
        stage(layout, {"a": model["a"]})


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'float7'"):
        param_nbytes(ParamMeta(name="w", dtype="float7", shape=()))


def test_a_thousand_slices_land_where_they_belong() -> None:
    """More tensors than one slice takes, of interleaved dtypes, so that slices end in the middle of runs."""
    model = {f"{i}": random_tensor(["float32", "bfloat16", "bool"][i % 3], (i % 7, 3), i) for i in range(1500)}
    targets = {name: torch.zeros_like(t) for name, t in model.items()}
    for wire in (WireFormat.PACKED, WireFormat.FLATTENED):
        through_the_wire(model, targets, wire, 1 << 30)
        assert model_digests(targets) == model_digests(model)
