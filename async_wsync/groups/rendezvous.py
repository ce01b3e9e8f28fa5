"""Forming an update group: the source listens, members say hello, then all connect.

torch's own rendezvous does not say who is missing, a member that reaches another program at a reused port ignores
its own timeout, and a wrong world size hangs. So before torch's part each member writes a hello into the store, the
source checks it and answers, and each step has a time limit of ours.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
import traceback
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any

import torch

from async_wsync.errors import RendezvousError
from async_wsync.groups.master_address import plain_master_address
from async_wsync.groups.member_end import GroupMember
from async_wsync.groups.nccl import wire_device
from async_wsync.groups.process_group import ProcessGroup
from async_wsync.groups.source_end import UpdateGroup
from async_wsync.groups.store import (
    Store,
    TCPStore,
    enter_store,
    first_line,
    given_up_key,
    open_store,
    rendezvous_error,
    shut_store,
)
from async_wsync.runtime.threads import DaemonWorker, pause, run_bounded, spawn
from async_wsync.runtime.torch_threads import inside_store
from async_wsync.types import GroupSpec

__all__ = ["Rendezvous", "join_group"]

logger = logging.getLogger(__name__)

#: One higher with each change of the hello or of what follows it.
PROTOCOL = 1
#: Seconds that members get to read why there will be no group, before the store's connections are broken.
REFUSAL_SECONDS = 0.2

#: Seconds after which a rendezvous that came about says what may have held it up.
SLOW = 3.0

_POLL_FIRST, _POLL_LAST = 0.002, 0.05


class Rendezvous:
    """The source's side. `open`, hand ``spec`` to every member, `complete`; or `aclose` to give up."""

    def __init__(self, spec: GroupSpec, store: Store, worker: DaemonWorker) -> None:
        self.spec = spec
        self._store: Store | None = store
        self._worker = worker
        self._group: ProcessGroup | None = None

    def __repr__(self) -> str:
        spec = self.spec
        state = "over" if self._store is None else "open"
        return f"<Rendezvous {spec.name!r} {state} at {spec.master_address}:{spec.master_port}>"

    @classmethod
    async def open(
        cls,
        *,
        address: str,
        backend: str,
        name: str,
        epoch: int,
        world_size: int,
        timeout: float,
        connect_timeout: float,
        port: int = 0,
    ) -> Rendezvous:
        """Listen at ``address``, on a free port or on ``port``; if that one is taken, on a free one.

        ``timeout`` bounds every later collective, ``connect_timeout`` the rendezvous, in seconds. Raises
        `RendezvousError` (step "listen"), at once if nobody could reach us at ``address``, and ValueError if that is
        not an address.
        """
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"backend {backend!r} is neither 'gloo' nor 'nccl'")
        if world_size < 2:
            raise ValueError(f"an update group needs at least 2 ranks, got {world_size}")
        wire_device(backend)  # ValueError for NCCL without CUDA, before anybody is asked to join
        address = plain_master_address(address)
        worker = DaemonWorker(f"group {name}")
        opened = False
        try:
            store = await worker.run(open_store, address, port, name, connect_timeout)
            opened = True
        finally:
            if not opened:
                worker.close()
        spec = GroupSpec(
            name=name,
            backend=backend,
            master_address=address,
            master_port=store.port,
            world_size=world_size,
            epoch=epoch,
            timeout=timeout,
            connect_timeout=connect_timeout,
        )
        return cls(spec, store, worker)

    async def complete(
        self,
        members: Mapping[int, str],
        *,
        hello: bool | Collection[int] = True,
        interop: bool = False,
        device: torch.device | None = None,
    ) -> UpdateGroup:
        """Wait for every member and connect with all of them, within ``spec.connect_timeout`` seconds.

        ``members``: rank to engine name, for the ranks 1 to ``world_size`` - 1. ``hello``: which of them say hello
        (all, none, or these ranks); engines that join with torch's own means do not, and are only waited for.
        ``interop`` is short for ``hello=False``. ``device``: the CUDA device to send from, by default this thread's
        (NCCL only).
        Raises `RendezvousError` with ``step`` and ``missing_ranks``; the rendezvous is over then.
        """
        if set(members) != set(range(1, self.spec.world_size)):
            raise ValueError(f"members must name ranks 1 to {self.spec.world_size - 1}, got {sorted(members)}")
        device = wire_device(self.spec.backend, device)  # here: a fresh thread's device is always cuda:0
        if interop or hello is False:
            hello = ()
        with_hello = set(members) if hello is True else set(hello)
        started = time.monotonic()
        deadline = started + self.spec.connect_timeout
        completed = False
        try:
            await self._await_hellos(with_hello, members, deadline)
            group = await self._worker.run(self._connect, with_hello, members, deadline, device)
            completed = True
        finally:
            if not completed:
                self._give_up("the source gave up")
        self._store = None
        _note_slow(self.spec, time.monotonic() - started)
        return UpdateGroup(group, self._worker)

    async def aclose(self) -> None:
        """Give up: members that wait for us fail at once. Idempotent; does nothing once completed."""
        self._give_up("the source gave up")

    def _give_up(self, reason: str) -> None:
        store, self._store = self._store, None
        if store is None:
            return
        group, self._group = self._group, None
        if group is not None:
            group.abort()
            group.drop()
        # The answer is for members that are still waiting; a thread that is stuck in the store is left behind.
        if group is None or not group.store_lost:
            spawn(_refuse, store, self.spec, reason, name=f"close {self.spec.name}")
        self._worker.close()

    async def _await_hellos(self, with_hello: Collection[int], members: Mapping[int, str], deadline: float) -> None:
        missing, delay = set(with_hello), _POLL_FIRST
        while missing:
            missing -= await self._worker.run(self._check_hellos, frozenset(missing), members)
            if not missing:
                return
            if time.monotonic() > deadline:
                raise self._missing("hello", missing, members, "said no hello")
            await asyncio.sleep(delay)
            delay = min(delay * 1.5, _POLL_LAST)

    def _check_hellos(self, ranks: Collection[int], members: Mapping[int, str]) -> set[int]:
        """Those of ``ranks`` that have said hello, checked."""
        store = self._store
        if store is None:
            raise self._error("closed", "the rendezvous was closed meanwhile")
        heard = set()
        try:
            with inside_store():
                for rank in ranks:
                    if store.check([_key(self.spec, "hello", rank)]):
                        self._check(rank, json.loads(store.get(_key(self.spec, "hello", rank))), members)
                        heard.add(rank)
        except RendezvousError:
            raise
        except RuntimeError as error:
            raise self._error("hello", f"the store failed: {first_line(error)}") from error
        except Exception as error:
            raise self._error(
                "hello", f"rank {rank} ({members[rank]}) said a hello that cannot be read: {error!r}"
            ) from error
        return heard

    def _check(self, rank: int, said: dict[str, Any], members: Mapping[int, str]) -> None:
        expected = {"protocol": PROTOCOL, "group": self.spec.name, "world_size": self.spec.world_size}
        wrong = [
            f"{key} {said.get(key)!r} instead of {value!r}" for key, value in expected.items() if said.get(key) != value
        ]
        ranks, given = said.get("num_ranks"), list(members.values()).count(members[rank])
        if ranks is not None and ranks != given:
            wrong.append(f"{ranks} ranks of its engine, and num_ranks={given} was given")
        if wrong:
            who = f"rank {rank} ({members[rank]}, {said.get('member')!r} at {said.get('host')}, pid {said.get('pid')})"
            raise self._error("hello", f"{who} came with {', '.join(wrong)}", [rank])

    def _connect(
        self, with_hello: Collection[int], members: Mapping[int, str], deadline: float, device: torch.device
    ) -> ProcessGroup:
        """In the worker: tell the members to connect, and build the process group with them."""
        store = self._store
        if store is None:
            raise self._error("closed", "the rendezvous was closed meanwhile")
        announcing = [0, *sorted(with_hello)]
        eager = len(announcing) == self.spec.world_size
        group = self._group = ProcessGroup(self.spec, 0, store, device=device)
        try:
            for rank in with_hello:
                store.set(_key(self.spec, "go", rank), json.dumps({"announcing": announcing, "eager": eager}))
            _build_bounded(group, announcing, eager, deadline)
        except Exception as error:
            missing = (group.missing or set(members) - set(with_hello)) if group.awaits_others else set()
            store = None
            _forget_locals(error)
            if isinstance(error, TimeoutError):
                raise self._missing("connect", missing, members, "did not connect") from error
            raise self._error("connect", first_line(error), missing) from error
        return group

    def _missing(self, step: str, ranks: Collection[int], members: Mapping[int, str], what: str) -> RendezvousError:
        who = ", ".join(f"rank {rank} ({members[rank]})" for rank in sorted(ranks)) or "some member"
        return self._error(step, f"{who} {what} within {self.spec.connect_timeout:g} s (Timeouts.connect)", ranks)

    def _error(self, step: str, message: str, missing: Collection[int] = ()) -> RendezvousError:
        return rendezvous_error(self.spec.name, step, message, missing)


