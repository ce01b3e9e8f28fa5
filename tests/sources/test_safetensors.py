from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from async_wsync.errors import SourceError
from async_wsync.protocols import WeightSource
from async_wsync.sources import SafetensorsSource, StateDictSource
from async_wsync.transfer.checksum import model_digests

safetensors = pytest.importorskip("safetensors.torch")

STATE = {
    "z.weight": torch.randn(4, 3).bfloat16(),
    "a.bias": torch.randn(3),
    "a.scale": torch.randn(4).to(torch.float8_e4m3fn),
    "steps": torch.tensor(7),
    "mask": torch.tensor([True, False]),
    "nothing": torch.empty(0, 3),
    "codes": torch.tensor([1, 2, 3], dtype=torch.uint16),
}


def agrees(source: WeightSource) -> dict[str, torch.Tensor]:
    manifest, tensors = source.manifest(), list(source.tensors())
    assert [(m.name, m.shape) for m in manifest.params] == [(n, tuple(t.shape)) for n, t in tensors]
    if not source.casts:
        assert [f"torch.{m.dtype}" for m in manifest.params] == [str(t.dtype) for _, t in tensors]
    return dict(tensors)


def sharded(folder: Path, *, index: bool = True) -> Path:
    parts = [dict(list(STATE.items())[:4]), dict(list(STATE.items())[4:])]
    weight_map = {}
    for number, part in enumerate(parts, 1):
        file = f"model-0000{number}-of-00002.safetensors"
        safetensors.save_file(part, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_one_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    safetensors.save_file(STATE, tmp_path / "model.safetensors")
    for path in (tmp_path, str(tmp_path / "model.safetensors")):
        source = SafetensorsSource(path)
        assert isinstance(source, WeightSource)
        assert model_digests(agrees(source)) == model_digests(STATE)


@pytest.mark.parametrize("index", [True, False])
def test_shards_are_read_as_one_checkpoint(tmp_path: Path, index: bool) -> None:
    source = SafetensorsSource(sharded(tmp_path, index=index))
    assert "2 files" in repr(source)
    assert model_digests(agrees(source)) == model_digests(STATE)


def test_the_index_may_be_given_and_decides_what_is_read(tmp_path: Path) -> None:
    sharded(tmp_path)
    safetensors.save_file({"adapter": torch.ones(1)}, tmp_path / "other.safetensors")
    assert agrees(SafetensorsSource(tmp_path / "model.safetensors.index.json")).keys() == STATE.keys()


def test_tensors_are_cast_renamed_and_chosen(tmp_path: Path) -> None:
    source = SafetensorsSource(
        sharded(tmp_path), dtype=torch.float16, rename=lambda n: f"m.{n}", include=lambda n: n not in ("mask", "steps")
    )
    assert source.casts
    dtypes = {m.name: m.dtype for m in source.manifest().params}
    assert dtypes == {
        "m.z.weight": "float16",
        "m.a.bias": "float16",
        "m.a.scale": "float8_e4m3fn",
        "m.nothing": "float16",
        "m.codes": "uint16",
    }
    agrees(source)


def test_a_checkpoint_that_is_not_there_is_a_callers_mistake(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no.safetensors", tmp_path / "no.json", tmp_path / "nowhere"):
        with pytest.raises(ValueError, match="no safetensors checkpoint"):
            SafetensorsSource(path)
    with pytest.raises(ValueError, match="floating point"):
        SafetensorsSource(sharded(tmp_path), dtype=torch.int8)


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00002-of-00002"):
        SafetensorsSource(tmp_path)


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    entries = json.loads(index.read_text())
    entries["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(entries))
    with pytest.raises(SourceError, match="ghost"):
        SafetensorsSource(tmp_path).manifest()
    index.write_text("{}")
    with pytest.raises(SourceError, match="index"):
        SafetensorsSource(tmp_path)
    index.unlink()
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json")
    with pytest.raises(SourceError, match="model-00001-of-00002"):
        SafetensorsSource(tmp_path).manifest()


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for file in ("a.safetensors", "b.safetensors"):
        safetensors.save_file({"same": torch.ones(1)}, tmp_path / file)
    with pytest.raises(ValueError, match=r"'same' is in a\.safetensors and in b\.safetensors"):
        SafetensorsSource(tmp_path).manifest()


def test_a_dtype_torch_cannot_hold_is_named(tmp_path: Path) -> None:
    header = json.dumps({"odd": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 3)
    with pytest.raises(SourceError):
        SafetensorsSource(tmp_path).manifest()


def test_reading_does_not_load_the_whole_file(tmp_path: Path) -> None:
    """A tensor is a view of the mapped file: its pages are read when they are packed."""
    safetensors.save_file({"w": torch.randn(1024, 1024)}, tmp_path / "model.safetensors")
    (tensor,) = dict(SafetensorsSource(tmp_path).tensors()).values()
    with open("/proc/self/maps") as maps:
        regions = [line.split() for line in maps if "model.safetensors" in line]
    spans = [[int(x, 16) for x in region[0].split("-")] for region in regions]
    assert any(low <= tensor.data_ptr() < high for low, high in spans)


def test_a_checkpoint_and_its_state_dict_have_one_manifest_up_to_order(tmp_path: Path) -> None:
    safetensors.save_file(STATE, tmp_path / "model.safetensors")
    ours, theirs = SafetensorsSource(tmp_path).manifest(), StateDictSource(STATE).manifest()
    assert sorted(map(str, ours.params)) == sorted(map(str, theirs.params))
