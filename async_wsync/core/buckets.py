"""Buckets: how tensors become a few byte buffers, and parameters again.

Both ends derive the same `Layout` from a `BucketSpec`, so that no offset ever travels. A bucket's bytes
lie in one flat buffer, tensors of wide types first: every offset is then a multiple of its item size
without padding, and tensors of one dtype are neighbours. That lets one ``torch.cat`` fill and one
``torch.split_with_sizes_copy`` empty hundreds of tensors, with the GIL released. Large tensors skip the
flat buffer: they are sent from their own storage and received into the parameter's own.

All wire tensors are one-dimensional uint8: gloo refuses float8 and uint16, and takes bytes of anything.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from async_wsync.core.recall import recall
from async_wsync.types import BucketSpec, Manifest, ParamMeta, WireFormat

__all__ = [
    "DIRECT_BYTES",
    "Landing",
    "Layout",
    "Slot",
    "Stager",
    "detached",
    "dtype_name",
    "lay_out",
    "own_copy",
    "param_meta",
    "param_nbytes",
    "plan_buckets",
    "stage",
    "torch_dtype",
]

# One source and two receivers over gloo on 2 cores (torch 2.13, 32 MB in tensors of one size), time of direct
# over packed: 3.0 at 64 KiB, 1.8 at 128 KiB, 0.99 at 256 KiB, 0.67 at 512 KiB, 0.44 at 1 MiB. A collective costs
# 0.6 ms whatever its size; packing and unpacking cost about 1 ms a MB more than the wire.
DIRECT_BYTES = 256 * 1024
"""From this size on a tensor goes from storage to storage, with a collective of its own."""

# A slice is what one call into torch packs or unpacks. One call with 8 000 views holds the GIL for up to
# 90 ms (building and freeing the argument lists); 256 views and 4 MB stay near 1 ms and cost nothing.
_SLICE_TENSORS = 256
_SLICE_BYTES = 4 * 1024 * 1024


@cache
def torch_dtype(name: str) -> torch.dtype:
    """The dtype that ``name`` ("bfloat16") stands for; ValueError if this torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return dtype


@cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def param_meta(name: str, tensor: torch.Tensor, *, dtype: torch.dtype | None = None) -> ParamMeta:
    """The meta of ``tensor`` as it travels, cast to ``dtype`` if given."""
    return ParamMeta(name=name, dtype=dtype_name(dtype or tensor.dtype), shape=_shape(tensor.shape))


@lru_cache(maxsize=4096)
def _shape(size: torch.Size) -> tuple[int, ...]:
    """One object for all tensors of this shape: a model has thousands of tensors and few shapes."""
    return tuple(size)


@cache
def _itemsize(dtype: str) -> int:
    return torch_dtype(dtype).itemsize


def param_nbytes(meta: ParamMeta) -> int:
    return math.prod(meta.shape) * _itemsize(meta.dtype)


# -------------------------------------------------------------------------------- planning


@recall(4, lambda manifest, *, bucket_bytes, atomic_groups=(): (id(manifest), bucket_bytes, tuple(atomic_groups)))
def plan_buckets(manifest: Manifest, *, bucket_bytes: int, atomic_groups: Sequence[str] = ()) -> tuple[BucketSpec, ...]:
    """Cut the manifest, in its order, into buckets of at most ``bucket_bytes``.

    A tensor larger than that gets a bucket of its own. ``atomic_groups`` are regular expressions that match
    whole names; names that match one pattern with equal captures stay in one bucket, together with all
    that stands between them: ``r"(.*)\\.weight(?:_scale)?"`` keeps each weight with its scale.
    An empty manifest needs no bucket. The same manifest gets the same buckets again, as objects too.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be above 0, got {bucket_bytes!r}")
    buckets: list[BucketSpec] = []
    pending: list[ParamMeta] = []
    size = 0

    def close() -> None:
        nonlocal pending, size
        if pending:
            buckets.append(BucketSpec(index=len(buckets), params=tuple(pending), nbytes=size))
        pending, size = [], 0

    for unit in _units(manifest.params, atomic_groups) if atomic_groups else zip(manifest.params, strict=True):
        nbytes = sum(map(param_nbytes, unit))
        if nbytes and size + nbytes > bucket_bytes:
            close()
        pending.extend(unit)
        size += nbytes
    close()
    return tuple(buckets)


def _units(params: Sequence[ParamMeta], patterns: Sequence[str]) -> Iterator[Sequence[ParamMeta]]:
    """Runs of params that must not be cut; most are a single one."""
    try:
        compiled = [re.compile(pattern) for pattern in patterns]
    except re.error as error:
        raise ValueError(f"bad pattern in atomic_groups: {error}") from error
    last_of: dict[object, int] = {}
    keys: list[list[object]] = []
    for index, meta in enumerate(params):
        matches = ((number, pattern.fullmatch(meta.name)) for number, pattern in enumerate(compiled))
        keys.append([(number, match.groups()) for number, match in matches if match])
        last_of.update((key, index) for key in keys[-1])
    start, end = 0, 0
    for index in range(len(params)):
        end = max([end, index, *(last_of[key] for key in keys[index])])
        if index == end:
            yield params[start : index + 1]
            start = index + 1


# -------------------------------------------------------------------------------- layout


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


# -------------------------------------------------------------------------------- sending


def _plain(meta: ParamMeta, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` itself if its storage already is what travels, else a copy that is."""
    dtype = torch_dtype(meta.dtype)
    if tensor.dtype is dtype and tensor.device == device and _is_plain(tensor):
        return tensor
    plain = tensor.detach().to(device=device, dtype=dtype)
    return plain.resolve_conj().resolve_neg().contiguous()