def join_group(
    spec: GroupSpec, rank: int, *, member: str, num_ranks: int | None = None, device: torch.device | None = None
) -> GroupMember:
    """Join as ``rank``; ``member`` is the name by which the source's errors call us. ``num_ranks``: how many ranks our
    engine takes, for the source to compare. ``device``: the CUDA device to receive on, by default this thread's (NCCL
    only).

    Blocks, at most ``spec.connect_timeout`` seconds to reach the source, whatever listens there, and
    ``spec.join_timeout`` in all, so call it in a thread. Raises `RendezvousError` with the ``step`` it got to
    (``is_collective`` where it only waited for the source or another member), and ValueError for a rank outside the
    group, or NCCL without CUDA.
    """
    if not 0 < rank < spec.world_size:
        raise ValueError(f"rank {rank} is not one of group {spec.name}'s members 1 to {spec.world_size - 1}")
    device = wire_device(spec.backend, device)
    started = time.monotonic()
    deadline = started + spec.join_timeout
    where = f"{spec.master_address}:{spec.master_port}"
    store = enter_store(spec, started + spec.connect_timeout)
    try:
        go = _say_hello(spec, rank, member, num_ranks, store, deadline)
    except RuntimeError as error:
        raise rendezvous_error(
            spec.name,
            "hello",
            f"the source at {where} gave {member} no answer: {first_line(error)}",
            is_collective=True,
        ) from error
    if "refused" in go:
        told = f"the source at {where} refused {member}: {go['refused']}"
        raise rendezvous_error(spec.name, "hello", told, is_collective=True)
    group = ProcessGroup(spec, rank, store, device=device)
    try:
        _build_bounded(group, go["announcing"], go["eager"], deadline)
    except Exception as error:
        missing, waited = group.missing, group.awaits_others
        group.abort()
        group.drop()
        del store
        _forget_locals(error)
        told = f"{member} could not connect with all: {first_line(error)}"
        raise rendezvous_error(spec.name, "connect", told, missing, is_collective=waited) from error
    return GroupMember(group)


