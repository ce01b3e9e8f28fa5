"""Which tensors a vLLM model takes, asked of the model itself by loading tensors without memory.

The model's own ``load_weights`` runs over meta tensors, with every weight loader replaced by one that counts what it
would copy. So names are mapped, fused, split over ranks and skipped exactly as in earnest. A tensor is

- unknown, where load_weights raises before any loader has it,
- mismatched, where a loader raises, or would copy another number of elements than it has (narrowing takes a part
  of a tensor that is too large without a word),
- unused, where no loader gets it,

and a parameter is missing where nothing, or not enough, would be copied into it.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import nn

from async_wsync.engines.rejection import Findings
from async_wsync.transfer.tensors import torch_dtype
from async_wsync.types import Manifest, ParamMeta

__all__ = ["inspect_manifest"]

_ROTARY = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
_RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"


@dataclass(eq=False)
class _Target:
    """A parameter in checkpoint format, and how many of its elements were given."""

    name: str
    tensor: torch.Tensor
    wanted: int
    storage: int | None
    given: int = 0
    names: set[str] = field(default_factory=set)
    given_by: dict[str, int] = field(default_factory=dict)


@dataclass
class _Trial:
    """What the counting loaders saw."""

    current: str = ""
    taken: dict[str, int] = field(default_factory=dict)
    dtypes: dict[str, tuple[str, str]] = field(default_factory=dict)

    def take(self, target: _Target, numel: int, loaded: torch.Tensor | None) -> None:
        target.given += numel
        target.names.add(self.current)
        target.given_by[self.current] = target.given_by.get(self.current, 0) + numel
        self.taken[self.current] = self.taken.get(self.current, 0) + numel
        if loaded is not None and loaded.dtype != target.tensor.dtype:
            self.dtypes[self.current] = (str(loaded.dtype)[6:], str(target.tensor.dtype)[6:])


def inspect_manifest(model: nn.Module, model_config: Any, manifest: Manifest, *, tp_size: int) -> Findings:
    """How ``model`` would take the manifest. The model is as before afterwards; needs vLLM's thread."""
    originals = {meta.name: meta for meta in manifest.params}
    metas = list(manifest.params)
    for alias, name in manifest.aliases:
        if (meta := originals.get(name)) is not None:
            metas.append(ParamMeta(name=alias, dtype=meta.dtype, shape=meta.shape))
    trial = _Trial()
    with _counting(model, model_config, trial) as targets:
        errors = _try_all(model, metas, trial, targets)
        missing = _missing(model, targets, {m.name for m in metas}, errors)
        sources = {**{m.name: m.name for m in metas}, **dict(manifest.aliases), **dict(manifest.tied)}
        clashes = _clashes(targets, sources)
    ignored = {m.name for m in metas if m.name not in trial.taken and _may_be_ignored(m.name, model_config)}
    unknown = [n for n in errors if n not in trial.taken and n not in ignored]
    unused = [m.name for m in metas if m.name not in {*trial.taken, *errors, *ignored}]
    mismatched = [f"{n}: {errors[n]}" for n in errors if n in trial.taken] + clashes
    mismatched += [
        f"{m.name}: sent {list(m.shape)}, {trial.taken[m.name]} of its {math.prod(m.shape)} elements would be used"
        for m in metas
        if m.name in trial.taken and m.name not in errors and not _fits(m, trial.taken[m.name], tp_size)
    ]
    notes = [f"vLLM ignores {name}" for name in sorted(ignored)]
    casts = {pair for name, pair in trial.dtypes.items() if name not in errors}
    notes += [f"vLLM casts {sent} to {own} while it loads" for sent, own in sorted(casts)]
    return Findings(
        unknown=tuple(unknown),
        unused=tuple(unused),
        missing=tuple(missing),
        mismatched=tuple(mismatched),
        notes=tuple(notes),
    )


