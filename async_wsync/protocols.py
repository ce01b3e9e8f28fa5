"""The seams between the parts: what a source, an engine, a lock and a progress bar must have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
from async_wsync.types import (
    BucketSpec,
    Call,
    EngineInfo,
    GroupSpec,
    Manifest,
    PauseMode,
    UpdateEvent,
    UpdateSpec,
    WireFormat,
)

__all__ = ["EventHook", "HeldLock", "Progress", "RolloutEngine", "UpdateLock", "WeightSource"]


class Progress(Protocol):
    """A bar. All calls come on the event loop's thread; what they raise is logged and never fails an update."""

    def start(self, *, version: int, total_bytes: int, num_buckets: int) -> None: ...
    def advance(self, *, nbytes: int, bucket: int) -> None: ...
    def close(self, *, status: str) -> None:
        """``status``: done, failed or cancelled. Called exactly once for every start."""


@runtime_checkable
class WeightSource(Protocol):
    """Named tensors, in the order of their manifest.

    Both methods run in one dedicated thread, since they may run collectives. ``casts`` tells that tensors
    may come in another dtype than their meta says, and are to be cast while they are packed.

    A source may reuse the memory of a tensor once the next one is asked for: each is copied before. It may have
    further attributes. ``stable_tensors``, True: no tensor's memory changes before the update is over, so that large
    ones are sent from where they are, without a copy. ``device``: where the tensors are, a torch.device; if None, a
    method ``find_device()`` is asked; without either, on the CPU. ``collective``, True: other ranks take part in a
    walk, which is then always walked to its end.
    """

    casts: bool

    def manifest(self) -> Manifest: ...
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class HeldLock(Protocol):
    """A lock in hand."""

    @property
    def fence(self) -> int: ...
    def set_stage(self, stage: str) -> None:
        """What the holder is doing, for whoever reads the lock's status."""


class UpdateLock(Protocol):
    """What the broadcaster needs of a lock. ``timeout`` in seconds; None is the lock's own default."""

    def hold(self, *, label: str, timeout: float | None = None) -> AbstractAsyncContextManager[HeldLock]: ...


class RolloutEngine(Protocol):
    """One engine as the broadcaster sees it: an adapter over an actor handle or a URL.

    Every method raises `EngineFailed` or a kind of it, with ``engine`` set, and nothing else; an answer that
    means failure raises too. The caller never cancels a call that the engine may still be running, except to
    quarantine the engine. ``num_ranks``: ranks it takes in the update group. ``pipelined``: takes the call for
    the next bucket while one is under way, and keeps their order. ``supports_fence``: refuses stale callers itself.
    """

    @property
    def name(self) -> str: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def wire_format(self) -> WireFormat: ...
    @property
    def pipelined(self) -> bool: ...
    @property
    def supports_fence(self) -> bool: ...

    async def hello(self, call: Call) -> EngineInfo: ...
    async def join(self, call: Call, group: GroupSpec, *, rank_offset: int) -> None: ...
    async def leave(self, call: Call, group: str) -> None: ...
    async def check(self, call: Call, update: UpdateSpec) -> tuple[str, ...]:
        """Agree on the manifest (or raise `EngineRejected`); returns notes on what could not be checked.

        An update that is not strict, leaves tensors out (or, where the engine can't tell, may do so), and whose
        ``base`` is not what the engine holds, is refused with `BaseMissing`.
        """
        ...

    async def pause(self, call: Call, mode: PauseMode) -> None: ...
    async def flush(self, call: Call) -> None:
        """One attempt to drop the cache; `EngineBusy` where the engine refuses for now."""
        ...

    async def begin(self, call: Call, update: UpdateSpec) -> None: ...
    async def receive(self, call: Call, update: UpdateSpec, bucket: BucketSpec) -> None:
        """Announce a bucket; returns once the engine holds and has applied all of it."""
        ...

    async def end(self, call: Call, update: UpdateSpec) -> None: ...
    async def publish(self, call: Call, version: int) -> None: ...
    async def resume(self, call: Call) -> None: ...
    async def abort(self, call: Call, group: str) -> None:
        """Break off a receive in progress, fast; the group is dead afterwards. Never waits for other members."""
        ...

    async def reset(self, call: Call) -> None:
        """Close whatever session a dead or failed source left open; the engine stays paused."""
        ...

    async def checksums(self, call: Call) -> dict[str, str] | None:
        """Digest per tensor name as `transfer.checksum` computes them, or None where the engine has none."""
        ...

    async def aclose(self) -> None:
        """Free what the adapter itself holds (connections); the engine stays."""
        ...


EventHook = Callable[[UpdateEvent], None]
