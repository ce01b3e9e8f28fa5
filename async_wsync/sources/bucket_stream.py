"""One walk over a source, staged ahead in its thread and awaited on the loop."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from async_wsync.errors import SourceError, WeightSyncError
from async_wsync.protocols import WeightSource
from async_wsync.runtime.cuda_streams import SideStream, queued_by_now
from async_wsync.runtime.foreign_code import as_raised
from async_wsync.runtime.threads import DaemonWorker
from async_wsync.sources.tensors import let_go
from async_wsync.transfer.checksum import tensor_digest
from async_wsync.transfer.layout import lay_out
from async_wsync.transfer.pack import Stager, own_copy
from async_wsync.transfer.tensors import dtype_name, torch_dtype
from async_wsync.types import BucketSpec, ParamMeta, WireFormat

__all__ = ["BucketStream", "StagedBucket", "wire_digest"]


@dataclass(eq=False, slots=True, weakref_slot=True)
class StagedBucket:
    """A bucket whose bytes are ready. ``wire`` has its uint8 tensors for each format, in the layout's order."""

    bucket: BucketSpec
    wire: dict[WireFormat, list[torch.Tensor]]
    _permits: threading.Semaphore
    _released: bool = field(default=False, init=False)

    def release(self) -> None:
        """Drop the tensors and let the next bucket be staged. Idempotent."""
        if not self._released:
            self._released = True
            self.wire.clear()
            self._permits.release()


class BucketStream:
    """Staged buckets, in order, as an async iterator. Cancelling an ``anext`` loses nothing.

    ``device``: where wire tensors must be; ``source_device``: where the source's are, as far as that is known. On CUDA
    all of it is queued on a stream of its own, behind what the creator's thread has queued on its current one.
    """

    def __init__(
        self,
        source: WeightSource,
        buckets: Sequence[BucketSpec],
        formats: frozenset[WireFormat],
        device: torch.device,
        num_buffers: int,
        digests: dict[str, str] | None,
        *,
        source_device: torch.device,
    ) -> None:
        self._side = SideStream(source_device if source_device.type == "cuda" else device)
        self._made = queued_by_now(self._side.device)
        self._walk = _Walk(source, buckets, formats, device, digests, self._side)
        self._permits = threading.Semaphore(num_buffers)
        self._stopped = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Queue[StagedBucket | None] = asyncio.Queue()
        self._alive: weakref.WeakSet[StagedBucket] = weakref.WeakSet()
        self.job: Future[None] | None = None

    @property
    def finished(self) -> bool:
        """True once the source has been let go."""
        return self.job is None or self.job.done()

    def start(self, worker: DaemonWorker) -> None:
        self.job = worker.submit(self._produce)
        self.job.add_done_callback(lambda _: self._hand_over(None))

    def stop(self) -> None:
        """Stage nothing more and release every bucket: what is on the wire is kept by its group, and the traceback of
        a failure would keep the rest for as long as somebody keeps that. Idempotent."""
        self._stopped.set()
        self._permits.release()
        while not self._ready.empty():
            self._ready.get_nowait()
        self._ready.put_nowait(None)
        for staged in list(self._alive):
            staged.release()

    def __aiter__(self) -> BucketStream:
        return self

    async def __anext__(self) -> StagedBucket:
        staged = await self._ready.get()
        if staged is not None:
            return staged
        self._ready.put_nowait(None)  # the end stays the end
        if self.job is not None and self.job.done():
            self._raise_failure(self.job)
        raise StopAsyncIteration

    def _raise_failure(self, job: Future[None]) -> None:
        error = job.exception()
        if error is None:
            return
        if isinstance(error, WeightSyncError):
            raise error
        cause = as_raised(error)
        where = f"after {self._walk.last!r}" if self._walk.last else "before its first tensor"
        raise SourceError(f"the source failed {where}: {cause!r}", param=self._walk.last) from cause

    # The rest runs in the worker's thread.

    def _produce(self) -> None:
        with self._side.current(after=self._made):
            self._stage_all()

    def _stage_all(self) -> None:
        try:
            for bucket in self._walk.buckets:
                # Taken before the first tensor is pulled, so that no bucket beyond the limit is even begun.
                self._permits.acquire()
                if self._stopped.is_set():
                    break
                wire = self._walk.stage(bucket)
                self._hand_over(StagedBucket(bucket, wire, self._permits))
                del wire
            else:
                self._walk.check_end()
        finally:
            self._walk.close()

    def _hand_over(self, staged: StagedBucket | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._take, staged)
        except RuntimeError:  # the loop is closed: nobody waits any more
            pass

    def _take(self, staged: StagedBucket | None) -> None:
        if staged is not None:
            if self._stopped.is_set():
                staged.release()
                return
            self._alive.add(staged)
        self._ready.put_nowait(staged)