def _fits(meta: ParamMeta, taken: int, tp_size: int) -> bool:
    """All of it on each rank, its share of it, or (heads fewer than ranks) a share that several ranks have."""
    numel = math.prod(meta.shape)
    if taken == numel:
        return True
    # Uneven shares (a vocabulary, say) may differ by less than a share; shards that are too large never come close.
    return tp_size > 1 and taken < numel <= taken * tp_size + numel // (4 * tp_size)


def _may_be_ignored(name: str, model_config: Any) -> bool:
    config = model_config.hf_config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    tied = bool(getattr(text, "tie_word_embeddings", False))
    return (tied and name.endswith("lm_head.weight")) or name.endswith(_ROTARY)


def _try_all(model: nn.Module, metas: list[ParamMeta], trial: _Trial, targets: list[_Target]) -> dict[str, str]:
    """Errors by name. All at once is fast; where that leaves questions, one by one tells which tensor it was."""
    try:
        _load(model, metas, trial)
    except Exception:
        pass
    else:
        if all(m.name in trial.taken for m in metas):
            return {}
    trial.taken.clear()
    trial.dtypes.clear()
    for target in targets:
        target.given = 0
        target.given_by.clear()
    errors: dict[str, str] = {}
    for meta in metas:
        try:
            _load(model, [meta], trial)
        except Exception as error:
            # A shape that a bare assert refuses comes without words.
            errors[meta.name] = f"sent {list(meta.shape)}: {str(error) or type(error).__name__}"
    return errors


def _load(model: nn.Module, metas: Iterable[ParamMeta], trial: _Trial) -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for meta in metas:
            trial.current = meta.name
            yield meta.name, torch.empty(meta.shape, dtype=torch_dtype(meta.dtype), device="meta")

    load_weights: Callable[[Any], Any] = model.load_weights  # type: ignore[assignment]
    load_weights(tensors())


def _clashes(targets: list[_Target], sources: Mapping[str, str]) -> list[str]:
    """Names that would each fill a whole matrix which another one fills too: tied here, and not in the update."""
    found: list[str] = []
    for target in targets:
        if target.tensor.dim() < 2:
            continue  # scales and the like may be given several times, for loaders that take the largest
        whole = [name for name, given in target.given_by.items() if given >= target.wanted > 0]
        found += [
            f"{name}: one parameter with {whole[0]!r} here ({target.name}), and the update sends both, not tied"
            for name in whole[1:]
            if sources.get(name) != sources.get(whole[0])
        ]
    return found


def _missing(model: nn.Module, targets: list[_Target], sent: set[str], errors: Mapping[str, str]) -> list[str]:
    # A tied parameter is one memory under two names; either is enough.
    covered = {t.storage for t in targets if t.given >= t.wanted}
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    names: list[str] = []
    for target in targets:
        if target.given >= target.wanted or (target.storage is not None and target.storage in covered):
            continue
        if not target.names.isdisjoint(errors):
            continue  # told as mismatched already
        module, _, leaf = target.name.rpartition(".")
        parent, _, last = module.rpartition(".")
        parts = [f"{parent}.{part}.{leaf}" for part in fused.get(last, ())]
        names += [part for part in parts if part not in sent] or [target.name]
    return names


# -------------------------------------------------------------------------------- counting loaders


@contextmanager
def _counting(model: nn.Module, model_config: Any, trial: _Trial) -> Iterator[list[_Target]]:
    """Within, ``model`` has meta parameters in checkpoint format, and loaders that only count."""
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        get_layerwise_info,
        initialize_layerwise_reload,
    )

    initialize_layerwise_reload(model)
    changed = _Changes()
    try:
        yield _replace_loaders(model, trial, get_layerwise_info, changed)
    finally:
        changed.undo()
        drop_half_loaded(model, model_config, finalize_layerwise_reload, get_layerwise_info)


