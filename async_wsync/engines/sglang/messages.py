"""The bodies of SGLang's weight update calls, and its words for our pause modes. Nothing here sends anything.

Field names are those of ``sglang.srt.managers.io_struct`` (tried with 0.5.23), compared with it by
``tests/engines/sglang/test_contract.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from async_wsync.transfer.layout import lay_out
from async_wsync.types import BucketSpec, GroupSpec, PauseMode, WireFormat

__all__ = [
    "PAUSE_WORDS",
    "Selector",
    "announce",
    "begin",
    "checksum",
    "destroy_group",
    "init_group",
    "load_lora",
    "no_pause",
    "pause",
    "sample",
    "set_version",
    "shape_of",
    "unload_lora",
    "version_number",
]

Selector = Literal["all", "target", "draft"]

#: SGLang has no word for draining: nothing in its API lets requests end while it takes no new ones.
PAUSE_WORDS: Mapping[PauseMode, str] = {
    PauseMode.ABORT: "abort",
    PauseMode.RECOMPUTE: "retract",
    PauseMode.KEEP: "in_place",
}


def no_pause(mode: PauseMode) -> str | None:
    """Why SGLang can't pause in this mode; None where it can."""
    if mode in PAUSE_WORDS:
        return None
    return (
        f"SGLang has no pause mode {mode.value!r} (it has abort, retract and in_place): use one of "
        f"{', '.join(m.value for m in PAUSE_WORDS)}; to drain, send it no new requests and wait before you update"
    )


def pause(mode: PauseMode) -> dict[str, Any]:
    return {"mode": PAUSE_WORDS[mode]}


def init_group(group: GroupSpec, rank_offset: int) -> dict[str, Any]:
    # An empty name would kill the server: it asserts outside of its own error handling.
    assert group.name, "a group has a name"
    return {
        "master_address": group.master_address,
        "master_port": group.master_port,
        "rank_offset": rank_offset,
        "world_size": group.world_size,
        "group_name": group.name,
        "backend": group.backend,
    }


def destroy_group(name: str) -> dict[str, Any]:
    return {"group_name": name}


def begin(selector: Selector) -> dict[str, Any]:
    return {"selector": selector}


def announce(bucket: BucketSpec, group: str, *, wire: WireFormat, selector: Selector) -> dict[str, Any]:
    """The announcement of one bucket.

    The engine reads the bytes in the order of this list, so it has the layout's order. No ``weight_version``: the
    engine would count the version as its own from the first bucket on. No flush: one follows the pause, not each
    bucket, and a refused one would turn a bucket that was loaded into an error.
    """
    params = lay_out(bucket, wire).params
    payload: dict[str, Any] = {
        "names": [meta.name for meta in params],
        "dtypes": [meta.dtype for meta in params],
        "shapes": [list(meta.shape) for meta in params],
        "group_name": group,
        "flush_cache": False,
        "abort_all_requests": False,
        "selector": selector,
    }
    if wire is WireFormat.FLATTENED:
        payload["load_format"] = "flattened_bucket"
    # The engine zips the lists, and silently drops what is too long.
    assert len(payload["names"]) == len(payload["dtypes"]) == len(payload["shapes"]) == len(bucket.params) > 0
    return payload


def set_version(version: int) -> dict[str, Any]:
    # The default would abort every request, paused ones included.
    return {"new_version": str(version), "abort_all_requests": False}


def sample(name: str, rows: int) -> dict[str, Any]:
    return {"name": name, "truncate_size": rows}


def checksum() -> dict[str, Any]:
    return {"action": "checksum"}


def load_lora(adapter: str, packed: str, config: Mapping[str, Any], *, num_ranks: int, pinned: bool) -> dict[str, Any]:
    """``packed``: the tensors, pickled, in base64."""
    return {
        "lora_name": adapter,
        "config_dict": dict(config),
        "serialized_named_tensors": [packed] * num_ranks,
        "pinned": pinned,
    }


def unload_lora(adapter: str) -> dict[str, Any]:
    return {"lora_name": adapter}


def version_number(text: Any) -> int | None:
    """The version an engine says it has, if we gave it ("default" is what it says before)."""
    try:
        return int(str(text))
    except ValueError:
        return None


def shape_of(rows: Any) -> tuple[int, ...]:
    """The shape of nested lists of numbers."""
    shape: list[int] = []
    while isinstance(rows, Sequence) and not isinstance(rows, str):
        shape.append(len(rows))
        if not rows:
            break
        rows = rows[0]
    return tuple(shape)
