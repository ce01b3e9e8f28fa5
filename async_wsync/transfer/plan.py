"""Which tensors travel in which bucket."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from async_wsync.transfer.recall import recall
from async_wsync.transfer.tensors import param_nbytes
from async_wsync.types import BucketSpec, Manifest, ParamMeta

__all__ = ["plan_buckets"]


@recall(4, lambda manifest, *, bucket_bytes, atomic_groups=(): (id(manifest), bucket_bytes, tuple(atomic_groups)))
def plan_buckets(manifest: Manifest, *, bucket_bytes: int, atomic_groups: Sequence[str] = ()) -> tuple[BucketSpec, ...]:
    """Cut the manifest, in its order, into buckets of at most ``bucket_bytes``.

    A tensor larger than that gets a bucket of its own. ``atomic_groups`` are regular expressions that match
    whole names; names that match one pattern with equal captures stay in one bucket, together with all
    that stands between them: ``r"(.*)\\.weight(?:_scale)?"`` keeps each weight with its scale.
    An empty manifest needs no bucket. The same manifest gets the same buckets again, as objects too.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be above 0, got {bucket_bytes!r}")
    buckets: list[BucketSpec] = []
    pending: list[ParamMeta] = []
    size = 0

    def close() -> None:
        nonlocal pending, size
        if pending:
            buckets.append(BucketSpec(index=len(buckets), params=tuple(pending), nbytes=size))
        pending, size = [], 0

    for unit in _units(manifest.params, atomic_groups) if atomic_groups else zip(manifest.params, strict=True):
        nbytes = sum(map(param_nbytes, unit))
        if nbytes and size + nbytes > bucket_bytes:
            close()
        pending.extend(unit)
        size += nbytes
    close()
    return tuple(buckets)


def _units(params: Sequence[ParamMeta], patterns: Sequence[str]) -> Iterator[Sequence[ParamMeta]]:
    """Runs of params that must not be cut; most are a single one."""
    try:
        compiled = [re.compile(pattern) for pattern in patterns]
    except re.error as error:
        raise ValueError(f"bad pattern in atomic_groups: {error}") from error
    last_of: dict[object, int] = {}
    keys: list[list[object]] = []
    for index, meta in enumerate(params):
        matches = ((number, pattern.fullmatch(meta.name)) for number, pattern in enumerate(compiled))
        keys.append([(number, match.groups()) for number, match in matches if match])
        last_of.update((key, index) for key in keys[-1])
    start, end = 0, 0
    for index in range(len(params)):
        end = max([end, index, *(last_of[key] for key in keys[index])])
        if index == end:
            yield params[start : index + 1]
            start = index + 1
