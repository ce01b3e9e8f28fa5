"""From a source that blocks to staged buckets that an event loop can await."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

import torch

from async_wsync.errors import SourceError, WeightSyncError
from async_wsync.protocols import WeightSource
from async_wsync.runtime.foreign_code import as_raised
from async_wsync.runtime.threads import DaemonWorker, spawn, wait_done, wait_for
from async_wsync.sources.bucket_stream import BucketStream, StagedBucket, wire_digest
from async_wsync.sources.tensors import let_go
from async_wsync.transfer.known_manifests import known_manifest
from async_wsync.transfer.plan import plan_buckets
from async_wsync.transfer.tensors import torch_dtype
from async_wsync.types import BucketSpec, Manifest, WireFormat

__all__ = ["BucketStream", "SourceReader", "StagedBucket"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
Named = tuple[str, torch.Tensor]


class SourceReader:
    """Reads one source in a daemon thread of its own and stages its buckets ahead, at most ``num_buffers`` alive.

    ``device``: where wire tensors must be; None is the source's own. ``digests``: also hash what is sent, so that
    `digests` costs no second walk. ``find_device``: a source that does not know where its tensors are looks
    at the first. Errors of the source come out as `SourceError`, a caller's mistakes in it (`ValueError` while the
    manifest is made) as they are.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        device: torch.device | str | None = None,
        num_buffers: int = 2,
        digests: bool = False,
        find_device: bool = False,
    ) -> None:
        if num_buffers < 1:
            raise ValueError(f"num_buffers must be at least 1, got {num_buffers!r}")
        self.source = source
        self._device = device
        self._num_buffers = num_buffers
        self._find_device = find_device
        self._worker = DaemonWorker("async-wsync-source")
        self._manifest: Manifest | None = None
        self._source_device: torch.device | None = None
        self._digests: dict[str, str] | None = {} if digests else None
        self._streams: list[BucketStream] = []
        self._walks: dict[Future[Any], threading.Event] = {}
        self._collective = False
        self._owes_a_walk = False

    def __repr__(self) -> str:
        return f"<SourceReader of {self.source!r}{', closed' if self._worker.closed else ''}>"

    @property
    def device(self) -> torch.device:
        """Where the source's tensors are: known after `manifest`, the CPU if the source does not tell."""
        return self._source_device or torch.device("cpu")

    async def manifest(self) -> Manifest:
        """The source's manifest, asked for once."""
        if self._manifest is None:
            try:
                self._manifest = await self._worker.run(self._describe)
            except (ValueError, WeightSyncError):
                raise
            except Exception as error:
                cause = as_raised(error)
                raise SourceError(f"the source could not tell its manifest: {cause!r}") from cause
        return self._manifest

    def _describe(self) -> Manifest:
        manifest = self.source.manifest()
        if not isinstance(manifest, Manifest):
            raise SourceError(f"the source's manifest() returned {manifest!r:.200}, which is no Manifest")
        device = getattr(self.source, "device", None)
        if device is None and self._find_device:
            device = getattr(self.source, "find_device", lambda: None)()
        self._source_device = torch.device(device) if device is not None else None
        self._owes_a_walk = self._collective = bool(getattr(self.source, "collective", False))
        return known_manifest(manifest)

    async def plan(self, *, bucket_bytes: int, atomic_groups: Sequence[str] = ()) -> tuple[BucketSpec, ...]:
        """`plan_buckets` of the manifest, off the loop: thousands of tensors take it tens of milliseconds."""
        manifest = await self.manifest()
        # Not the source's thread, which may be waiting for a bucket to be released.
        plan = partial(plan_buckets, manifest, bucket_bytes=bucket_bytes, atomic_groups=atomic_groups)
        return await wait_for(spawn(plan, name="async-wsync-plan"))

    def buckets(
        self,
        buckets: Sequence[BucketSpec],
        formats: Collection[WireFormat],
        *,
        device: torch.device | str | None = None,
    ) -> BucketStream:
        """Walk the source once, and stage these buckets (its whole manifest, in order) in every one of ``formats``.

        Staging starts at once. A stream that was begun before is stopped. Call it on the event loop.
        """
        for stream in self._streams:
            stream.stop()
        self._owes_a_walk = False
        where = torch.device(device or self._device or self.device)
        stream = BucketStream(
            self.source,
            buckets,
            frozenset(formats),
            where,
            self._num_buffers,
            self._digests,
            source_device=self.device,
        )
        stream.start(self._worker)
        self._streams = [*(s for s in self._streams if not s.finished), stream]
        return stream

    async def digests(self) -> dict[str, str]:
        """`transfer.checksum` digest per name of what the engines must hold, aliases included.

        Unless they were asked for and all buckets were staged, this is a walk of its own, and stops a stream
        that is under way.
        """
        manifest = await self.manifest()
        digests = self._digests
        if digests is None or len(digests) < len(manifest.params):
            digests = await self._walk(partial(_digests, manifest))
        return {**digests, **{alias: digests[name] for alias, name in manifest.aliases}}

    async def first_rows(self, names: Sequence[str]) -> dict[str, Any] | None:
        """The first row of each of these tensors as it travels, in nested lists of floats.

        A walk of its own, which stops a stream that is under way. None for a source that runs collectives: nobody
        else would take part in a second walk.
        """
        manifest = await self.manifest()
        if self._collective:
            return None
        return await self._walk(partial(_first_rows, manifest, frozenset(names)))

    async def _walk(self, read: Callable[[Iterable[Named]], T]) -> T:
        """What ``read`` makes of the source's tensors. Ends early, in its thread too, once nobody waits for it."""
        for stream in self._streams:
            stream.stop()
        self._owes_a_walk = False
        given_up = threading.Event()
        job = self._worker.submit(_walk, self.source, read, given_up)
        self._walks = {walk: event for walk, event in self._walks.items() if not walk.done()} | {job: given_up}
        try:
            return await wait_for(job)
        except WeightSyncError:
            raise
        except Exception as error:
            cause = as_raised(error)
            raise SourceError(f"the source failed when it was read again: {cause!r}") from cause
        finally:
            given_up.set()

    async def aclose(self, timeout: float = 10.0) -> None:
        """Stop, and wait up to ``timeout`` seconds for the source to let go; after that its thread is abandoned.

        A source that runs collectives is walked to its end first, or once if nothing has been read: the other
        ranks are in the middle of that walk. Idempotent.
        """
        for stream in self._streams:
            stream.stop()
        for given_up in self._walks.values():
            given_up.set()
        jobs: list[Future[Any]] = [s.job for s in self._streams if s.job is not None and not s.job.done()]
        jobs += [walk for walk in self._walks if not walk.done()]
        if self._owes_a_walk and not self._worker.closed:
            self._owes_a_walk = False
            jobs.append(self._worker.submit(_walk_to_the_end, self.source))
        self._worker.close()
        if not jobs:
            return
        waits = [asyncio.ensure_future(wait_done(job)) for job in jobs]
        try:
            _, late = await asyncio.wait(waits, timeout=timeout)
        finally:
            for wait in waits:
                wait.cancel()
        if late:
            logger.warning("%r did not let go within %g s; its thread is abandoned", self.source, timeout)


def _walk(source: WeightSource, read: Callable[[Iterable[Named]], T], given_up: threading.Event) -> T:
    tensors = source.tensors()
    try:
        if getattr(source, "collective", False):
            found = read(tensors)  # other ranks take part, to the end
        else:
            found = read(takewhile(lambda _: not given_up.is_set(), tensors))
    finally:
        let_go(tensors)
    if given_up.is_set():
        raise SourceError("nobody waits for this walk over the source any more")
    return found


def _digests(manifest: Manifest, tensors: Iterable[Named]) -> dict[str, str]:
    metas = {meta.name: meta for meta in manifest.params}
    return {name: wire_digest(metas[name], tensor) for name, tensor in tensors}


def _first_rows(manifest: Manifest, names: frozenset[str], tensors: Iterable[Named]) -> dict[str, Any]:
    dtypes = {meta.name: torch_dtype(meta.dtype) for meta in manifest.params}
    return {
        name: tensor.detach()[:1].to(dtypes[name]).float().tolist()
        for name, tensor in tensors
        if name in names and tensor.dim() > 0
    }


def _walk_to_the_end(source: WeightSource) -> None:
    for _ in source.tensors():
        pass
