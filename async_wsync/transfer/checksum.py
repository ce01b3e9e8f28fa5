"""Digests that prove that what arrived is what was sent, bit for bit."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Mapping

import torch

from async_wsync.transfer.tensors import dtype_name

__all__ = ["combined_digest", "model_digests", "tensor_digest"]

_DIGEST_BYTES = 16


def tensor_digest(tensor: torch.Tensor) -> str:
    """Hex blake2b over dtype, shape and bytes in row-major order, whatever the strides and the device.

    Bits count, not values: 0.0 and -0.0 differ. A contiguous CPU tensor is hashed in place, with the GIL released.
    """
    digest = hashlib.blake2b(f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}\n".encode(), digest_size=_DIGEST_BYTES)
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if plain.numel():
        # Tensors have no buffer interface of their own, and numpy is optional and knows no bfloat16.
        digest.update((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()))
    return digest.hexdigest()


def model_digests(named: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Digest per name. One tensor at a time is on the CPU."""
    pairs = named.items() if isinstance(named, Mapping) else named
    return {name: tensor_digest(tensor) for name, tensor in pairs}


def combined_digest(digests: Mapping[str, str]) -> str:
    """One digest of all, independent of their order."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in sorted(digests):
        digest.update(f"{name}\0{digests[name]}\n".encode())
    return digest.hexdigest()