class _Changes:
    """What was put in place of what."""

    def __init__(self) -> None:
        self._parameters: list[tuple[nn.Module, str, Any]] = []
        self._loaders: list[tuple[Any, Any]] = []

    def loader(self, tensor: Any, loader: Callable[..., Any]) -> None:
        self._loaders.append((tensor, getattr(tensor, "weight_loader", None)))
        tensor.weight_loader = loader

    def parameter(self, layer: nn.Module, name: str, tensor: Any) -> None:
        self._parameters.append((layer, name, layer._parameters[name]))
        layer._parameters[name] = tensor

    def undo(self) -> None:
        for tensor, loader in self._loaders:
            if loader is None:
                del tensor.weight_loader
            else:
                tensor.weight_loader = loader
        for layer, name, tensor in self._parameters:
            layer._parameters[name] = tensor


def drop_half_loaded(
    model: nn.Module, model_config: Any, finalize: Callable[..., Any], info_of: Callable[[nn.Module], Any]
) -> None:
    """End a reload; layers that are not wholly loaded get back the tensors they had."""
    for layer in model.modules():
        info = info_of(layer)
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights.clear()
    log = logging.getLogger(_RELOAD_LOGGER)
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of each layer that is not loaded, which is the point here
    try:
        finalize(model, model_config)
    finally:
        log.setLevel(level)


def _replace_loaders(
    model: nn.Module, trial: _Trial, info_of: Callable[[nn.Module], Any], changed: _Changes
) -> list[_Target]:
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor

    targets: dict[int, _Target] = {}
    for prefix, layer in model.named_modules():
        kernel: dict[str, torch.Tensor] = (info_of(layer).kernel_tensors or ({}, {}))[0]
        for name, tensor in list(layer._parameters.items()):
            if tensor is None or id(tensor) in targets:
                continue
            meta: Any = tensor
            if not tensor.is_meta:  # vLLM leaves biases where they are
                meta = to_meta_tensor(tensor)
                changed.parameter(layer, name, meta)
            target = _Target(
                name=f"{prefix}.{name}".lstrip("."),
                tensor=meta,
                wanted=_wanted(layer, meta),
                storage=_storage(kernel.get(name)),
            )
            targets[id(tensor)] = targets[id(meta)] = target
            loader = _unwrapped(getattr(meta, "weight_loader", None) or _default_loader())
            changed.loader(meta, _counter(target, loader, trial))
    return list(dict.fromkeys(targets.values()))


def _default_loader() -> Callable[..., Any]:
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    loader: Callable[..., Any] = default_weight_loader
    return loader


def _unwrapped(loader: Any) -> Callable[..., Any]:
    while getattr(loader, "__name__", "") == "online_process_loader":
        loader = loader.__wrapped__
    unwrapped: Callable[..., Any] = loader
    return unwrapped


def _wanted(layer: nn.Module, tensor: torch.Tensor) -> int:
    """Elements of ``tensor`` that a checkpoint fills; a vocabulary is padded with rows that it has not."""
    shard = getattr(layer, "shard_indices", None)
    if shard is not None and getattr(tensor, "output_dim", None) == 0 and tensor.shape[0]:
        rows = int(shard.org_vocab_end_index - shard.org_vocab_start_index)
        return rows * (tensor.numel() // tensor.shape[0])
    return int(getattr(tensor, "weight_loader_numel", tensor.numel()))


def _storage(tensor: torch.Tensor | None) -> int | None:
    if tensor is None or tensor.is_meta or not tensor.numel():
        return None
    return tensor.untyped_storage().data_ptr()


def _counter(target: _Target, loader: Callable[..., Any], trial: _Trial) -> Callable[..., Any]:
    from vllm.model_executor.model_loader.reload.meta import get_numel_loaded

    signature = inspect.signature(loader)

    @wraps(loader)
    def count(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = [v for v in bound.arguments.values() if isinstance(v, torch.Tensor) and v is not target.tensor]
        trial.take(target, 0, given[0] if given else None)  # it got this far, whatever comes of it
        numel, result = get_numel_loaded(loader, bound)
        trial.take(target, numel, None)
        return result

    return count
