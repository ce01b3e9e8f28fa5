"""How the tensors of one bucket lie in its byte buffers.

Both ends derive the same `Layout` from a `BucketSpec`, so that no offset ever travels. A bucket's bytes
lie in one flat buffer, tensors of wide types first: every offset is then a multiple of its item size
without padding, and tensors of one dtype are neighbours. That lets one ``torch.cat`` fill and one
``torch.split_with_sizes_copy`` empty hundreds of tensors, with the GIL released. Large tensors skip the
flat buffer: they are sent from their own storage and received into the parameter's own.

All wire tensors are one-dimensional uint8: gloo refuses float8 and uint16, and takes bytes of anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from async_wsync.transfer.recall import recall
from async_wsync.transfer.tensors import _itemsize, param_nbytes, torch_dtype
from async_wsync.types import BucketSpec, ParamMeta, WireFormat

__all__ = ["DIRECT_BYTES", "Layout", "Slot", "lay_out"]


# One source and two receivers over gloo on 2 cores (torch 2.13, 32 MB in tensors of one size), time of direct
# over packed: 3.0 at 64 KiB, 1.8 at 128 KiB, 0.99 at 256 KiB, 0.67 at 512 KiB, 0.44 at 1 MiB. A collective costs
# 0.6 ms whatever its size; packing and unpacking cost about 1 ms a MB more than the wire.
DIRECT_BYTES = 256 * 1024
"""From this size on a tensor goes from storage to storage, with a collective of its own."""


# A slice is what one call into torch packs or unpacks. One call with 8 000 views holds the GIL for up to
# 90 ms (building and freeing the argument lists); 256 views and 4 MB stay near 1 ms and cost nothing.
_SLICE_TENSORS = 256


_SLICE_BYTES = 4 * 1024 * 1024


class Slot(NamedTuple):
    """A tensor's place in the flat buffer, in bytes. A tuple, as a bucket may have thousands."""

    meta: ParamMeta
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A bucket on the wire: the flat buffer (when ``flat_nbytes`` > 0), then one buffer for each of ``direct``."""

    bucket: BucketSpec
    wire: WireFormat
    flat: tuple[Slot, ...]
    flat_nbytes: int
    direct: tuple[ParamMeta, ...]

    @property
    def params(self) -> tuple[ParamMeta, ...]:
        """All tensors in the order of their bytes, which engines that lay out for themselves must be told."""
        return (*(slot.meta for slot in self.flat), *self.direct)

    @property
    def buffer_sizes(self) -> tuple[int, ...]:
        """Bytes of each wire tensor, in order."""
        head = (self.flat_nbytes,) if self.flat_nbytes else ()
        return (*head, *map(param_nbytes, self.direct))


@recall(16, lambda bucket, wire: (id(bucket), wire))
def lay_out(bucket: BucketSpec, wire: WireFormat) -> Layout:
    """Where each of a bucket's bytes lies; the same on both ends, as it depends on nothing else.

    PACKED: small tensors flat, large ones (`DIRECT_BYTES`) direct; an empty tensor takes a slot but no bytes.
    FLATTENED: all flat, in the order of ``params`` (a single tensor is its own flat buffer, hence direct).
    PER_TENSOR: all direct, in the bucket's order, empty tensors included.
    """
    if wire is WireFormat.PER_TENSOR or (wire is WireFormat.FLATTENED and len(bucket.params) == 1):
        return Layout(bucket=bucket, wire=wire, flat=(), flat_nbytes=0, direct=bucket.params)
    limit = DIRECT_BYTES if wire is WireFormat.PACKED else math.inf
    direct = tuple(meta for meta in bucket.params if param_nbytes(meta) >= limit)
    small = [meta for meta in bucket.params if param_nbytes(meta) < limit]
    rank = {dtype: (-_itemsize(dtype), dtype) for dtype in {meta.dtype for meta in small}}
    if len(rank) > 1:
        small.sort(key=lambda meta: rank[meta.dtype])
    slots: list[Slot] = []
    total = 0
    for meta in small:
        nbytes = param_nbytes(meta)
        slots.append(Slot(meta, total, nbytes))
        total += nbytes
    return Layout(bucket=bucket, wire=wire, flat=tuple(slots), flat_nbytes=total, direct=direct)


def _slices(slots: Sequence[tuple[Slot, torch.Tensor]]) -> Iterator[Sequence[tuple[Slot, torch.Tensor]]]:
    """Cut into runs that one call may handle: neighbours in the flat buffer, of one dtype, neither many nor large."""
    start = size = 0
    end, dtype = -1, ""
    for i, ((meta, offset, nbytes), _) in enumerate(slots):
        apart = offset != end or meta.dtype != dtype
        if i > start and (apart or i - start >= _SLICE_TENSORS or size + nbytes > _SLICE_BYTES):
            yield slots[start:i]
            start, size = i, 0
        size += nbytes
        end, dtype = offset + nbytes, meta.dtype
    if start < len(slots):
        yield slots[start:]


# Not every torch can cat float8, float4 or bits: any type of the same width carries them as well.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


_CARRY_THEMSELVES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def _carrier(run: Sequence[tuple[Slot, torch.Tensor]]) -> torch.dtype:
    dtype = torch_dtype(run[0][0].meta.dtype)
    return dtype if dtype in _CARRY_THEMSELVES else _CARRIERS[dtype.itemsize]


def _typed(flat: torch.Tensor, run: Sequence[tuple[Slot, torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
    first, last = run[0][0], run[-1][0]
    return flat[first.offset : last.offset + last.nbytes].view(dtype)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's own storage as uint8, shape (nbytes,)."""
    return _flat_view(tensor.detach(), torch.uint8)


def _flat_view(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Not view(-1): a lone element may be "contiguous" with a stride of 2, which then cannot be seen as bytes.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat if flat.dtype is dtype else flat.view(dtype)
