"""From the buffers that were received to an engine's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from async_wsync.transfer.layout import Layout, Slot, _bytes_of, _carrier, _flat_view, _slices, _typed
from async_wsync.transfer.tensors import _is_plain, detached, dtype_name, torch_dtype
from async_wsync.types import ParamMeta

__all__ = ["ReceiveBuffers"]


class ReceiveBuffers:
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
