"""Sources over tensors that exist already: a module, a mapping, master weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch

from async_wsync import arguments
from async_wsync.sources.tensors import check_options, describe, gathered, is_sharded, selected
from async_wsync.transfer.module_state import gathers_its_state, module_state
from async_wsync.transfer.tensors import dtype_name
from async_wsync.types import Manifest

__all__ = ["MasterWeightSource", "ModuleSource", "StateDictSource"]


class StateDictSource:
    """Tensors of a mapping, in its order, read when they are sent: change none of them until the update is over.

    A mapping that is no dict may make its tensors when they are asked for, one after another in the same memory. So
    they are copied, and none is taken for tied.

    ``dtype``: cast floating point tensors (of 16 bits and more) to it while they are packed, without a second
    copy of the model. ``tied``: send tensors that share their memory "once" (default; the engine
    fills the other names) or "each". ``rename`` turns the trainer's names into the engine's; ``include`` is asked,
    with the trainer's name, which to send.

    A DTensor (FSDP2, tensor parallel) is gathered just before it is packed, one at a time. That is a collective:
    every other rank of its mesh must run `participate` on the same tensors meanwhile.
    """

    def __init__(
        self,
        mapping: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype | None = None,
        tied: Literal["once", "each"] = "once",
        rename: Callable[[str], str] | None = None,
        include: Callable[[str], bool] | None = None,
    ) -> None:
        arguments.one_of("tied", tied, ("once", "each"))
        arguments.kind("mapping", mapping, Mapping)
        check_options(dtype=dtype, rename=rename, include=include)
        self._mapping = mapping
        self._dtype = dtype
        self.stable_tensors = isinstance(mapping, dict)
        self._tied_once = tied == "once" and self.stable_tensors
        self._rename = rename
        self._include = include
        self._aliases: dict[str, str] | None = None
        self.casts = dtype is not None

    def __repr__(self) -> str:
        cast = f", cast to {dtype_name(self._dtype)}" if self._dtype is not None else ""
        return f"<{type(self).__name__}{cast}>"

    @property
    def device(self) -> torch.device | None:
        """Where the tensors are: that of the first one, None if there is none."""
        return next((tensor.device for _, tensor in self._named() if isinstance(tensor, torch.Tensor)), None)

    @property
    def collective(self) -> bool:
        """True if reading a tensor takes other ranks, so that a walk once begun must be walked to its end."""
        return any(is_sharded(tensor) for _, tensor in self._named())

    def manifest(self) -> Manifest:
        once = self._tied_once
        manifest = describe(self._named(), dtype=self._dtype, tied_once=once, tied_each=not once)
        self._aliases = dict(manifest.aliases)
        return manifest

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of the last manifest; makes one if there is none."""
        if self._aliases is None:
            self.manifest()
        aliases = self._aliases or {}
        for name, tensor in self._named():
            if name not in aliases:
                yield name, gathered(tensor)

    def _state(self) -> Mapping[str, Any]:
        return self._mapping

    def _named(self) -> Iterator[tuple[str, Any]]:
        return selected(self._state().items(), rename=self._rename, include=self._include)


class ModuleSource(StateDictSource):
    """A module's parameters and persistent buffers, under the names of its ``state_dict()``.

    torch.compile, DDP, DataParallel, FSDP's first version and activation checkpointing are seen through, on the
    module and within it: names, also those given to ``rename`` and ``include``, are the plain model's.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        dtype: torch.dtype | None = None,
        tied: Literal["once", "each"] = "once",
        rename: Callable[[str], str] | None = None,
        include: Callable[[str], bool] | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        super().__init__({}, dtype=dtype, tied=tied, rename=rename, include=include)
        self._model = model

    @property
    def device(self) -> torch.device | None:
        if not gathers_its_state(self._model):
            return super().device
        return next((tensor.device for tensor in self._model.parameters()), None)

    @property
    def collective(self) -> bool:
        return gathers_its_state(self._model) or super().collective

    def _state(self) -> Mapping[str, Any]:
        # What modules put there by get_extra_state() is theirs, and mostly no tensor.
        state = module_state(self._model)
        return {name: tensor for name, tensor in state.items() if not name.endswith("_extra_state")}


class MasterWeightSource(StateDictSource):
    """An optimizer's fp32 master weights, cast to the engines' ``dtype`` as they are packed."""

    def __init__(
        self,
        masters: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype,
        tied: Literal["once", "each"] = "once",
        rename: Callable[[str], str] | None = None,
        include: Callable[[str], bool] | None = None,
    ) -> None:
        arguments.kind("dtype", dtype, torch.dtype)
        super().__init__(masters, dtype=dtype, tied=tied, rename=rename, include=include)
