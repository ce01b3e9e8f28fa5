"""The engines of the update's faults."""

from tests.ray.conftest import _rig, lock, rig

__all__ = ["_rig", "lock", "rig"]
