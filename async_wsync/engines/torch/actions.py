"""What happens to an engine's model: pauses, and updates from begin to end.

Methods named after a verb carry it out. `receive` is called where the request arrived and must not block; the others
run one by one in the receiver's own thread.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from typing import Protocol

from async_wsync.engines.receiving.receiving_end import IncomingBucket, ReceivingEnd
from async_wsync.engines.receiving.serving_gate import ServingGate
from async_wsync.engines.torch import messages as p
from async_wsync.engines.torch.targets import Model, ReceivedBucket, check_manifest, covered, named_targets
from async_wsync.engines.update_codec import unpack_update
from async_wsync.errors import EngineBusy, EngineFailed
from async_wsync.types import Call, EngineState, PauseMode

__all__ = ["Hooks", "ReceiverActions"]

_OWN_SHARE = 0.9  # of a call's limit: our error says more than the caller's "no answer"


class Hooks(Protocol):
    """What the engine itself does about an update. Run in a daemon thread; what they raise fails the call."""

    def on_pause(self, mode: PauseMode) -> None: ...
    def on_resume(self) -> None: ...
    def on_flush(self) -> bool | None: ...
    def on_update_end(self) -> None: ...


class ReceiverActions:
    """What `ReceivingEnd` does not do by itself: the model, its hooks and the serving gate."""

    def __init__(self, model: Model, hooks: Hooks, receiving: ReceivingEnd) -> None:
        self.model = model
        self.weights = receiving.weights
        self._hooks = hooks
        self._receiving = receiving
        self._changed = receiving.changed
        self._check_fence = receiving.admission.check_fence
        self._opening = False
        self.gate = ServingGate(receiving.changed, why_shut=self._why_shut)

    def _why_shut(self) -> str | None:
        if self._opening or self.weights.session is not None:
            return EngineState.UPDATING.value
        return EngineState.TORN.value if self.weights.state is EngineState.TORN else None

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
        update = unpack_update(verb.update)
        targets = named_targets(self.model)
        left_out = check_manifest(update.manifest, targets, strict=update.strict)
        if not left_out:
            return ()
        with self._changed:
            self.weights.check_base(update.base, targets.keys() - set(left_out), left_out)
        return (f"{len(left_out)} tensors keep their old values",)

    def begin(self, call: Call, verb: p.Begin) -> None:
        until = _limit(call)
        update = unpack_update(verb.update)
        targets = named_targets(self.model)
        check_manifest(update.manifest, targets, strict=update.strict)
        with self._changed:
            adds_part = self.weights.accepts_part(update.update_id, call.source)
            self._opening = True
        try:
            if not adds_part:
                self._break_off_session(until)
            self._empty_gate(call, until)
            self._receiving.begin(call, update, targets)
        finally:
            with self._changed:
                self._opening = False
                self._changed.notify_all()

    def _break_off_session(self, until: float) -> None:
        """Close the open session, if any, and return once no thread can write into the model any more."""
        with self._changed:
            aborted = self._receiving.break_off()
            leaving = [*self._receiving.memberships.leaving, *(membership.when_idle() for membership in aborted)]
        _, stuck = wait_for_all(leaving, timeout=max(0.0, until - time.monotonic()))
        if stuck:
            raise EngineBusy(f"{len(stuck)} receive threads are still in a collective")

    def receive(self, call: Call, verb: p.Receive) -> Future[None]:
        return self._receiving.receive(call, verb.update_id, verb.index, self._receive)

    def _receive(self, incoming: IncomingBucket) -> None:
        """In the group's thread: receive one bucket and put it into the model."""
        aliases, device = incoming.part.update.manifest.aliases, incoming.membership.device
        received = ReceivedBucket(incoming.bucket, incoming.session.targets, aliases, device=device)
        self._receiving.will_write(incoming, received.in_place)
        incoming.receive_into(received.buffers)
        self._receiving.will_write(incoming, received.names)
        received.apply()
        self._receiving.arrived(incoming)

    def end(self, call: Call, verb: p.End) -> None:
        with self._changed:
            session = self.weights.session
            targets = {} if session is None else session.targets
            session = self.weights.check_complete(verb.update_id, lambda sent: covered(sent, targets))
        self._hooks.on_update_end()
        with self._changed:
            self._check_fence(call)
            self.weights.end(session)

    def reset(self, call: Call, verb: p.Reset) -> None:
        self._break_off_session(_limit(call))


def _limit(call: Call) -> float:
    """Until when (time.monotonic()) to wait for others on behalf of ``call``."""
    return time.monotonic() + _OWN_SHARE * call.timeout
