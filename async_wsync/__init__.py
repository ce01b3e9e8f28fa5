"""Broadcasts new model weights from a trainer into running rollout engines.

Importing this package imports neither torch nor ray: public names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from async_wsync.broadcaster import WeightBroadcaster
    from async_wsync.engines.sglang.actor import SGLangActor
    from async_wsync.engines.sglang.server import SGLangServer
    from async_wsync.engines.torch.engine import TorchEngine
    from async_wsync.engines.torch.messages import Reply, Request
    from async_wsync.engines.torch.receiver import WeightReceiver
    from async_wsync.engines.vllm.actor import VLLMRolloutActor
    from async_wsync.engines.vllm.engine import VLLMActor, VLLMServer
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
    from async_wsync.progress import ProgressState, TqdmProgress
    from async_wsync.protocols import HeldLock, Progress, RolloutEngine, UpdateLock, WeightSource
    from async_wsync.report import UpdateReport
    from async_wsync.rounds.round import UpdateRound
    from async_wsync.sources import (
        IterableSource,
        MasterWeightSource,
        ModuleSource,
        SafetensorsSource,
        StateDictSource,
    )
    from async_wsync.sources.participate import participate
    from async_wsync.transfer.checksum import combined_digest, model_digests
    from async_wsync.types import (
        Base,
        BucketSpec,
        Call,
        EngineInfo,
        EngineOutcome,
        EngineState,
        GroupSpec,
        Manifest,
        ParamMeta,
        PauseMode,
        Timeouts,
        UpdateEvent,
        UpdateSpec,
        WireFormat,
    )

_HOMES = {
    "broadcaster": ("WeightBroadcaster",),
    "engines.sglang.actor": ("SGLangActor",),
    "engines.sglang.server": ("SGLangServer",),
    "engines.torch.engine": ("TorchEngine",),
    "engines.torch.messages": (
        "Reply",
        "Request",
    ),
    "engines.torch.receiver": ("WeightReceiver",),
    "engines.vllm.actor": ("VLLMRolloutActor",),
    "engines.vllm.engine": (
        "VLLMActor",
        "VLLMServer",
    ),
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
    "lock": (
        "BroadcastLock",
        "PolledLock",
    ),
    "progress": (
        "ProgressState",
        "TqdmProgress",
    ),
    "protocols": (
        "HeldLock",
        "Progress",
        "RolloutEngine",
        "UpdateLock",
        "WeightSource",
    ),
    "report": ("UpdateReport",),
    "rounds.round": ("UpdateRound",),
    "sources": (
        "IterableSource",
        "MasterWeightSource",
        "ModuleSource",
        "SafetensorsSource",
        "StateDictSource",
    ),
    "sources.participate": ("participate",),
    "transfer.checksum": (
        "combined_digest",
        "model_digests",
    ),
    "types": (
        "Base",
        "BucketSpec",
        "Call",
        "EngineInfo",
        "EngineOutcome",
        "EngineState",
        "GroupSpec",
        "Manifest",
        "ParamMeta",
        "PauseMode",
        "Timeouts",
        "UpdateEvent",
        "UpdateSpec",
        "WireFormat",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__version__ = "0.1.0"
__all__ = [
    "AcquireTimeout",
    "Base",
    "BaseMissing",
    "BroadcastFailed",
    "BroadcastLock",
    "BucketSpec",
    "Call",
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
    "GroupSpec",
    "HeldLock",
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
    "Progress",
    "ProgressState",
    "RendezvousError",
    "Reply",
    "Request",
    "RolloutEngine",
    "RoundFailed",
    "SGLangActor",
    "SGLangServer",
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
    "UpdateLock",
    "UpdateReport",
    "UpdateRound",
    "UpdateSpec",
    "VLLMActor",
    "VLLMRolloutActor",
    "VLLMServer",
    "WeightBroadcaster",
    "WeightReceiver",
    "WeightSource",
    "WeightSyncError",
    "WireFormat",
    "__version__",
    "combined_digest",
    "model_digests",
    "participate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
