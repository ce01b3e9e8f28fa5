"""Where weights come from."""

from __future__ import annotations

from async_wsync.sources.iterable import IterableSource
from async_wsync.sources.participate import participate
from async_wsync.sources.safetensors import SafetensorsSource
from async_wsync.sources.state_dict import MasterWeightSource, ModuleSource, StateDictSource

__all__ = [
    "IterableSource",
    "MasterWeightSource",
    "ModuleSource",
    "SafetensorsSource",
    "StateDictSource",
    "participate",
]