class _Walk:
    """One walk over a source, held against the manifest as it goes. All in one thread."""

    def __init__(
        self,
        source: WeightSource,
        buckets: Sequence[BucketSpec],
        formats: frozenset[WireFormat],
        device: torch.device,
        digests: dict[str, str] | None,
        side: SideStream,
    ) -> None:
        self.buckets = buckets
        self._side = side
        self.last: str | None = None
        self._source = source
        self._formats = formats
        self._device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        self._stable = bool(getattr(source, "stable_tensors", False))
        self._digests = digests
        self._tensors: Iterator[tuple[str, torch.Tensor]] | None = None

    def stage(self, bucket: BucketSpec) -> dict[WireFormat, list[torch.Tensor]]:
        """Pull this bucket's tensors; uint8 wire tensors for each format, whose bytes are there."""
        stagers = {wire: Stager(lay_out(bucket, wire), device=self._device) for wire in self._formats}
        for meta in bucket.params:
            tensor = self._pull(meta)
            if not self._stable:  # before the next one is pulled, which may be put in the same memory
                tensor = own_copy(meta, tensor, self._device)
            for stager in stagers.values():
                stager.add(meta.name, tensor)
            if self._digests is not None:
                self._digests[meta.name] = wire_digest(meta, tensor)
            self._side.keep(tensor)
            del tensor  # or it would stay alive while the next one is made
        wires = {wire: stager.finish() for wire, stager in stagers.items()}
        self._side.synchronize()
        return wires

    def check_end(self) -> None:
        extra = next(self._iterator(), None)
        if extra is not None:
            raise SourceError(f"the source yields {extra[0]!r}, which its manifest lacks", param=extra[0])

    def close(self) -> None:
        """Let go of the source; one that runs collectives is first walked to its end, as other ranks wait in it."""
        if getattr(self._source, "collective", False):
            for _ in self._iterator():
                pass
        tensors, self._tensors = self._tensors, None
        let_go(tensors)

    def _iterator(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._tensors is None:
            self._tensors = iter(self._source.tensors())
        return self._tensors

    def _pull(self, meta: ParamMeta) -> torch.Tensor:
        item = next(self._iterator(), None)
        if item is None:
            raise SourceError(f"the source ended before {meta.name!r}, which its manifest has", param=meta.name)
        name, tensor = item
        if name != meta.name:
            raise SourceError(f"the source yields {name!r} where its manifest has {meta.name!r}", param=name)
        self.last = name
        if tensor.shape != meta.shape:
            raise SourceError(f"{name!r} has shape {tuple(tensor.shape)}, its manifest says {meta.shape}", param=name)
        if tensor.dtype != torch_dtype(meta.dtype) and not self._source.casts:
            raise SourceError(f"{name!r} is {dtype_name(tensor.dtype)}, its manifest says {meta.dtype}", param=name)
        return tensor


def wire_digest(meta: ParamMeta, tensor: torch.Tensor) -> str:
    """The digest of ``tensor`` as it travels."""
    return tensor_digest(tensor.detach().to(torch_dtype(meta.dtype)))
