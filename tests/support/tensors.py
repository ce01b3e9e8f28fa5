"""Tensors of every dtype, shape and layout."""

from __future__ import annotations

import torch

from async_wsync.transfer.tensors import torch_dtype

DTYPES = [
    *("float32", "bfloat16", "float16", "float64", "complex64", "complex128", "bool"),
    *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2"),
]


DTYPES = [name for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)]  # the oldest torch lacks some


LAYOUTS = ["plain", "transposed", "strided", "column", "expanded", "parameter"]


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bits: NaNs with payloads, denormals and all."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch_dtype(dtype)
    numel = torch.Size(shape).numel()
    high = 2 if dtype == "bool" else 256
    raw = torch.randint(0, high, (numel * kind.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(kind).view(shape)


def rearranged(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """The same values, in a storage of another order."""
    if how == "parameter" and (tensor.is_floating_point() or tensor.is_complex()):
        return torch.nn.Parameter(tensor)
    if tensor.dim() == 0 or tensor.numel() == 0:
        return tensor
    if how == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if how == "strided":
        return tensor.new_empty((tensor.shape[0], 2, *tensor.shape[1:]))[:, 1].copy_(tensor)
    if how == "column":
        return tensor.new_empty((*tensor.shape, 2))[..., 0].copy_(tensor)
    if how == "expanded":
        return tensor[:1].expand(tensor.shape)
    return tensor
