"""One member's end of a torch process group; the only file that uses torch's less public distributed API.

Groups are built directly, outside torch's global registry: no default group is touched, a name can be used
again, and whoever holds the last reference decides when the group goes. Measured with torch 2.13 and gloo:

- abort, shutdown and destroy free nobody who is blocked; shutting the sockets down does (see `sockets`);
- dropping the last reference to a busy group blocks the thread that drops it, so a daemon thread does;
- a collective's own ``timeout`` option is honoured, and works per call.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from async_wsync.groups import nccl, sockets
from async_wsync.groups.gloo import addresses_in_records, new_device
from async_wsync.groups.store import PrefixStore, Store, given_up_key, shut_store
from async_wsync.runtime.threads import pause, spawn
from async_wsync.runtime.torch_threads import EXIT_GRACE
from async_wsync.types import GroupSpec

__all__ = ["ProcessGroup"]

logger = logging.getLogger(__name__)


_live: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
_exit_hook = threading.Lock()  # held once the hook is registered


class ProcessGroup:
    """A torch process group of which the source is rank 0, and what it takes to break it up.

    ``device``: where the tensors of its collectives lie, see `nccl.wire_device`; by default the one for this thread.
    """

    def __init__(self, spec: GroupSpec, rank: int, store: Store, *, device: torch.device | None = None) -> None:
        self.spec = spec
        self.rank = rank
        self.device = nccl.wire_device(spec.backend, device)
        self._store: Store | None = store
        self._device: Any = None
        self._pg: Any = None
        self._stream: nccl.NcclStream | None = None
        self._nccl_aborted = False
        self._own: sockets.Address | None = None
        self._peers: frozenset[sockets.Address] = frozenset()
        self._fds: frozenset[int] | None = None
        self._missing: frozenset[int] = frozenset()
        self._awaits_others = False
        self._lock = threading.Lock()
        self._inside = 0
        self._left_behind: list[Any] = []
        self._aborted = False
        self._store_lost = False
        self._dropped: Future[None] | None = None
        _live.add(self)
        if _exit_hook.acquire(blocking=False):
            atexit.register(_at_exit)

    def __del__(self) -> None:
        # Forgotten. Whoever collects it must neither block nor be one of gloo's threads.
        if self._dropped is None and self._pg is not None and not sys.is_finalizing():
            self.abort()
            self.drop()

    @property
    def aborted(self) -> bool:
        return self._aborted

    @property
    def built(self) -> bool:
        """True once all members are connected."""
        return self._pg is not None

    @property
    def dropped(self) -> bool:
        return self._dropped is not None

    @property
    def missing(self) -> frozenset[int]:
        """The announcing ranks that `build` has not heard of yet."""
        return self._missing

    @property
    def awaits_others(self) -> bool:
        """True once `build` has done its own part: what fails from then on may be another member's doing."""
        return self._awaits_others

    def build(self, *, announcing: Collection[int], eager: bool) -> None:
        """Connect to all other members. Blocks, until ``spec.join_timeout`` at the longest.

        ``announcing``: the ranks that tell their listening address as we do. ``eager``: every member connects now (NCCL
        alone would wait for the first collective). Raises RuntimeError (torch's, or when aborted meanwhile).
        """
        with self.entered():
            if self.spec.backend == "gloo":
                self._build_gloo(announcing)
            elif self.spec.backend == "nccl":
                self._build_nccl(announcing, eager)
            else:
                raise ValueError(f"backend {self.spec.backend!r} is neither 'gloo' nor 'nccl'")
        if self._aborted:
            self.abort()  # again: the first one came before there was everything to break
            raise RuntimeError("the group was broken up while it was being built")

    def abort_building(self) -> None:
        """Make a blocked `build` return: break up what is there of the group and, where torch waits for the store, our
        connection to that."""
        self.abort()
        if not self._missing:
            self._store_lost = True
            shut_store(self.spec)

    @property
    def store_lost(self) -> bool:
        """True once `abort_building` had to break the store's connections, too."""
        return self._store_lost

    def start(
        self,
        tensors: Sequence[torch.Tensor],
        works: list[Any],
        *,
        after: Iterable[Any] = (),
        timeout: float | None = None,
    ) -> None:
        """Start the broadcasts of ``tensors`` from rank 0, in order, and add torch's Works to ``works``, those started
        before a failure too. ``after``: CUDA events that must come first. ``timeout`` in seconds (gloo only).
        """
        if self._stream is not None:
            self._stream.start(self._broadcast, tensors, works, after=after)
        else:
            works.extend(self._broadcast(tensor, timeout) for tensor in tensors)

    def _broadcast(self, tensor: torch.Tensor, timeout: float | None = None) -> Any:
        pg = self._pg
        if pg is None or self._aborted:
            raise RuntimeError("the group was broken up")
        if tensor.device != self.device:
            raise RuntimeError(f"a tensor on {tensor.device} cannot be sent in a group on {self.device}")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.asyncOp = True
        if self.spec.backend == "gloo":
            options.timeout = timedelta(seconds=self.spec.timeout if timeout is None else timeout)
        return pg.broadcast([tensor], options)

    @property
    def idle(self) -> bool:
        """NCCL: True once the GPU is done with all that was started."""
        return self._stream is None or self._stream.idle

    def abort(self) -> None:
        """Break the group up, at once and from any thread: collectives blocked here, and at connected peers, fail."""
        self._aborted = True
        if self.spec.backend == "nccl":
            with self._lock:
                pg = None if self._nccl_aborted else self._pg
                self._nccl_aborted = self._nccl_aborted or pg is not None
            if pg is not None:
                spawn(self._abort_nccl, pg, name=f"abort {self.spec.name}")
            return
        # Never touch the group itself here: gloo's own threads come this way, and one that held the last reference
        # to it would end the process by joining itself.
        broken = sockets.break_connections(self._is_ours(), among=self._fds)
        if broken:
            logger.debug("group %s: broke %d connections", self.spec.name, broken)

    def _abort_nccl(self, pg: Any) -> None:
        with self.entered():
            nccl.abort_group(pg)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Around whatever may block in torch, or be called from its threads: the interpreter's end waits for it a
        little, since a thread that comes back from C++ after that would end the process with an abort."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        with self._lock:
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1

    @property
    def busy(self) -> bool:
        """True while some thread is inside torch on the group's behalf."""
        return self._inside > 0

    @property
    def lingers(self) -> bool:
        """True while works that were left behind still run."""
        return not all(work.is_completed() for work in list(self._left_behind))

    def drop(self) -> Future[None]:
        """Let go of the group in a daemon thread, since that blocks while collectives run; the future tells when."""
        with self._lock:
            if self._dropped is None:
                parts = [self._pg, self._device, self._store]
                self._pg = self._device = self._store = None
                orderly = self.spec.backend == "nccl" and not self._aborted
                self._dropped = spawn(_drop, parts, self._left_behind, orderly, name=f"drop {self.spec.name}")
            return self._dropped

    def leave_behind(self, works: Sequence[Any]) -> None:
        """Nobody waits for ``works`` any more. Those that still run, as gloo's do when a connection was lost half-way,
        end with their timeout; until then they and the group must not be freed, since that would block."""
        if self.spec.backend == "gloo":
            self._left_behind.extend(work for work in works if not work.is_completed())

    def connections(self) -> int:
        """How many open connections of this process belong to the group."""
        return len(sockets.find_connections(self._is_ours()))

    @property
    def fds(self) -> frozenset[int]:
        """The file descriptors that the group's connections had when it was built; gloo closes one that is lost."""
        return self._fds or frozenset()

    def _is_ours(self) -> Callable[[sockets.Address, sockets.Address], bool]:
        own, peers = self._own, self._peers
        return lambda local, peer: local == own or peer in peers

    def _prefixed(self, device: str) -> Store:
        # The prefixes that torch's own helper ends up with for a group of this name, so that engines which
        # join through ``init_process_group``-like helpers (SGLang's does) find us.
        name, store = self.spec.name, self._store
        if store is None:
            raise RuntimeError("the group was dropped")
        return PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))

    def _exchange(self, announcing: Collection[int]) -> dict[int, sockets.Address]:
        """Tell our listening address through the store, and learn those of the other ranks that know theirs.

        Polls: torch's store client serves one call at a time, so a blocking one could not be looked behind.
        """
        store = self._store
        if store is None:
            raise RuntimeError("the group was dropped")
        self._awaits_others = True
        table = PrefixStore(f"async_wsync/{self.spec.name}/address", store)
        table.set(str(self.rank), f"{self._own[1]} {self._own[0]}" if self._own else "")
        heard: dict[int, sockets.Address] = {}
        self._missing, delay = frozenset(announcing) - {self.rank}, 0.001
        while self._missing:
            if self._aborted or store.check([given_up_key(self.spec)]):
                raise RuntimeError("the group was given up while it was being built")
            there = [rank for rank in self._missing if table.check([str(rank)])]
            for rank in there:
                port, _, host = table.get(str(rank)).decode().partition(" ")
                if host:
                    heard[rank] = (host, int(port))
            self._missing = self._missing.difference(there)
            if not there:
                pause(delay)
                delay = min(delay * 1.5, 0.02)
        return heard

    def _build_gloo(self, announcing: Collection[int]) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        # Of connecting; each collective is given its own. A shorter one here would fail the group at all members at
        # once, for want of one, before the source decides.
        options._timeout = timedelta(seconds=max(self.spec.timeout, self.spec.join_timeout))
        options._threads = 4
        device, candidates = new_device(self.spec)
        options._devices = [device]
        self._own = candidates[0] if len(candidates) == 1 else None
        peers = self._exchange(announcing)
        self._peers = frozenset(peers.values())
        table = self._prefixed("cpu")
        pg = gloo(table, self.rank, self.spec.world_size, options)
        own = self._own
        unknown = set(range(self.spec.world_size)) - peers.keys() - {self.rank}
        if unknown or own is None:
            own, found = addresses_in_records(table, self.rank, candidates, unknown)
            peers |= found
        with self._lock:
            self._pg, self._device = pg, device
            self._own, self._peers = own, frozenset(peers.values())
            self._fds = sockets.find_connections(self._is_ours())

    def _build_nccl(self, announcing: Collection[int], eager: bool) -> None:
        self._exchange(announcing)
        with torch.cuda.device(self.device):
            pg = nccl.new_group(self.spec, self.rank, self._prefixed("cuda"))
            stream = nccl.NcclStream(self.device)
            with self._lock:
                self._pg, self._stream = pg, stream
            if eager:
                pg.eager_connect_single_device(self.device)


def _drop(parts: list[Any], works: list[Any], orderly: bool) -> None:
    """Free the parts of a group, in a thread that nobody misses. One that is still in here when the interpreter ends
    keeps them for good, which is best: freeing them would block. ``orderly``: NCCL's communicator is shut down first.
    """
    while not all(work.is_completed() for work in works):
        pause(0.05)
    works.clear()
    if orderly and parts[0] is not None:
        nccl.shut_down(parts[0])
    parts.clear()


def _at_exit() -> None:
    """Break up what is left. A thread that comes back from a collective into a dying interpreter would crash it."""
    groups = list(_live)
    for group in groups:
        group.abort() if group.built else group.abort_building()
    deadline = time.monotonic() + EXIT_GRACE
    while any(group.busy for group in groups) and time.monotonic() < deadline:
        pause(0.002)
    lingering = [group.drop() for group in groups if group.lingers]
    drops = {group.drop() for group in groups}.difference(lingering)
    wait(drops, timeout=max(0.0, deadline - time.monotonic()))
