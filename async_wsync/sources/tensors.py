"""What every source asks of the tensors it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from async_wsync import arguments
from async_wsync.transfer.known_manifests import KnownParams
from async_wsync.transfer.tensors import detached, param_meta
from async_wsync.types import Manifest

__all__ = ["check_options", "check_tensor", "describe", "gathered", "is_sharded", "let_go", "selected", "wire_dtype"]

Named = tuple[str, torch.Tensor]

_STRIDED = torch.strided
_ORDINARY = (torch.Tensor, torch.nn.Parameter)  # no need to look twice at thousands of them


def check_options(*, dtype: Any, rename: Any, include: Any) -> None:
    """The options that several sources share."""
    arguments.kind("dtype", dtype, torch.dtype, none=True)
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating point type, got {dtype!r}")
    arguments.function("rename", rename)
    arguments.function("include", include)


def is_sharded(tensor: torch.Tensor) -> bool:
    """True for a DTensor, told by its method: importing its class costs a second."""
    return type(tensor) not in _ORDINARY and hasattr(tensor, "full_tensor")


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, without grad. For a DTensor that is a collective of its mesh."""
    plain = detached(tensor)
    if not is_sharded(plain):
        return plain
    full: torch.Tensor = plain.detach().full_tensor()  # type: ignore[attr-defined]
    return full


def let_go(tensors: object) -> None:
    """Close them if they are a generator: it may hold files, or a model."""
    close = getattr(tensors, "close", None)
    if close is not None:
        close()


def check_tensor(name: object, tensor: object) -> None:
    """ValueError naming what cannot be sent: no bytes (meta, lazy), or bytes that are not its values."""
    if not isinstance(name, str):
        raise ValueError(f"a tensor's name must be a str, got {name!r}")
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
    plain = type(tensor) in _ORDINARY and tensor.layout is _STRIDED
    if plain and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested):
        return
    if fault := _fault(tensor):
        raise ValueError(f"{name!r} is {fault}")


def _fault(tensor: torch.Tensor) -> str:
    if is_lazy(tensor):
        return "not initialized yet: run the module once"
    if tensor.is_meta:
        return "a meta tensor, which has no data: materialize the model first"
    if tensor.is_quantized:
        return "a quantized tensor: send its int_repr() and its scales as tensors of their own"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return f"not dense (layout {tensor.layout}): send it dense, or its parts as tensors of their own"
    if type(tensor) not in _ORDINARY and hasattr(tensor, "__tensor_flatten__") and not is_sharded(tensor):
        return f"a {type(tensor).__name__}, whose bytes lie in inner tensors: send those, or a dequantized copy"
    return ""


def wire_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """``dtype`` for floating point of 16 bits and more; integers, bools and float8 codes are never cast."""
    castable = tensor.is_floating_point() and tensor.dtype.itemsize >= 2
    return dtype if dtype is not None and castable else tensor.dtype


def describe(
    named: Iterable[Named], *, dtype: torch.dtype | None, tied_once: bool, tied_each: bool = False
) -> Manifest:
    """The manifest of these tensors; ValueError for a name that comes twice or a tensor that cannot be sent.

    Tensors are tied if they are one view of one memory. All are held until the end, so that no address
    is used twice meanwhile: for tensors made on the fly pass ``tied_once=False``. ``tied_each``: tied tensors are sent
    each, and the manifest says that they are equal.
    """
    params = KnownParams()
    aliases: list[tuple[str, str]] = []
    tied: list[tuple[str, str]] = []
    names: set[str] = set()
    ties = _Ties()
    for name, tensor in named:
        check_tensor(name, tensor)
        if name in names:
            raise ValueError(f"{name!r} comes twice")
        names.add(name)
        original = ties.first(name, tensor) if tied_once or tied_each else name
        if original != name and tied_once:
            aliases.append((name, original))
            continue
        params.add(param_meta(name, tensor, dtype=wire_dtype(tensor, dtype)))
        if original != name:
            tied.append((name, original))
    return Manifest(params=params.all(), aliases=tuple(aliases), tied=tuple(tied))


class _Ties:
    """Which tensors are one view of one memory. Holds them, and makes no object for one that shares its address with
    no other: see `transfer.known_manifests`."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._tensors: list[torch.Tensor] = []
        self._first_by_address: dict[int, int] = {}
        self._first_by_view: dict[object, int] = {}

    def first(self, name: str, tensor: torch.Tensor) -> str:
        """The name of the first tensor that is the same view as this one, which may be this one."""
        mine = len(self._names)
        self._names.append(name)
        self._tensors.append(tensor)
        # A shard's address differs between ranks and is null where the shard is empty, and all ranks must come
        # to the same answer, or they would gather different tensors: so a DTensor is tied only to itself.
        if is_sharded(tensor) or tensor.numel() == 0:
            return self._names[self._first_by_view.setdefault(id(tensor), mine)]
        there = self._first_by_address.setdefault(tensor.data_ptr(), mine)
        if there == mine:
            return name
        self._first_by_view.setdefault(_view(self._tensors[there]), there)
        return self._names[self._first_by_view.setdefault(_view(tensor), mine)]


def _view(tensor: torch.Tensor) -> object:
    view: tuple[Any, ...] = (tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride())
    return (*view, tensor.is_conj(), tensor.is_neg())


def selected(
    named: Iterable[tuple[str, Any]],
    *,
    rename: Callable[[str], str] | None,
    include: Callable[[str], bool] | None,
) -> Iterator[tuple[str, Any]]:
    """Those that ``include`` (asked with the trainer's name) keeps, under the names that ``rename`` gives."""
    for name, tensor in named:
        if include is None or include(name):
            yield (name if rename is None else rename(name)), tensor
