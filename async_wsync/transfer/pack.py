"""From a source's tensors to the buffers that are sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from async_wsync.transfer.layout import (
    _CARRY_THEMSELVES,
    _SLICE_BYTES,
    _SLICE_TENSORS,
    Layout,
    Slot,
    _bytes_of,
    _carrier,
    _flat_view,
    _slices,
    _typed,
)
from async_wsync.transfer.tensors import _is_plain, torch_dtype
from async_wsync.types import ParamMeta

__all__ = ["Stager", "own_copy", "stage"]


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
