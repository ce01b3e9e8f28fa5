"""What every file of this folder works with: the broadcaster's parts, and one update's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from async_wsync.groups.manager import GroupManager
from async_wsync.protocols import Progress, UpdateLock
from async_wsync.sources.reader import SourceReader
from async_wsync.types import Call, EngineInfo, PauseMode, Timeouts
from async_wsync.update.cancellation import Cancellation
from async_wsync.update.fleet import Fleet
from async_wsync.update.history import UpdateHistory

__all__ = ["BroadcasterContext", "Settings", "UpdateContext", "UpdateRequest", "Verify", "cuda_here"]

Verify = Literal["engines", "source"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a broadcaster goes about its updates; see `WeightBroadcaster` for each."""

    bucket_bytes: int
    num_buffers: int
    timeouts: Timeouts
    backend: Literal["auto", "gloo", "nccl"]
    pause_mode: PauseMode
    resume_policy: Literal["whole", "current", "never"]
    on_engine_failure: Literal["raise", "drop"]
    on_cancel: Literal["finish", "stop"]
    lock_scope: Literal["update", "bucket"]
    topology: Literal["shared", "per_engine"]
    min_engines: int
    max_rebuilds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRequest:
    """What a caller asks of one update. ``targets``: the names of the engines it is for.

    ``base``: the version that a partial update builds on; ``base_is_ours``: we must have brought it to the engines
    ourselves, else they are believed. ``keep_others``: the groups of other engines stay as they are.
    """

    version: int
    targets: tuple[str, ...]
    pause_mode: PauseMode
    strict: bool = True
    base: int | None = None
    base_is_ours: bool = True
    allow_empty: bool = False
    verify: Verify | None = None
    atomic_groups: Sequence[str] = ()
    keep_others: bool = False


@dataclass(frozen=True, kw_only=True)
class BroadcasterContext:
    """The parts of a broadcaster. ``source``: its name."""

    source: str
    fleet: Fleet
    groups: GroupManager
    lock: UpdateLock
    settings: Settings
    progress: Progress

    def pick_backend(self, infos: Sequence[EngineInfo], *, source_device: str | None = None) -> str:
        """The one that was asked for; of "auto", NCCL if the source and all engines are on CUDA, else gloo."""
        if self.settings.backend != "auto":
            return self.settings.backend
        here = cuda_here() if source_device is None else source_device.startswith("cuda")
        return "nccl" if here and all(info.device.startswith("cuda") for info in infos) else "gloo"

    def for_update(self, request: UpdateRequest, *, reader: SourceReader, history: UpdateHistory) -> UpdateContext:
        return UpdateContext(
            source=self.source,
            fleet=self.fleet,
            groups=self.groups,
            lock=self.lock,
            settings=self.settings,
            progress=self.progress,
            request=request,
            reader=reader,
            history=history,
            cancellation=Cancellation(self.settings.timeouts, on_cancel=self.settings.on_cancel, history=history),
        )


@dataclass(frozen=True, kw_only=True)
class UpdateContext(BroadcasterContext):
    """A broadcaster's parts, with those of one update."""

    request: UpdateRequest
    reader: SourceReader
    history: UpdateHistory
    cancellation: Cancellation

    def call(self, limit: float) -> Call:
        """How engines are called under the lock, by steps that may take ``limit`` seconds."""
        assert self.history.held is not None
        # The deadline is ours. The adapter keeps asking through the drain, or a call could not settle in it.
        timeout = limit + self.settings.timeouts.drain
        return Call(source=self.source, fence=self.history.held.fence, timeout=timeout)


def cuda_here() -> bool:
    import torch

    return torch.cuda.is_available()
