"""The engine's end of the protocol: admits requests, starts their verbs, tells what became of them.

Threads. Requests arrive on the actor's own threads (or its event loop) and never block there; most arrive on those
of control connections. Pauses, hooks and
all that changes the session run one by one in one daemon thread; collectives run in one for each group. All
state is guarded by one condition, which is never held while anything blocks.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

from async_wsync.engines.failure import Failure
from async_wsync.engines.receiving.request_log import RequestLog
from async_wsync.engines.torch import messages as p
from async_wsync.engines.torch.actions import Hooks, ReceiverActions
from async_wsync.engines.torch.control import ControlServer
from async_wsync.engines.torch.targets import Model, model_device, named_targets
from async_wsync.errors import EngineFailed, EngineReplaced, StaleFence
from async_wsync.runtime.foreign_code import contained
from async_wsync.runtime.object_refs import node_address
from async_wsync.runtime.threads import DaemonWorker
from async_wsync.transfer.checksum import model_digests
from async_wsync.types import Call, EngineInfo

__all__ = ["RequestHandler"]

_INSTANT = 0.003  # seconds


class RequestHandler:
    """Everything behind `WeightReceiver`. ``entry``: what is called with requests that come beside Ray's queue."""

    def __init__(self, model: Model, hooks: Hooks, *, name: str, entry: Callable[[p.Request], Any]) -> None:
        self.incarnation = uuid.uuid4().hex
        self._changed = threading.Condition(threading.RLock())
        self.actions = ReceiverActions(model, hooks, name=name, changed=self._changed, check_fence=self._check_fence)
        self._fence = 0
        self._requests = RequestLog()
        self._ops = DaemonWorker("wsync-receiver")
        self._control = ControlServer(entry)
        actions = self.actions
        self._verbs: dict[type[p.Verb], Callable[[Call, Any], Any]] = {
            p.Hello: self._hello,
            p.Join: actions.join,
            p.Leave: actions.leave,
            p.Abort: actions.abort,
            p.Receive: actions.receive,
            p.Check: self._later(actions.check),
            p.Pause: self._later(actions.pause),
            p.Flush: self._later(actions.flush),
            p.Begin: self._later(actions.begin),
            p.End: self._later(actions.end),
            p.Publish: self._later(actions.publish),
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
        if self._requests.open(request.id):
            try:
                with contained():
                    self._admit(request)
                    answer = self._verbs[type(verb)](request.call, verb)
            except Exception as error:
                self._requests.settle(request.id, error=error)
            else:
                if isinstance(answer, Future):
                    self._requests.follow(request.id, answer)
                    if not isinstance(verb, p.Join | p.Receive):
                        wait([answer], timeout=_INSTANT)
                else:
                    self._requests.settle(request.id, value=answer)
        reply = self._reply(request.id)
        if isinstance(verb, p.Hello) and verb.control:
            return replace(reply, control=self._control.open(node_address(), verb.control))
        return reply

    def _reply(self, request_id: str) -> p.Reply:
        known, outcome = self._requests.look_up(request_id)
        failure = None if outcome is None else outcome.failure
        if not known:
            failure = Failure.of(EngineFailed(f"request {request_id} is not known here"))
        with self._changed:
            return p.Reply(
                incarnation=self.incarnation,
                done=outcome is not None or not known,
                value=None if outcome is None else outcome.value,
                failure=failure,
                state=self.actions.weights.state,
                version=self.actions.weights.version,
            )

    def _admit(self, request: p.Request) -> None:
        if request.incarnation not in (None, self.incarnation):
            raise EngineReplaced("this engine was restarted: it has neither the group nor the weights it had")
        verb, call = request.verb, request.call
        if isinstance(verb, p.Hello):
            return
        with self._changed:
            if isinstance(verb, p.Abort | p.Leave) and self.actions.owns(verb.group, call.source):
                return  # whoever lost the lock may still stop what it started, and clean up
            self._check_fence(call)
            if call.fence > self._fence:
                self._fence = call.fence
                self._changed.notify_all()
                self.actions.break_off_older(call.fence)

    def _check_fence(self, call: Call) -> None:
        with self._changed:
            if call.fence < self._fence:
                raise StaleFence(
                    f"fence {call.fence} of {call.source!r} is stale, {self._fence} was seen: the caller lost the lock",
                    fence=call.fence,
                    seen=self._fence,
                )

    def _later(self, verb_fn: Callable[[Call, Any], Any]) -> Callable[[Call, Any], Future[Any]]:
        def run(call: Call, verb: Any) -> Any:
            self._check_fence(call)  # it may have waited here while another took over
            return verb_fn(call, verb)

        return lambda call, verb: self._ops.submit(run, call, verb)

    def _hello(self, call: Call, verb: p.Hello) -> EngineInfo:
        device = str(model_device(self.actions.model))
        with self._changed:
            return EngineInfo(
                incarnation=self.incarnation,
                version=self.actions.weights.version,
                update_id=self.actions.weights.update_id,
                state=self.actions.weights.state,
                device=device,
                host=socket.gethostname(),
                pid=os.getpid(),
            )

    def _checksums(self, call: Call, verb: p.Checksums) -> dict[str, str]:
        return model_digests(named_targets(self.actions.model))
