"""Ids of requests, by which an engine knows one that it has seen before."""

from __future__ import annotations

import itertools
import os
import uuid

__all__ = ["new_request_id"]

_PREFIX = uuid.uuid4().hex
_numbers = itertools.count()


def new_request_id() -> str:
    """Unlike any other, also those of a forked process.

    Reading random bytes for each would give up the GIL, for 5 ms if other threads compute.
    """
    return f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
