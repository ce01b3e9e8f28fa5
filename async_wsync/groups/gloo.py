"""What gloo does not offer: which sockets are a group's, and a wait that ends when one of them is lost.

gloo does not say where its members listen for each other. Each member opens one listening socket for a group; comparing
the process's listening sockets before and after shows which, and every member puts a record of it into the store.

Collectives are waited for from Python threads, in short steps. Not by callbacks: gloo's threads call those whenever a
collective ends, and one that ends while the interpreter does takes the process down. Not in one long wait: gloo forgets
a transfer that is half-way when its connection is lost, so that its work ends only with its timeout.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from async_wsync.groups import sockets
from async_wsync.groups.socket_watch import WATCH_INTERVAL, SocketWatch
from async_wsync.groups.store import Store
from async_wsync.types import GroupSpec

__all__ = ["addresses_in_records", "new_device", "wait_for_gloo"]

logger = logging.getLogger(__name__)

# One device is made at a time, so that its listening socket can be told from those of other groups.
_device_lock = threading.Lock()


def new_device(spec: GroupSpec) -> tuple[Any, tuple[sockets.Address, ...]]:
    """A gloo device, and the address on which it listens; several if other sockets of this process came up meanwhile.

    Bound to the interface that leads to the source, unless the user named one: torch's default is whatever the
    host's name resolves to, which on many machines is a loopback address.
    """
    create = dist.ProcessGroupGloo.create_device
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    host = sockets.local_address(spec.master_address, spec.master_port)
    with _device_lock:
        for _ in range(3):
            before = sockets.listeners()
            if interface:
                device = create(interface=interface)
            elif host is not None:
                device = create(hostname=host)
            else:
                device = dist.ProcessGroupGloo.create_default_device()
            new = tuple(address for inode, address in sockets.listeners().items() if inode not in before)
            if len(new) == 1:
                break
    return device, new


def addresses_in_records(
    table: Store, rank: int, candidates: Sequence[sockets.Address], others: Collection[int]
) -> tuple[sockets.Address | None, dict[int, sockets.Address]]:
    """Our own listening address, one of ``candidates``, and those of ``others``, from gloo's records in the store.

    A record holds a raw ``sockaddr`` at some offset, which is found by looking for one of our own candidates in our own
    record. If it is not there, we do not know the format and guess nothing: then only the group's timeout bounds a
    blocked collective.
    """
    for key in ("0/{}", "{}"):
        if not table.check([key.format(rank)]):
            continue
        ours = table.get(key.format(rank))
        for own in candidates:
            offset = ours.find(sockets.pack_address(own))
            if offset >= 0:
                records = {r: table.get(key.format(r)) for r in others if table.check([key.format(r)])}
                found = {r: sockets.unpack_address(record[offset:]) for r, record in records.items()}
                return own, {r: address for r, address in found.items() if address is not None}
    logger.info("gloo's records are of an unknown format; group members cannot be freed before their timeout")
    return None, {}


def wait_for_gloo(work: Any, *, stop: Callable[[], bool], sockets: SocketWatch, deadline: float = math.inf) -> None:
    """Block until ``work`` is over. Raises RuntimeError: its own, or when ``stop()``, when a connection of the group
    is gone, or past ``deadline`` by time.monotonic(). After the latter three the work may still run."""
    while True:
        left = deadline - time.monotonic()
        try:
            work.wait(timedelta(seconds=max(0.001, min(left, WATCH_INTERVAL))))
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises the work's own error, or it has succeeded meanwhile
                return
            if stop():
                raise RuntimeError("the group was broken up") from None
            if not sockets.all_open:
                raise RuntimeError("a connection of the group was lost") from None
            if left <= 0:
                raise
