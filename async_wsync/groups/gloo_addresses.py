"""Which sockets are a gloo group's: where its members listen for each other.

gloo tells nobody. Each member opens one listening socket for a group, which is told from the others of its
process by looking before and after, and all put a record of theirs into the store.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection, Sequence
from typing import Any

import torch.distributed as dist

from async_wsync.groups import sockets
from async_wsync.groups.store import Store
from async_wsync.types import GroupSpec

__all__ = ["addresses_in_records", "new_device"]

logger = logging.getLogger(__name__)

# One device is made at a time, so that its listening socket can be told from those of other groups.
_device_lock = threading.Lock()


def new_device(spec: GroupSpec) -> tuple[Any, tuple[sockets.Address, ...]]:
    """A gloo device, and the address on which it listens; several where others of this process came up meanwhile.

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

    A record holds a raw ``sockaddr`` at some place. The place is where our own record holds one of our own candidates;
    where there is none, the format is not the one known, and nothing is guessed: then the group's timeout alone
    bounds a blocked collective.
    """
    for key in ("0/{}", "{}"):
        if not table.check([key.format(rank)]):
            continue
        ours = table.get(key.format(rank))
        for own in candidates:
            place = ours.find(sockets.pack_address(own))
            if place >= 0:
                records = {r: table.get(key.format(r)) for r in others if table.check([key.format(r)])}
                found = {r: sockets.unpack_address(record[place:]) for r, record in records.items()}
                return own, {r: address for r, address in found.items() if address is not None}
    logger.info("gloo's records are of an unknown format; group members cannot be freed before their timeout")
    return None, {}