def _say_hello(
    spec: GroupSpec, rank: int, member: str, num_ranks: int | None, store: TCPStore, deadline: float
) -> dict[str, Any]:
    """Say hello and wait for the source's answer.

    Polls, as a thread that waited in the store could neither be called back when the process ends, nor without a C++
    stack in the log.
    """
    with inside_store():
        taken = store.add(_key(spec, "memberships", rank), 1) > 1
    if taken:
        raise rendezvous_error(spec.name, "hello", f"rank {rank} is taken; {member} came second", [])
    hello = {
        "protocol": PROTOCOL,
        "group": spec.name,
        "world_size": spec.world_size,
        "member": member,
        "num_ranks": num_ranks,
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    with inside_store():
        store.set(_key(spec, "hello", rank), json.dumps(hello))
    go, delay = _key(spec, "go", rank), _POLL_FIRST
    while (left := deadline - time.monotonic()) > 0:
        store.set_timeout(timedelta(seconds=max(left, 0.1)))  # of one poll
        with inside_store():
            if store.check([go]):
                answer: dict[str, Any] = json.loads(store.get(go))
                return answer
        pause(delay)
        delay = min(delay * 1.5, _POLL_LAST / 2)
    raise RuntimeError(f"no answer within {spec.join_timeout:g} s")


def _build_bounded(group: ProcessGroup, announcing: Collection[int], eager: bool, deadline: float) -> None:
    run_bounded(
        lambda: group.build(announcing=announcing, eager=eager),
        seconds=deadline - time.monotonic(),
        name=f"connect {group.spec.name}",
        on_expiry=group.abort_building,
    )


def _refuse(store: Store, spec: GroupSpec, reason: str) -> None:
    try:
        with inside_store():
            for rank in range(1, spec.world_size):
                if not store.check([_key(spec, "go", rank)]):
                    store.set(_key(spec, "go", rank), json.dumps({"refused": reason}))
            store.set(given_up_key(spec), reason)
            store.check([given_up_key(spec)])  # an answer means that all of the above has been worked off
            pause(REFUSAL_SECONDS)
    except RuntimeError:
        logger.debug("group %s: the store failed while it was being closed", spec.name, exc_info=True)
    shut_store(spec)


def _note_slow(spec: GroupSpec, seconds: float) -> None:
    if seconds >= SLOW:
        logger.warning(
            "group %s took %.1f s to form. torch's store asks a name server for the name of each address that connects "
            "and waits for it, 5 s for a lost answer. If this comes again: put the nodes into /etc/hosts, or set "
            "RES_OPTIONS='timeout:1 attempts:1' for the source and the engines",
            spec.name,
            seconds,
        )


def _forget_locals(error: BaseException) -> None:
    """Let the frames behind ``error`` go of the store: it would stay open for as long as somebody keeps the error."""
    traceback.clear_frames(error.__traceback__)


def _key(spec: GroupSpec, what: str, rank: int) -> str:
    return f"async_wsync/{spec.name}/{what}/{rank}"
