"""The names of a module's tensors, whatever it is wrapped in."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["gathers_its_state", "module_state"]

# Where torch.compile, FSDP's first version and activation checkpointing hold the module that they wrap.
_FSDP = "_fsdp_wrapped_module"
_INNER = ("_orig_mod", _FSDP, "_checkpoint_wrapped_module")
_DATA_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_MARKS = ("_orig_mod.", "module.")  # every wrapped tensor's name has one of them


def module_state(model: nn.Module) -> dict[str, Any]:
    """``state_dict(keep_vars=True)``: the live tensors, and what else modules put there, under the plain model's names.

    The plain model is what ``model`` and its submodules are without torch.compile, DDP, DataParallel, FSDP's first
    version and activation checkpointing, in any order and depth.
    """
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    if not any(mark in name for name in state for mark in _MARKS):
        return state
    plain_of: dict[str, str] = {}
    named: dict[str, Any] = {}
    for name, value in state.items():
        prefix, dot, leaf = name.rpartition(".")
        if prefix not in plain_of:
            plain_of[prefix] = _plain(model, prefix)
        plain = f"{plain_of[prefix]}{dot if plain_of[prefix] else ''}{leaf}"
        if plain in named:
            raise ValueError(f"without its wrappers, {name!r} has the name {plain!r}, which another tensor has")
        named[plain] = value
    return named


def gathers_its_state(model: nn.Module) -> bool:
    """True if ``state_dict`` itself is a collective, as it is with FSDP's first version."""
    return any(_FSDP in module._modules for module in model.modules())


def _plain(model: nn.Module, path: str) -> str:
    """The path of a submodule, without the names under which wrappers hold what they wrap."""
    kept: list[str] = []
    module: nn.Module | None = model
    for segment in path.split("."):
        inner = _inner_name(module)
        while inner is not None and inner != segment:  # the wrapper's own hook has taken its name off already
            assert module is not None
            module = module._modules[inner]
            inner = _inner_name(module)
        if inner is None:
            kept.append(segment)
        module = None if module is None else module._modules.get(segment)
    return ".".join(kept)


def _inner_name(module: nn.Module | None) -> str | None:
    if module is None:
        return None
    if isinstance(module, _DATA_PARALLEL):
        return "module"
    return next((name for name in _INNER if name in module._modules), None)
