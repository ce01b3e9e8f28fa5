"""A few bytes that any process of the Ray cluster can look up, without asking the process that put them there."""

from __future__ import annotations

import logging

from async_wsync.runtime.object_refs import ray_is_up

__all__ = ["get", "put"]

logger = logging.getLogger(__name__)

_NAMESPACE = b"async_wsync"


def put(key: str, value: bytes) -> bool:
    """Store ``value``; blocks for a call to Ray's control store. False where there is no Ray, or it does not answer."""
    return _call("_internal_kv_put", key.encode(), value, namespace=_NAMESPACE) is not None


def get(key: str) -> bytes | None:
    """The value, or None; blocks like `put`."""
    found = _call("_internal_kv_get", key.encode(), namespace=_NAMESPACE)
    return found if isinstance(found, bytes) else None


def _call(function: str, *args: bytes, namespace: bytes) -> object:
    if not ray_is_up():
        return None
    try:
        from ray.experimental import internal_kv

        return getattr(internal_kv, function)(*args, namespace=namespace)
    except Exception as error:  # of Ray's own kinds, which differ between versions
        logger.debug("%s failed: %r", function, error)
        return None
