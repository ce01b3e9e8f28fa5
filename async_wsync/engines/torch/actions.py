"""What happens at an engine: groups joined and left, pauses, and updates from begin to publish.

Methods named after a verb carry it out. Those that return a future are called where the request arrived and must
not block; the others run one by one in the receiver's own thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from functools import partial
from typing import Protocol

from async_wsync.engines.receiving.group_membership import GroupMembership, done_future
from async_wsync.engines.receiving.serving_gate import ServingGate
from async_wsync.engines.receiving.weight_state import Part, Session, WeightState
from async_wsync.engines.torch import messages as p
from async_wsync.engines.torch.targets import (
    Model,
    ReceivedBucket,
    check_manifest,
    covered,
    model_device,
    named_targets,
)
from async_wsync.errors import EngineBusy, EngineFailed
from async_wsync.types import BucketSpec, Call, EngineState, PauseMode

__all__ = ["Hooks", "ReceiverActions"]

_OWN_SHARE = 0.9  # of a call's limit: our error says more than the caller's "no answer"
_MAX_SEATS = 64  # for dead sources that cannot be told from live ones; the memberships joined first go first


class Hooks(Protocol):
    """What the engine itself does about an update. Run in a daemon thread; what they raise fails the call."""

    def on_pause(self, mode: PauseMode) -> None: ...
    def on_resume(self) -> None: ...
    def on_flush(self) -> bool | None: ...
    def on_update_end(self) -> None: ...


class ReceiverActions:
    """The memberships, the gate and the weights of one engine, guarded by ``changed``.

    ``check_fence`` raises for a call whose source has lost the lock.
    """

    def __init__(
        self,
        model: Model,
        hooks: Hooks,
        *,
        name: str,
        changed: threading.Condition,
        check_fence: Callable[[Call], None],
    ) -> None:
        self.name = name
        self.model = model
        self._hooks = hooks
        self._changed = changed
        self._check_fence = check_fence
        self._opening = False
        self._memberships: dict[str, GroupMembership] = {}
        self._leaving: set[Future[None]] = set()
        self.weights = WeightState()
        self.gate = ServingGate(changed, why_shut=self._why_shut)

    def _why_shut(self) -> str | None:
        if self._opening or self.weights.session is not None:
            return EngineState.UPDATING.value
        return EngineState.TORN.value if self.weights.state is EngineState.TORN else None

    # ------------------------------------------------------------------------ groups

    def owns(self, group: str, source: str) -> bool:
        """Whether ``source`` had us join ``group``."""
        membership = self._memberships.get(group)
        return membership is not None and membership.source == source

    def break_off_older(self, fence: int) -> None:
        """Stop what was started under a lower fence."""
        for membership in self._memberships.values():
            if membership.fence < fence and membership.busy:
                membership.abort()

    def join(self, call: Call, verb: p.Join) -> Future[None]:
        spec = verb.group
        with self._changed:
            if spec.name in self._memberships:
                raise EngineFailed(f"group {spec.name} was joined already")
            old = [membership for membership in self._memberships.values() if _is_over(membership, call.source)]
            spare = [
                membership for membership in self._memberships.values() if membership not in old and not membership.busy
            ]
            for membership in [*old, *spare[: max(0, len(self._memberships) - len(old) - _MAX_SEATS + 1)]]:
                self._dismiss(membership)
            membership = GroupMembership(
                spec,
                verb.rank,
                source=call.source,
                fence=call.fence,
                member=self.name,
                device=model_device(self.model) if spec.backend == "nccl" else None,
            )
            self._memberships[spec.name] = membership
        joining = membership.join()
        joining.add_done_callback(lambda done: self._dismiss(membership) if done.exception() else None)
        return joining

    def _dismiss(self, membership: GroupMembership) -> Future[None]:
        with self._changed:
            if self._memberships.get(membership.spec.name) is membership:
                del self._memberships[membership.spec.name]
            if membership.busy:
                membership.abort()
            closing = membership.close()
            self._leaving.add(closing)
        closing.add_done_callback(self._left)
        return closing

    def _left(self, closing: Future[None]) -> None:
        with self._changed:
            self._leaving.discard(closing)

    def leave(self, call: Call, verb: p.Leave) -> Future[None]:
        self._break_off_if(lambda part: part.update.group == verb.group and bool(part.missing))
        membership = self._memberships.get(verb.group)
        return done_future() if membership is None else self._dismiss(membership)

    def abort(self, call: Call, verb: p.Abort) -> Future[None]:
        self._break_off_if(lambda part: part.update.group == verb.group)
        membership = self._memberships.get(verb.group)
        if membership is None:
            return done_future()
        membership.abort()
        return membership.quiet()

    def _break_off_if(self, lost: Callable[[Part], bool]) -> None:
        """Close the open session if one of its parts can't be completed any more."""
        with self._changed:
            session = self.weights.session
            if session is not None and any(lost(part) for part in session.parts.values()):
                self.weights.break_off()
                self._changed.notify_all()

    # ------------------------------------------------------------------------ pauses

    def pause(self, call: Call, verb: p.Pause) -> None:
        until = _limit(call)
        with self._changed:
            self.gate.paused = True
            self.gate.abort_requested = verb.mode is PauseMode.ABORT
        self._hooks.on_pause(verb.mode)
        self._empty_gate(call, until)

    def _empty_gate(self, call: Call, until: float) -> None:
        if not self.gate.wait_until_empty(until, still_wanted=lambda: self._check_fence(call)):
            raise EngineBusy(f"{self.gate.inside} requests still run near the limit of {call.timeout:g} s")

    def resume(self, call: Call, verb: p.Resume) -> None:
        with self._changed:
            if (reason := self._why_shut()) is not None:
                raise EngineFailed(f"it is {reason} and must not serve; a whole update that is published heals it")
        self._hooks.on_resume()
        with self._changed:
            self.gate.paused = self.gate.abort_requested = False
            self._changed.notify_all()

    def flush(self, call: Call, verb: p.Flush) -> None:
        if self._hooks.on_flush() is False:
            raise EngineBusy("on_flush refused")

    # ------------------------------------------------------------------------ one update

    def check(self, call: Call, verb: p.Check) -> tuple[str, ...]:
        update = p.unpack_update(verb.update)
        targets = named_targets(self.model)
        left_out = check_manifest(update.manifest, targets, strict=update.strict)
        if not left_out:
            return ()
        with self._changed:
            self.weights.check_base(update.base, targets.keys() - set(left_out), left_out)
        return (f"{len(left_out)} tensors keep their old values",)

    def begin(self, call: Call, verb: p.Begin) -> None:
        until = _limit(call)
        update = p.unpack_update(verb.update)
        targets = named_targets(self.model)
        check_manifest(update.manifest, targets, strict=update.strict)
        with self._changed:
            adds_part = self.weights.accepts_part(update.update_id, call.source)
            self._opening = True
        try:
            if not adds_part:
                self._break_off_session(until)
            self._empty_gate(call, until)
            with self._changed:
                self._check_fence(call)
                membership = self._memberships.get(update.group)
                if update.buckets and (membership is None or membership.aborted):
                    raise EngineFailed(f"group {update.group} is {'not joined' if membership is None else 'broken'}")
                part = self.weights.begin(update, call.source, targets)
                if membership is not None:
                    membership.fence = call.fence
                    membership.expect(list(part.buckets))
        finally:
            with self._changed:
                self._opening = False
                self._changed.notify_all()

    def _break_off_session(self, until: float) -> None:
        """Close the open session, if any, and return once no thread can write into the model any more."""
        with self._changed:
            self.weights.break_off()
            self._changed.notify_all()
            busy = [membership for membership in self._memberships.values() if membership.busy]
            for membership in busy:
                membership.abort()
            leaving = [*self._leaving, *(membership.quiet() for membership in busy)]
        _, stuck = wait_for_all(leaving, timeout=max(0.0, until - time.monotonic()))
        if stuck:
            raise EngineBusy(f"{len(stuck)} receive threads are still in a collective")

    def receive(self, call: Call, verb: p.Receive) -> Future[None]:
        with self._changed:
            session, part = self.weights.part(verb.update_id, call.source)
            membership = self._memberships.get(part.update.group)
            if membership is None or verb.index not in part.buckets:
                raise EngineFailed(f"no bucket {verb.index}, or group {part.update.group} was left")
            self._check_fence(call)
            membership.fence = call.fence
            # Started under the condition, so that whoever brings a higher fence finds it and breaks it off.
            job = partial(self._land, membership, session, part, part.buckets[verb.index], call.timeout)
            return membership.receive(verb.index, job)

    def _land(
        self, membership: GroupMembership, session: Session, part: Part, bucket: BucketSpec, timeout: float
    ) -> None:
        """In the seat's thread: receive one bucket and put it into the model."""
        try:
            landing = ReceivedBucket(bucket, session.targets, part.update.manifest.aliases, device=membership.device)
            with self._changed:
                self.weights.check_open(session)
                self.weights.suspect(landing.in_place)
            membership.broadcast(landing.buffers, timeout)
            with self._changed:
                self.weights.check_open(session)
                self.weights.suspect(landing.names)
            landing.apply()
            with self._changed:
                self.weights.check_open(session)
                part.landed.add(bucket.index)
        except Exception:
            # The group is of no use any more: its members no longer agree on what comes next.
            membership.abort()
            with self._changed:
                self.weights.break_off(session)
                self._changed.notify_all()
            raise

    def end(self, call: Call, verb: p.End) -> None:
        with self._changed:
            session = self.weights.session
            targets = {} if session is None else session.targets
            session = self.weights.check_complete(verb.update_id, lambda sent: covered(sent, targets))
        self._hooks.on_update_end()
        with self._changed:
            self._check_fence(call)
            self.weights.end(session)

    def publish(self, call: Call, verb: p.Publish) -> None:
        with self._changed:
            self.weights.publish(verb.version, call.fence)
            self._changed.notify_all()

    def reset(self, call: Call, verb: p.Reset) -> None:
        self._break_off_session(_limit(call))


def _limit(call: Call) -> float:
    """Until when (time.monotonic()) to wait for others on behalf of ``call``."""
    return time.monotonic() + _OWN_SHARE * call.timeout


def _is_over(membership: GroupMembership, joining: str) -> bool:
    """Whether a membership may go now that the source ``joining`` builds a new group.

    The engines of a dead source's group stay connected with each other, so one lost member must do. NCCL cannot tell,
    and its communicators hold much memory: there one of each source must do.
    """
    return membership.useless or (membership.source == joining and membership.spec.backend == "nccl")
