"""Names, shapes and dtypes of a Hugging Face checkpoint directory, from the headers of its safetensors files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CheckpointIndex", "read_index"]

_MAX_HEADER_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIndex:
    """``shapes`` by tensor name. ``ties_embeddings``: the model has no output layer of its own."""

    shapes: dict[str, tuple[int, ...]]
    ties_embeddings: bool


def read_index(path: str | Path) -> CheckpointIndex | None:
    """The index of the checkpoint at ``path``; None if none can be read. Reads headers only."""
    folder = Path(path)
    try:
        files = sorted(folder.glob("*.safetensors"))
        shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            shapes.update(_header(file))
        listed = _listed(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if listed is not None:
        # Folders may hold more files than the checkpoint (adapters, consolidated copies).
        shapes = {name: shape for name, shape in shapes.items() if name in listed}
    return CheckpointIndex(shapes=shapes, ties_embeddings=_ties(folder)) if shapes else None


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    # safetensors: 8 bytes of header length (little endian), then the header as JSON.
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= _MAX_HEADER_BYTES:
            raise ValueError(f"{file} is not a safetensors file")
        header: dict[str, Any] = json.loads(stream.read(length))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def _listed(folder: Path) -> frozenset[str] | None:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return None
    return frozenset(json.loads(index.read_text())["weight_map"])


def _ties(folder: Path) -> bool:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    inner = config.get("text_config") or {}
    return bool(config.get("tie_word_embeddings", inner.get("tie_word_embeddings", False)))
