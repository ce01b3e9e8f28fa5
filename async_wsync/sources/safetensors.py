"""A source over a checkpoint in the safetensors format, as Hugging Face lays it out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from async_wsync.errors import SourceError
from async_wsync.sources.tensors import check_options, wire_dtype
from async_wsync.transfer.tensors import dtype_name
from async_wsync.types import Manifest, ParamMeta

__all__ = ["SafetensorsSource"]

_INDEX = "model.safetensors.index.json"

# The format's names for dtypes (https://github.com/huggingface/safetensors), in torch's words.
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
    "C64": "complex64",
}


class SafetensorsSource:
    """The tensors of ``path``: one file, a directory, or its ``model.safetensors.index.json``.

    Files are mapped and read as their tensors are packed, shard after shard, so that memory holds one tensor at a
    time beyond the buckets. Names are those stored. A directory without an index must hold exactly one
    checkpoint: all its ``*.safetensors`` files together, without a name twice. ``dtype``, ``rename`` and ``include``
    as in `StateDictSource`. ValueError if there is no such checkpoint; `SourceError` for a damaged one.
    Needs the ``safetensors`` package.
    """

    device = torch.device("cpu")
    stable_tensors = True  # each is read into memory of its own, or mapped

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        rename: Callable[[str], str] | None = None,
        include: Callable[[str], bool] | None = None,
    ) -> None:
        check_options(dtype=dtype, rename=rename, include=include)
        self._path = Path(path)
        self._files = _files(self._path)
        self._dtype = dtype
        self._rename = rename
        self._include = include
        self.casts = dtype is not None

    def __repr__(self) -> str:
        return f"<SafetensorsSource {str(self._path)!r}, {len(self._files)} files>"

    def manifest(self) -> Manifest:
        params: list[ParamMeta] = []
        seen: dict[str, Path] = {}
        for path, stored, name, file in self._walk():
            if name in seen:
                raise ValueError(f"{name!r} is in {seen[name].name} and in {path.name}")
            seen[name] = path
            view = file.get_slice(stored)
            dtype = _torch_dtype(stored, view.get_dtype())
            wanted = wire_dtype(torch.empty(0, dtype=dtype), self._dtype)
            params.append(ParamMeta(name=name, dtype=dtype_name(wanted), shape=tuple(view.get_shape())))
        return Manifest(params=tuple(params))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for _path, stored, name, file in self._walk():
            yield name, file.get_tensor(stored)

    def _walk(self) -> Iterator[tuple[Path, str, str, Any]]:
        """(file's path, stored name, name, open file), in the order of the bytes on disk."""
        for path, listed in self._files.items():
            with ExitStack() as stack:
                file = stack.enter_context(_open(path))
                stored_names: list[str] = list(file.offset_keys() if hasattr(file, "offset_keys") else file.keys())
                lacking = listed.difference(stored_names)
                if lacking:
                    raise SourceError(f"{path.name} lacks {min(lacking)!r}, which the index places there")
                for stored in stored_names:
                    if (not listed or stored in listed) and (self._include is None or self._include(stored)):
                        yield path, stored, stored if self._rename is None else self._rename(stored), file


def _open(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise SourceError("reading safetensors files needs the safetensors package: pip install safetensors") from error
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise SourceError(f"cannot read {path.name}: {error}") from error


def _files(path: Path) -> dict[Path, frozenset[str]]:
    """Each file with the names to read from it; no names means all of them."""
    index = path / _INDEX if path.is_dir() else path
    if index.name.endswith(".json"):
        if index.is_file():
            return _indexed(index)
    elif index.is_file():
        return {index: frozenset()}
    found = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if not found:
        raise ValueError(f"no safetensors checkpoint at {str(path)!r}")
    return {file: frozenset() for file in found}


def _indexed(index: Path) -> dict[Path, frozenset[str]]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{index.name} is not a checkpoint index: {error!r}") from error
    names: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        names.setdefault(file, set()).add(name)
    missing = [file for file in names if not (index.parent / file).is_file()]
    if missing:
        raise ValueError(f"{index.name} names {min(missing)!r}, which is not there")
    return {index.parent / file: frozenset(names[file]) for file in sorted(names)}


def _torch_dtype(name: str, stored: str) -> torch.dtype:
    dtype = getattr(torch, _DTYPES.get(stored, ""), None)
    if not isinstance(dtype, torch.dtype):
        raise SourceError(f"{name!r} is of type {stored}, which this torch cannot hold", param=name)
    return dtype
