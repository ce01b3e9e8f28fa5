"""The engines of the update's faults."""

from tests.ray.conftest import _rig, rig

__all__ = ["_rig", "rig"]
