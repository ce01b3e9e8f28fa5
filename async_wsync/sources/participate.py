"""The part of a trainer's other ranks in an update."""

from __future__ import annotations

from async_wsync.protocols import WeightSource

__all__ = ["participate"]


def participate(source: WeightSource) -> int:
    """Join the collectives that the source rank runs as it reads ``source``, and keep nothing.

    Call it on every rank of the trainer's mesh but the source rank, over an equal source, once for each
    ``update_weights`` there. It blocks until the walk is over; returns the number of tensors walked. The
    source rank walks a collective source to its end also when its update fails, so that nobody is left here;
    an update that it retries (engines dropped) walks again.
    """
    source.manifest()
    count = 0
    for _name, _tensor in source.tensors():
        del _tensor
        count += 1
    return count
