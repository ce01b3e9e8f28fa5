"""Updates of a model, as a broadcaster announces them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from async_wsync.transfer.layout import lay_out
from async_wsync.transfer.pack import stage
from async_wsync.transfer.plan import plan_buckets
from async_wsync.transfer.tensors import param_meta
from async_wsync.types import BucketSpec, Manifest, UpdateSpec, WireFormat

Model = nn.Module | Mapping[str, torch.Tensor]


def manifest_of(model: Model, *, aliases: Sequence[tuple[str, str]] = ()) -> Manifest:
    tensors = model.state_dict() if isinstance(model, nn.Module) else model
    return Manifest(params=tuple(param_meta(n, t) for n, t in tensors.items()), aliases=tuple(aliases))


def update_of(model: Manifest | Model, *, version: int = 1, bucket_bytes: int = 1 << 20, **facts: Any) -> UpdateSpec:
    """``facts``: as for `UpdateSpec`; by default no group is named, and the update has an id of its own."""
    manifest = model if isinstance(model, Manifest) else manifest_of(model)
    buckets = plan_buckets(manifest, bucket_bytes=bucket_bytes)
    facts = {"group": "", "update_id": uuid.uuid4().hex, **facts}
    return UpdateSpec(version=version, manifest=manifest, buckets=buckets, **facts)


def staged(bucket: BucketSpec, model: nn.Module) -> list[torch.Tensor]:
    return stage(lay_out(bucket, WireFormat.PACKED), {n: t.detach() for n, t in model.state_dict().items()})
