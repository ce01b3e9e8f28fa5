"""Broadcasts new model weights from a trainer into running rollout engines.

Importing this package imports neither torch nor ray: public names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from async_wsync.broadcaster import WeightBroadcaster
    from async_wsync.engines.torch.engine import TorchEngine
    from async_wsync.engines.torch.receiver import WeightReceiver
    from async_wsync.errors import (
        AcquireTimeout,
        BaseMissing,
        BroadcastFailed,
        Cancelled,
        EngineBusy,
        EngineDied,
        EngineFailed,
        EngineNotServing,
        EngineRejected,
        EngineReplaced,
        EngineTimeout,
        LeaseLost,
        LockError,
        LockUnavailable,
        PhaseTimeout,
        RendezvousError,
        RoundFailed,
        SelfDeadlock,
        SourceError,
        StaleCall,
        StaleFence,
        UpdateFailed,
        WeightSyncError,
    )
    from async_wsync.lock import BroadcastLock, PolledLock
    from async_wsync.progress import TqdmProgress
    from async_wsync.report import UpdateReport
    from async_wsync.rounds.round import UpdateRound
    from async_wsync.sources import IterableSource, MasterWeightSource, ModuleSource, SafetensorsSource, StateDictSource
    from async_wsync.types import (
        EngineInfo,
        EngineOutcome,
        EngineState,
        Manifest,
        ParamMeta,
        PauseMode,
        Timeouts,
        UpdateEvent,
        WireFormat,
    )

_HOMES = {
    "broadcaster": ("WeightBroadcaster",),
    "engines.torch.receiver": ("WeightReceiver",),
    "engines.torch.engine": ("TorchEngine",),
    "errors": (
        "AcquireTimeout",
        "BaseMissing",
        "BroadcastFailed",
        "Cancelled",
        "EngineBusy",
        "EngineDied",
        "EngineFailed",
        "EngineNotServing",
        "EngineRejected",
        "EngineReplaced",
        "EngineTimeout",
        "LeaseLost",
        "LockError",
        "LockUnavailable",
        "PhaseTimeout",
        "RendezvousError",
        "RoundFailed",
        "SelfDeadlock",
        "SourceError",
        "StaleCall",
        "StaleFence",
        "UpdateFailed",
        "WeightSyncError",
    ),
    "lock": ("BroadcastLock", "PolledLock"),
    "progress": ("TqdmProgress",),
    "report": ("UpdateReport",),
    "rounds.round": ("UpdateRound",),
    "sources": ("IterableSource", "MasterWeightSource", "ModuleSource", "SafetensorsSource", "StateDictSource"),
    "types": (
        "EngineInfo",
        "EngineOutcome",
        "EngineState",
        "Manifest",
        "ParamMeta",
        "PauseMode",
        "Timeouts",
        "UpdateEvent",
        "WireFormat",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__version__ = "0.1.0"
__all__ = [
    "AcquireTimeout",
    "BaseMissing",
    "BroadcastFailed",
    "BroadcastLock",
    "Cancelled",
    "EngineBusy",
    "EngineDied",
    "EngineFailed",
    "EngineInfo",
    "EngineNotServing",
    "EngineOutcome",
    "EngineRejected",
    "EngineReplaced",
    "EngineState",
    "EngineTimeout",
    "IterableSource",
    "LeaseLost",
    "LockError",
    "LockUnavailable",
    "Manifest",
    "MasterWeightSource",
    "ModuleSource",
    "ParamMeta",
    "PauseMode",
    "PhaseTimeout",
    "PolledLock",
    "RendezvousError",
    "RoundFailed",
    "SafetensorsSource",
    "SelfDeadlock",
    "SourceError",
    "StaleCall",
    "StaleFence",
    "StateDictSource",
    "Timeouts",
    "TorchEngine",
    "TqdmProgress",
    "UpdateEvent",
    "UpdateFailed",
    "UpdateReport",
    "UpdateRound",
    "WeightBroadcaster",
    "WeightReceiver",
    "WeightSyncError",
    "WireFormat",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
