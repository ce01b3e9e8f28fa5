"""An `UpdateSpec` on its way to an engine: as columns, in which a bucket names its tensors by their position.
And the checksums on their way back.

Pickled for our own processes, and as plain values, which JSON can carry, for vLLM's.
"""

from __future__ import annotations

import pickle
import threading
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import lru_cache
from typing import Any, NamedTuple

from async_wsync.runtime.threads import spawn, wait_for
from async_wsync.transfer.recall import recall
from async_wsync.types import Base, BucketSpec, Manifest, ParamMeta, UpdateSpec

__all__ = [
    "pack_checksums",
    "pack_update",
    "packed_update",
    "unpack_update",
    "unpacked_checksums",
    "update_from_json",
    "update_to_json",
]

_PIECE = 2048
_PACKED_INLINE_TENSORS = 256
_unpacking = threading.Lock()


class _Columns(NamedTuple):
    """A manifest and its buckets. ``buckets``: index, bytes and positions of each."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    aliases: Sequence[Sequence[str]]
    tied: Sequence[Sequence[str]]
    buckets: Sequence[tuple[int, int, Sequence[int]]]


def _to_columns(manifest: Manifest, buckets: Sequence[BucketSpec]) -> _Columns:
    """ValueError if a bucket has a tensor that the manifest has not."""
    params = manifest.params
    position = {meta.name: i for i, meta in enumerate(params)}
    placed = []
    for bucket in buckets:
        places = [position.get(meta.name, -1) for meta in bucket.params]
        if any(place < 0 or params[place] != meta for place, meta in zip(places, bucket.params, strict=True)):
            raise ValueError(f"bucket {bucket.index} has a tensor that the manifest has not")
        placed.append((bucket.index, bucket.nbytes, places))
    names, dtypes, shapes = [m.name for m in params], [m.dtype for m in params], [m.shape for m in params]
    return _Columns(names, dtypes, shapes, manifest.aliases, manifest.tied, placed)


def _from_columns(columns: _Columns) -> tuple[Manifest, tuple[BucketSpec, ...]]:
    described = zip(columns.names, columns.dtypes, map(tuple, columns.shapes), strict=True)
    params = tuple(ParamMeta(*fields) for fields in described)
    aliases, tied = (tuple((again, name) for again, name in pairs) for pairs in (columns.aliases, columns.tied))
    buckets = tuple(
        BucketSpec(index=index, params=tuple(params[place] for place in places), nbytes=nbytes)
        for index, nbytes, places in columns.buckets
    )
    return Manifest(params=params, aliases=aliases, tied=tied), buckets


def _head(update: UpdateSpec) -> dict[str, Any]:
    """All but the columns, as plain values."""
    base = None if update.base is None else asdict(update.base)
    facts = {name: getattr(update, name) for name in ("update_id", "version", "group", "strict")}
    return {**facts, "base": base}


def _spec(head: Mapping[str, Any], manifest: Manifest, buckets: tuple[BucketSpec, ...]) -> UpdateSpec:
    base = None if head["base"] is None else Base(**head["base"])
    return UpdateSpec(**{**head, "base": base}, manifest=manifest, buckets=buckets)


# -------------------------------------------------------------------------------- plain values


def update_to_json(update: UpdateSpec) -> dict[str, Any]:
    """Plain values for `json.dumps`. ValueError if a bucket has a tensor that the manifest has not."""
    return {**_head(update), "columns": _to_columns(update.manifest, update.buckets)._asdict()}


def update_from_json(fields: Mapping[str, Any]) -> UpdateSpec:
    """The spec that `update_to_json` made these values of."""
    head = {name: value for name, value in fields.items() if name != "columns"}
    return _spec(head, *_from_columns(_Columns(**fields["columns"])))


# -------------------------------------------------------------------------------- bytes


def pack_update(update: UpdateSpec) -> bytes:
    """The spec as bytes, small and cheap to pickle again.

    Measured with 16 000 tensors: pickling them one by one takes 100 ms in one piece, the columns 5 ms. Each piece of
    a column is pickled by itself, as no other thread runs meanwhile; and all is compressed, as it goes to each engine
    twice. ValueError if a bucket has a tensor that the manifest has not.
    """
    return _with_head(update, _packed_body(update.manifest, update.buckets).result())


async def packed_update(update: UpdateSpec) -> bytes:
    """`pack_update`, without holding up the event loop: one thread packs for all engines that ask meanwhile."""
    body = _packed_body(update.manifest, update.buckets)
    return _with_head(update, body.result() if body.done() else await wait_for(body))


def unpack_update(data: bytes) -> UpdateSpec:
    """The spec that `pack_update` packed."""
    head, body = pickle.loads(data)
    return _spec(head, *_unpack_body(body))


def _with_head(update: UpdateSpec, body: bytes) -> bytes:
    return pickle.dumps((_head(update), body), protocol=5)


@recall(4, lambda manifest, buckets: (id(manifest), id(buckets)))
def _packed_body(manifest: Manifest, buckets: Sequence[BucketSpec]) -> Future[bytes]:
    """Computed once for all engines of an update, and for further updates of the same tensors."""
    if len(manifest.params) > _PACKED_INLINE_TENSORS:
        return spawn(_pack_body, manifest, buckets, name="wsync-pack")
    body: Future[bytes] = Future()
    body.set_result(_pack_body(manifest, buckets))
    return body


def _pack_body(manifest: Manifest, buckets: Sequence[BucketSpec]) -> bytes:
    *columns, placed = _to_columns(manifest, buckets)
    packed = [(index, nbytes, _in_pieces(places)) for index, nbytes, places in placed]
    return zlib.compress(pickle.dumps((*map(_in_pieces, columns), packed), protocol=5), level=1)


@lru_cache(maxsize=2)
def _unpack_body(body: bytes) -> tuple[Manifest, tuple[BucketSpec, ...]]:
    """Kept, since one update after another sends the same tensors: the same bytes give the same objects."""
    *columns, packed = pickle.loads(zlib.decompress(body))
    names, dtypes, shapes, aliases, tied = map(_joined, columns)
    placed = [(index, nbytes, _joined(places)) for index, nbytes, places in packed]
    return _from_columns(_Columns(names, dtypes, shapes, aliases, tied, placed))


def _in_pieces(items: Sequence[Any]) -> list[bytes]:
    return [pickle.dumps(items[i : i + _PIECE], protocol=5) for i in range(0, len(items), _PIECE)]


def _joined(pieces: Sequence[bytes]) -> list[Any]:
    return [item for piece in pieces for item in pickle.loads(piece)]


# -------------------------------------------------------------------------------- checksums


def pack_checksums(checksums: Mapping[str, str]) -> list[bytes]:
    """Checksums by name, in pieces of which each is unpacked in about a millisecond."""
    return [*_in_pieces([*checksums]), *_in_pieces([*checksums.values()])]


async def unpacked_checksums(pieces: Sequence[bytes]) -> dict[str, str]:
    """The checksums that `pack_checksums` packed, without holding up the event loop: one engine's at a time."""
    return await wait_for(spawn(_unpack_checksums, pieces, name="wsync-unpack"))


def _unpack_checksums(pieces: Sequence[bytes]) -> dict[str, str]:
    with _unpacking:  # the more threads want the GIL, the longer the loop waits for it
        names, digests = _joined(pieces[: len(pieces) // 2]), _joined(pieces[len(pieces) // 2 :])
        return dict(zip(names, digests, strict=True))
