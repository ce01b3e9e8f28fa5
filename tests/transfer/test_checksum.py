from __future__ import annotations

import hashlib

import pytest
import torch

from async_wsync.transfer.checksum import combined_digest, model_digests, tensor_digest


def test_a_digest_is_blake2b_over_dtype_shape_and_bytes() -> None:
    tensor = torch.arange(6, dtype=torch.int16).view(2, 3)
    expected = hashlib.blake2b(b"int16 (2, 3)\n" + bytes(tensor.numpy().tobytes()), digest_size=16).hexdigest()
    assert tensor_digest(tensor) == expected


@pytest.mark.parametrize(
    "same",
    [
        lambda t: t.t().contiguous().t(),
        lambda t: torch.nn.Parameter(t),
        lambda t: torch.cat([t, t], dim=1)[:, :3],
        lambda t: t.to_sparse().to_dense(),
    ],
)
def test_strides_and_wrappers_do_not_change_a_digest(same: object) -> None:
    tensor = torch.randn(2, 3)
    assert tensor_digest(same(tensor)) == tensor_digest(tensor)  # type: ignore[operator]


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([0.0, 1.0, -0.0]),
        torch.tensor([0.0, 1.0, 0.0]).view(3, 1),
        torch.tensor([0.0, 1.0, 0.0]).view(torch.int32),
        torch.tensor([0.0, 1.0]),
        torch.tensor([1.0, 0.0, 0.0]),
    ],
)
def test_another_bit_shape_dtype_or_order_changes_a_digest(other: torch.Tensor) -> None:
    assert tensor_digest(other) != tensor_digest(torch.tensor([0.0, 1.0, 0.0]))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint16", "bool", "complex64", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,)])
def test_every_dtype_and_shape_has_a_digest(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape).to(getattr(torch, dtype))
    assert len(tensor_digest(tensor)) == 32


def test_a_conjugate_view_is_digested_as_the_values_it_shows() -> None:
    lazy = torch.tensor([1 + 2j]).conj()
    assert tensor_digest(lazy) == tensor_digest(lazy.resolve_conj())


def test_the_combined_digest_depends_on_names_and_digests_but_not_on_their_order() -> None:
    digests = model_digests({"a": torch.zeros(2), "b": torch.ones(2)})
    assert combined_digest(digests) == combined_digest(dict(reversed(list(digests.items()))))
    assert combined_digest(digests) != combined_digest({"a": digests["b"], "b": digests["a"]})
    assert model_digests(iter([("a", torch.zeros(2))])) == {"a": digests["a"]}
