"""An engine's own tensors: their names, whether a manifest fits them, and landing a bucket in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import nn

from async_wsync.engines.rejection import rejection
from async_wsync.transfer.layout import lay_out
from async_wsync.transfer.module_state import module_state
from async_wsync.transfer.tensors import detached, dtype_name
from async_wsync.transfer.unpack import ReceiveBuffers
from async_wsync.types import BucketSpec, Manifest, ParamMeta, WireFormat

__all__ = ["Model", "ReceivedBucket", "check_manifest", "covered", "model_device", "named_targets"]

Model = nn.Module | Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]]
"""A module, its tensors by name, or a function that returns them."""


def named_targets(model: Model) -> dict[str, torch.Tensor]:
    """The engine's tensors by name, tied ones under each of their names; a wrapped module's (compiled, say) under the
    plain model's. Looked up anew for each update, so that a
    model may be moved or have its parameters replaced in between."""
    if isinstance(model, nn.Module):
        named: Mapping[str, object] = module_state(model)
    else:
        named = model() if callable(model) else model
    return {name: detached(tensor) for name, tensor in named.items() if isinstance(tensor, torch.Tensor)}


def model_device(model: Model) -> torch.device:
    """Where the model's first tensor is."""
    if isinstance(model, nn.Module):
        tensors: Iterable[object] = chain(model.parameters(), model.buffers())
    else:
        tensors = (model() if callable(model) else model).values()
    return next((tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)), torch.device("cpu"))


def check_manifest(manifest: Manifest, targets: Mapping[str, torch.Tensor], *, strict: bool) -> tuple[str, ...]:
    """`EngineRejected`, with complete lists, unless each tensor sent has a target of its dtype and shape, and memory
    that no other tensor is sent into.

    ``strict``: each target must be sent, too; one that shares its storage with a target that is sent counts.
    Returns the names of the targets that are left out.
    """
    metas = {meta.name: meta for meta in manifest.params}
    sent = [*metas, *(alias for alias, _ in manifest.aliases)]
    originals = {**{name: name for name in metas}, **dict(manifest.aliases)}
    sources = {**originals, **dict(manifest.tied)}
    unknown = [name for name in sent if name not in targets]
    mismatched = []
    for name in sent:
        meta, target = metas.get(originals[name]), targets.get(name)
        if meta is None:
            mismatched.append(f"{name}: an alias of {originals[name]!r}, which is not sent")
        elif target is not None and (why := _mismatch(meta, target)):
            mismatched.append(f"{name}: {why}")
    mismatched += [f"{alias}: sent, and named as an alias" for alias, _ in manifest.aliases if alias in metas]
    for name, other in _same_memory({name: targets[name] for name in sent if name in targets}):
        if sources[name] != sources[other]:
            mismatched.append(f"{name}: one memory with {other!r} here, and the update sends both, not tied")
    missing = _missing(set(sent), targets)
    if unknown or mismatched or (strict and missing):
        raise rejection(unknown=unknown, missing=missing if strict else [], mismatched=mismatched, known=targets.keys())
    return tuple(missing)


def _mismatch(meta: ParamMeta, target: torch.Tensor) -> str | None:
    if target.shape != meta.shape or dtype_name(target.dtype) != meta.dtype:
        return f"sent {meta.dtype} {list(meta.shape)}, here {dtype_name(target.dtype)} {list(target.shape)}"
    return "a meta tensor here, it can hold no weights" if target.device.type == "meta" else None


def covered(sent: set[str], targets: Mapping[str, torch.Tensor]) -> set[str]:
    """``sent``, and the targets that have their memory under other names."""
    return sent | (targets.keys() - _missing(sent, targets))


def _missing(sent: set[str], targets: Mapping[str, torch.Tensor]) -> list[str]:
    """Targets that nothing is sent for, not even under another name of the same memory."""
    unsent = [name for name in targets if name not in sent]
    if not unsent:
        return []
    covered = {_place(targets[name]) for name in sent if name in targets and targets[name].numel()}
    return [name for name in unsent if _place(targets[name]) not in covered]


def _same_memory(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Pairs of names that have an element in common. Views that only interleave have none.

    Asked for tens of thousands of tensors, of which hardly any overlap: the usual case is a sort and a comparison.
    """
    starts = sorted(
        (start, name) for name, tensor in tensors.items() if (start := tensor.data_ptr()) and tensor.numel()
    )
    last, last_start = "", 0
    furthest, end = "", 0  # of those so far, and where it ends
    for start, name in starts:
        tensor = tensors[name]
        dense = tensor.is_contiguous()
        if start == last_start:
            other = last  # views that interleave have starts of their own
        else:
            other = furthest if start < end and dense and tensors[furthest].is_contiguous() else ""
        if other and tensors[other].device == tensor.device:
            yield name, other
        last, last_start = name, start
        reach = start + (tensor.nbytes if dense else _extent(tensor))
        if reach > end:
            furthest, end = name, reach


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class ReceivedBucket:
    """One bucket on its way into the targets: receive into ``buffers``, in order, then `apply`.

    ``device``: where the group's backend can receive. Targets elsewhere are received into scratch memory first.
    ``in_place``: the names whose own memory is received into, so that they change before `apply`.
    """

    def __init__(
        self,
        bucket: BucketSpec,
        targets: Mapping[str, torch.Tensor],
        aliases: Sequence[tuple[str, str]],
        *,
        device: torch.device,
    ) -> None:
        layout = lay_out(bucket, WireFormat.PACKED)
        names = {meta.name for meta in bucket.params}
        self._landing = ReceiveBuffers(layout, targets, device=device)
        self._copies = [(targets[alias], targets[name]) for alias, name in aliases if name in names]
        self.names = [*names, *(alias for alias, name in aliases if name in names)]
        self.buffers = self._landing.buffers
        mine = {buffer.untyped_storage().data_ptr() for buffer in self.buffers if buffer.numel()}
        self.in_place = [meta.name for meta in layout.direct if targets[meta.name].untyped_storage().data_ptr() in mine]
        self._cuda = {t.device for t in (targets[name] for name in names) if t.device.type == "cuda"}

    def apply(self) -> None:
        """Move what landed outside of the targets into them, and into their aliases; returns when it is there."""
        self._landing.apply()
        with torch.inference_mode():
            for alias, original in self._copies:
                if _place(alias) != _place(original):
                    alias.copy_(original)
        for device in self._cuda:
            torch.cuda.current_stream(device).synchronize()
