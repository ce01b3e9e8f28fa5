"""Manifests of earlier updates: of the same tensors again, the same objects are used again.

By these objects plans, layouts and packed manifests are recalled. And a full garbage collection stops every thread for
as long as there are objects: each tensor's description that is made anew, and kept, brings the next one nearer.
"""

from __future__ import annotations

from collections import deque

from async_wsync.types import Manifest, ParamMeta

__all__ = ["KnownParams", "known_manifest"]

_known: deque[Manifest] = deque(maxlen=4)


def known_manifest(manifest: Manifest) -> Manifest:
    """The manifest of an earlier update if it is equal, else this one, which will be known from now on."""
    for known in tuple(_known):
        if known == manifest:
            return known
    _known.append(manifest)
    return manifest


class KnownParams:
    """The params of a manifest in the making. Those that an earlier one has at the same place are its own objects."""

    def __init__(self) -> None:
        self._params: list[ParamMeta] = []
        self._earlier: tuple[ParamMeta, ...] = ()

    def add(self, meta: ParamMeta) -> None:
        place = len(self._params)
        if place == 0:
            begins_so = (known.params for known in reversed(tuple(_known)) if known.params[:1] == (meta,))
            self._earlier = next(begins_so, ())
        if place < len(self._earlier) and self._earlier[place] == meta:
            meta = self._earlier[place]
        self._params.append(meta)

    def all(self) -> tuple[ParamMeta, ...]:
        return tuple(self._params)