def own_copy(meta: ParamMeta, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """What travels of ``tensor``, in storage of its own, so that ``tensor`` may be overwritten."""
    plain = _plain(meta, tensor, device)
    return plain.detach().clone() if plain is tensor else plain


class Stager:
    """Turns a bucket's tensors, given one by one in any order, into its wire tensors.

    Small tensors are copied into the flat buffer a slice at a time, so a lazily made tensor (gathered, cast,
    read from disk) lives no longer than its slice. With tensors on CUDA the copies are enqueued on the
    calling thread's current stream; wire tensors on the CPU are complete when `finish` returns.
    """

    def __init__(self, layout: Layout, *, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        self._device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        self._slots = {slot.meta.name: slot for slot in layout.flat}
        self._direct: dict[str, torch.Tensor | None] = {meta.name: None for meta in layout.direct}
        self._metas = {meta.name: meta for meta in layout.params}
        self._pending: list[tuple[Slot, torch.Tensor]] = []
        self._pending_bytes = 0
        self._num_added = 0
        self._flat: torch.Tensor | None = None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """ValueError for a name that the bucket has not, or another shape than its meta says."""
        meta = self._metas.get(name)
        if meta is None or tensor.shape != meta.shape:
            raise ValueError(f"bucket {self.layout.bucket.index} has no {name!r} of shape {tuple(tensor.shape)}")
        self._num_added += 1
        if name in self._direct:
            self._direct[name] = _bytes_of(_plain(meta, tensor, self._device))
            return
        slot = self._slots[name]
        self._pending.append((slot, tensor))
        self._pending_bytes += slot.nbytes
        if len(self._pending) >= _SLICE_TENSORS or self._pending_bytes >= _SLICE_BYTES:
            self._flush()

    def finish(self) -> list[torch.Tensor]:
        """The wire tensors, uint8 of one dimension, in the layout's order; ValueError if a tensor was never added."""
        if self._num_added != len(self._metas):
            raise ValueError(f"{self._num_added} of {len(self._metas)} tensors of bucket {self.layout.bucket.index}")
        self._flush()
        direct = [tensor for tensor in self._direct.values() if tensor is not None]
        return direct if self._flat is None else [self._flat, *direct]

    @torch.no_grad()
    def _flush(self) -> None:
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        if not self.layout.flat_nbytes:
            return
        if self._flat is None:
            self._flat = torch.empty(self.layout.flat_nbytes, dtype=torch.uint8, device=self._device)
        pending.sort(key=lambda item: item[0].offset)
        for run in _slices(pending):
            carrier = _carrier(run)
            parts = [self._part(slot.meta, tensor, carrier) for slot, tensor in run]
            torch.cat(parts, out=_typed(self._flat, run, carrier))

    def _part(self, meta: ParamMeta, tensor: torch.Tensor, carrier: torch.dtype) -> torch.Tensor:
        """``tensor`` as one row of ``carrier``."""
        if tensor.dtype is carrier and carrier in _CARRY_THEMSELVES and tensor.device == self._device:
            return tensor.reshape(-1)  # whatever its strides: cat reads values
        return _flat_view(_plain(meta, tensor, self._device), carrier)


def stage(
    layout: Layout,
    tensors: Mapping[str, torch.Tensor] | Sequence[torch.Tensor],
    *,
    device: torch.device | str = "cpu",
) -> list[torch.Tensor]:
    """A bucket's wire tensors at once. A sequence gives the tensors in the order of ``layout.bucket.params``.

    A direct tensor that is contiguous, of the right dtype and on ``device`` is not copied: the wire tensor is
    a view of its storage.
    """
    stager = Stager(layout, device=device)
    params = layout.bucket.params
    if not isinstance(tensors, Mapping):
        tensors = dict(zip((meta.name for meta in params), tensors, strict=True))
    for meta in params:
        if meta.name not in tensors:
            raise ValueError(f"bucket {layout.bucket.index} lacks {meta.name!r}")
        stager.add(meta.name, tensors[meta.name])
    return stager.finish()


# -------------------------------------------------------------------------------- receiving


class Landing:
    """Where a bucket arrives: receive into ``buffers``, in order, then `apply`.

    A direct, contiguous target is received into its own storage. Everything else lands in a scratch buffer
    first. Targets may be parameters that require grad, and inference tensors. ValueError if a
    target is missing, or differs from its meta in shape or dtype: gloo would write garbage without a word.
    """

    def __init__(
        self, layout: Layout, targets: Mapping[str, torch.Tensor], *, device: torch.device | str | None = None
    ) -> None:
        self.layout = layout
        for meta in layout.params:
            _check_target(meta, targets.get(meta.name))
        self._flat = [(slot, detached(targets[slot.meta.name])) for slot in layout.flat]
        direct = [targets[meta.name].detach() for meta in layout.direct]
        first = next((target.device for target in [*direct, *(t for _, t in self._flat)]), "cpu")
        where = torch.empty(0, device=device or first).device  # "cuda" becomes "cuda:0"
        self.buffers: list[torch.Tensor] = []
        if layout.flat_nbytes:
            self.buffers.append(torch.empty(layout.flat_nbytes, dtype=torch.uint8, device=where))
        self._scratch: list[tuple[torch.Tensor, torch.Tensor]] = []
        for target in direct:
            landing = target
            if not _is_plain(target) or target.device != where:
                landing = torch.empty(target.shape, dtype=target.dtype, device=where)
                self._scratch.append((target, landing))
            self.buffers.append(_bytes_of(landing))

    def apply(self) -> None:
        """Move what landed outside of the targets into them. Call once, after all buffers are filled."""
        # Inference tensors may be written in inference mode only, and other tensors may be, too.
        with torch.inference_mode():
            for target, landing in self._scratch:
                target.copy_(landing)
            if self.layout.flat_nbytes:
                for run in _slices(self._flat):
                    _unpack(self.buffers[0], run)
        self._scratch, self._flat, self.buffers = [], [], []


def _check_target(meta: ParamMeta, target: torch.Tensor | None) -> None:
    if target is None:
        raise ValueError(f"no target for {meta.name!r}")
    if target.shape != meta.shape or dtype_name(target.dtype) != meta.dtype:
        raise ValueError(
            f"{meta.name!r} is {dtype_name(target.dtype)} {tuple(target.shape)} here, "
            f"and {meta.dtype} {meta.shape} in the bucket"
        )


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Without grad; itself where it has none, since thousands of views cost milliseconds."""
    return tensor.detach() if tensor.requires_grad else tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    # A conjugate or negated view may be contiguous, but its storage holds other values.
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _unpack(flat: torch.Tensor, run: Sequence[tuple[Slot, torch.Tensor]]) -> None:
    sizes = [target.numel() for _, target in run]
    if all(_is_plain(target) and target.device == flat.device for _, target in run):
        carrier = _carrier(run)
        outs = [_flat_view(target, carrier) for _, target in run]
        torch.split_with_sizes_copy(_typed(flat, run, carrier), sizes, out=outs)
        return
    parts = torch.split_with_sizes(_typed(flat, run, torch_dtype(run[0][0].meta.dtype)), sizes)
    for (_, target), part in zip(run, parts, strict=True):
        target.copy_(part.view(target.shape))
