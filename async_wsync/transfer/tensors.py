"""The names and sizes of tensors, and plain views of them."""

from __future__ import annotations

import math
from functools import cache, lru_cache

import torch

from async_wsync.types import ParamMeta

__all__ = ["detached", "dtype_name", "param_meta", "param_nbytes", "torch_dtype"]


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


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Without grad; itself where it has none, since thousands of views cost milliseconds."""
    return tensor.detach() if tensor.requires_grad else tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    # A conjugate or negated view may be contiguous, but its storage holds other values.
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
