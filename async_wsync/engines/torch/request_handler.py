"""The engine's end of the protocol: admits requests, starts their verbs, tells what became of them.

Threads. Requests arrive on the actor's own threads (or its event loop) and never block there; most arrive on those
of control connections. Pauses, hooks and all that changes the session run one by one in one daemon thread;
collectives run in one for each group. All state is guarded by one condition, which is never held while anything blocks.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

from async_wsync.engines.receiving.receiving_end import ReceivingEnd
from async_wsync.engines.torch import messages as p
from async_wsync.engines.torch.actions import Hooks, ReceiverActions
from async_wsync.engines.torch.control import ControlServer
from async_wsync.engines.torch.targets import Model, model_device, named_targets
from async_wsync.engines.update_codec import pack_checksums
from async_wsync.runtime.object_refs import node_address
from async_wsync.runtime.threads import DaemonWorker
from async_wsync.transfer.checksum import model_digests
from async_wsync.types import Call, EngineInfo

__all__ = ["RequestHandler"]

_INSTANT = 0.003  # seconds


class RequestHandler:
    """Everything behind `WeightReceiver`. ``entry``: what is called with requests that come beside Ray's queue."""

    def __init__(self, model: Model, hooks: Hooks, *, name: str, entry: Callable[[p.Request], Any]) -> None:
        self._receiving = ReceivingEnd(member=name, device=lambda: model_device(model))
        self.actions = ReceiverActions(model, hooks, self._receiving)
        self._ops = DaemonWorker("wsync-receiver")
        self._control = ControlServer(entry)
        actions, receiving = self.actions, self._receiving
        self._verbs: dict[type[p.Verb], Callable[[Call, Any], Any]] = {
            p.Hello: self._hello,
            p.Join: lambda call, verb: receiving.memberships.join(call, verb.group, verb.rank),
            p.Leave: lambda call, verb: receiving.leave(verb.group),
            p.Abort: lambda call, verb: receiving.abort(verb.group),
            p.Receive: actions.receive,
            p.Check: self._later(actions.check),
            p.Pause: self._later(actions.pause),
            p.Flush: self._later(actions.flush),
            p.Begin: self._later(actions.begin),
            p.End: self._later(actions.end),
            p.Publish: self._later(lambda call, verb: receiving.publish(call, verb.version)),
            p.Resume: self._later(actions.resume),
            p.Reset: self._later(actions.reset),
            p.Checksums: self._later(self._checksums),
        }

    def handle(self, request: p.Request) -> p.Reply:
        """Start what is asked, or tell what became of it. Never raises for what the world does.

        Blocks for no longer than `_INSTANT`: most verbs are over by then, which saves their caller a poll.
        """
        verb = request.verb
        if isinstance(verb, p.Poll):
            return self._reply(verb.request_id)
        under_way = self._receiving.requests.run(request.id, lambda: self._start(request))
        if under_way is not None and not isinstance(verb, p.Join | p.Receive):
            wait([under_way], timeout=_INSTANT)
        reply = self._reply(request.id)
        if isinstance(verb, p.Hello) and verb.control:
            return replace(reply, control=self._control.open(node_address(), verb.control))
        return reply

    def _reply(self, request_id: str) -> p.Reply:
        outcome = self._receiving.requests.outcome(request_id)
        with self._receiving.changed:
            return p.Reply(
                incarnation=self._receiving.incarnation,
                done=outcome is not None,
                value=None if outcome is None else outcome.value,
                failure=None if outcome is None else outcome.failure,
                state=self._receiving.weights.state,
                version=self._receiving.weights.version,
            )

    def _start(self, request: p.Request) -> Any:
        admission, verb = self._receiving.admission, request.verb
        admission.check_incarnation(request.incarnation)
        if not isinstance(verb, p.Hello):
            admission.admit(request.call, ends=verb.group if isinstance(verb, p.Abort | p.Leave) else None)
        return self._verbs[type(verb)](request.call, verb)

    def _later(self, verb_fn: Callable[[Call, Any], Any]) -> Callable[[Call, Any], Future[Any]]:
        def run(call: Call, verb: Any) -> Any:
            self._receiving.admission.check_fence(call)  # it may have waited here while another took over
            return verb_fn(call, verb)

        return lambda call, verb: self._ops.submit(run, call, verb)

    def _hello(self, call: Call, verb: p.Hello) -> EngineInfo:
        device = str(model_device(self.actions.model))
        weights = self._receiving.weights
        with self._receiving.changed:
            return EngineInfo(
                incarnation=self._receiving.incarnation,
                version=weights.version,
                update_id=weights.update_id,
                state=weights.state,
                device=device,
                host=socket.gethostname(),
                pid=os.getpid(),
            )

    def _checksums(self, call: Call, verb: p.Checksums) -> list[bytes]:
        return pack_checksums(model_digests(named_targets(self.actions.model)))
