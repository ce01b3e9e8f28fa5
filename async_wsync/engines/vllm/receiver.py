"""One vLLM worker's end of a weight update: groups, buckets, state. Knows nothing of vLLM but the `Loader`.

vLLM runs every control call on the one thread that also runs the model, for all ranks together. A call that waits
for a broadcast would stop the whole engine, its health and its abort included, until the broadcast comes.
So nothing here waits: a receive is started in the group's thread, and `handle` is asked again until it is over. What
has landed is put into the model by whichever request comes next, on vLLM's own thread, as loading must be.

Failures are answers, never exceptions: with several workers vLLM leaves the answers of the others in its queue when one
raises, and takes them for the answers to its next calls.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from async_wsync.engines.receiving.group_membership import GroupMembership
from async_wsync.engines.receiving.weight_state import Part, Session, WeightState
from async_wsync.engines.vllm import messages as wire
from async_wsync.engines.vllm.memberships import GroupMemberships, Outcomes
from async_wsync.errors import EngineBusy, EngineFailed, StaleFence
from async_wsync.transfer.layout import lay_out
from async_wsync.transfer.tensors import torch_dtype
from async_wsync.transfer.unpack import ReceiveBuffers
from async_wsync.types import BucketSpec, Call, EngineState, Manifest, ParamMeta, UpdateSpec, WireFormat

__all__ = ["Loader", "VLLMReceiver"]

logger = logging.getLogger("async_wsync.vllm")

_LONG = frozenset({"join", "receive", "leave", "abort"})
_NO_LOCK = 0
"""The fence of a caller that only asks, such as a dry run; those of locks begin at 1."""


class Loader(Protocol):
    """How tensors get into the model of this rank; called on vLLM's thread only."""

    device: torch.device

    def inspect(self, manifest: Manifest) -> wire.Findings:
        """Would the model take these tensors, and which others are missing? Changes nothing."""
        ...

    def open(self) -> None: ...
    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None: ...
    def close(self, *, keep: bool) -> None:
        """End what `open` began. ``keep``: all has been loaded; otherwise drop what is half loaded."""
        ...


@dataclass(frozen=True, slots=True)
class _Checked:
    """The last manifest that was checked."""

    key: str
    findings: wire.Findings
    params: frozenset[ParamMeta]


class VLLMReceiver:
    """``rank``: this worker's among all ranks of its engine, data parallel replicas included."""

    def __init__(self, loader: Loader, *, rank: int, num_ranks: int, name: str = "vllm") -> None:
        self.incarnation = uuid.uuid4().hex
        self._loader = loader
        self._rank = rank
        self._num_ranks = num_ranks
        self._changed = threading.Condition()
        self._weights = WeightState()
        self._memberships = GroupMemberships(
            self._changed, rank=rank, num_ranks=num_ranks, name=name, device=loader.device
        )
        self._fence = 0
        self._landed: deque[tuple[str, Session, Part, BucketSpec, dict[str, torch.Tensor]]] = deque()
        self._outcomes = Outcomes(self._changed)
        self._checked: _Checked | None = None
        self._open = False  # between vLLM's own start and finish
        self._loading = False  # between the loader's open and close
        self._closing: Session | None = None
        self._close_failure: dict[str, Any] | None = None
        self.load_seconds = 0.0
        self._verbs: dict[str, Callable[[Call, Mapping[str, Any]], Any]] = {
            "hello": self._hello,
            "join": self._join,
            "leave": self._leave,
            "abort": self._abort,
            "check": self._check,
            "begin": self._begin,
            "receive": self._receive,
            "end": self._end,
            "status": self._status,
            "publish": self._publish,
            "reset": self._reset,
        }

    # ------------------------------------------------------------------------ requests and replies

    def handle(self, text: str) -> dict[str, Any]:
        """Answer a request; on vLLM's thread. Raises nothing for what the world does."""
        request = json.loads(text)
        request_id = request.get("id")
        if request["verb"] == "poll":
            return self._poll(request["request_id"], float(request.get("wait", 0.0)))
        if request_id in self._outcomes:
            return self._poll(request_id, 0.0)  # it came twice, and is not done twice
        try:
            call = wire.decode_call(request)
            self._admit(request["verb"], call, request)
            value = self._verbs[request["verb"]](call, request)
        except Exception as error:
            reply: dict[str, Any] = {"failure": wire.failure_of(error)}
        else:
            if isinstance(value, Future):
                return self._follow(request_id or "", value)
            reply = {"value": value}
        if request["verb"] in _LONG and request_id:
            self._outcomes.settle(request_id, reply)
        return self._reply(**reply)

    def _reply(self, **fields: Any) -> dict[str, Any]:
        with self._changed:
            state = self._weights.state.value
        return wire.Reply(state=state, incarnation=self.incarnation, **fields).to_dict()

    def _follow(self, request_id: str, future: Future[Any]) -> dict[str, Any]:
        self._outcomes.open(request_id)

        def over(done: Future[Any]) -> None:
            error = done.exception()
            if error is not None:
                self._outcomes.settle(request_id, {"failure": wire.failure_of(error)})
            elif done.result() is not _LOADS_LATER:
                self._outcomes.settle(request_id, {"value": None})

        future.add_done_callback(over)
        return self._poll(request_id, 0.0)

    def _poll(self, request_id: str, wait: float) -> dict[str, Any]:
        """What became of a request; puts what has landed into the model meanwhile. Waits at most ``wait`` seconds."""
        until = time.monotonic() + wait
        while True:
            self._load_landed()
            with self._changed:
                if request_id not in self._outcomes:
                    failure = wire.failure_of(EngineFailed(f"request {request_id} is not known here"))
                    break
                if (outcome := self._outcomes[request_id]) is not None:
                    return self._reply(**outcome)
                left = until - time.monotonic()
                if left <= 0:
                    return self._reply(done=False)
                if not self._landed:
                    self._changed.wait(left)
        return self._reply(failure=failure)

    def _admit(self, verb: str, call: Call, request: Mapping[str, Any]) -> None:
        if verb in ("hello", "status") or (verb == "check" and call.fence == _NO_LOCK):
            return
        with self._changed:
            membership = self._memberships.get(request["group"]) if verb in ("leave", "abort") else None
            if membership is not None and membership.source == call.source:
                return  # whoever lost the lock may still stop what it started, and clean up
            if call.fence < self._fence:
                raise StaleFence(
                    f"fence {call.fence} of {call.source!r} is stale, {self._fence} was seen: the caller lost the lock",
                    fence=call.fence,
                    seen=self._fence,
                )
            stale = self._memberships.busy(below=call.fence)
            self._fence = call.fence
        for old in stale:
            old.abort()

    # ------------------------------------------------------------------------ what this worker is

    def _hello(self, call: Call, request: Mapping[str, Any]) -> dict[str, Any]:
        self._notice_desertion()
        return {
            "rank": self._rank,
            "num_ranks": self._num_ranks,
            "version": self._weights.version,
            "update_id": self._weights.update_id,
            "device": str(self._loader.device),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }

    def _status(self, call: Call, request: Mapping[str, Any]) -> dict[str, Any]:
        session = self._weights.session
        return {
            "open": self._open,
            "ended": session is not None and session.ended and session.update_id == request.get("update_id"),
            "failure": self._close_failure,
            "load_seconds": self.load_seconds,
        }

    def _check(self, call: Call, request: Mapping[str, Any]) -> dict[str, Any]:
        update = wire.decode_update(request["update"])
        sent = [meta for bucket in update.buckets for meta in bucket.params]
        if sent and sent != list(update.manifest.params):
            raise EngineFailed("the buckets do not hold the manifest's tensors in the manifest's order")
        findings = self._check_only(update) if call.fence == _NO_LOCK else self._check_once(update)
        with self._changed:
            why = self._weights.lacks(update.base, Part(source="", update=update).names()) if findings.left_out else ""
        return asdict(replace(findings, lacks=(why,) if why else ()))

    def _check_once(self, update: UpdateSpec) -> wire.Findings:
        key = f"{update.manifest.fingerprint()} {update.strict}"
        if self._checked is None or self._checked.key != key:
            self._drop_stale()
            self._checked = _Checked(key, self._inspect(update), frozenset(update.manifest.params))
        return self._checked.findings

    def _inspect(self, update: UpdateSpec) -> wire.Findings:
        findings = self._loader.inspect(update.manifest)
        return findings if update.strict else replace(findings, missing=(), left_out=findings.missing)

    def _check_only(self, update: UpdateSpec) -> wire.Findings:
        """For a caller without the lock. Another's update may be between its check and its end, and is left alone."""
        if self._loading:
            raise EngineBusy("an update is open, or was left open: ask again later, or send one that closes it")
        return self._inspect(update)

    def _drop_stale(self) -> None:
        """Whoever may check has the lock: an update that is open now was left open by a source that is gone."""
        if self._loading:
            self._break_off()
            self._loader.close(keep=False)
            self._loading = False

    def _require_checked(self, update: UpdateSpec) -> None:
        """A source of a round sends a part of what was checked for all of them."""
        checked = self._checked
        if checked is None or checked.findings.bad or not checked.params.issuperset(update.manifest.params):
            raise EngineFailed("this manifest was not checked, or did not fit")

    # ------------------------------------------------------------------------ groups

    def _join(self, call: Call, request: Mapping[str, Any]) -> Future[None]:
        spec = wire.decode_group(request["group"])
        return self._memberships.join(call, spec, rank_offset=request["rank_offset"])

    def _leave(self, call: Call, request: Mapping[str, Any]) -> Future[None] | None:
        membership = self._memberships.get(request["group"])
        return None if membership is None else self._memberships.dismiss(membership)

    def _abort(self, call: Call, request: Mapping[str, Any]) -> Future[None] | None:
        membership = self._memberships.get(request["group"])
        if membership is None:
            return None
        membership.abort()
        return membership.quiet()

    # ------------------------------------------------------------------------ one update

    def _begin(self, call: Call, request: Mapping[str, Any]) -> dict[str, bool]:
        """Open the update. Answers which of vLLM's own calls must follow."""
        update = wire.decode_update(request["update"])
        self._require_checked(update)
        with self._changed:
            adds_part = self._weights.accepts_part(update.update_id, call.source)
        if not adds_part:
            self._break_off()
        membership = self._memberships.get(update.group)
        if update.buckets and (membership is None or membership.aborted):
            raise EngineFailed(f"group {update.group} is {'not joined' if membership is None else 'broken'}")
        with self._changed:
            part = self._weights.begin(update, call.source, {})
        if membership is not None:
            membership.fence = call.fence
            membership.expect(list(part.buckets))
        self._closing = self._close_failure = None
        self.load_seconds = 0.0
        return {"finish": self._open and not adds_part, "start": not adds_part}

    def started(self) -> None:
        """vLLM's start_weight_update. Never raises: `_status` tells."""
        began = time.monotonic()
        self._open = True
        try:
            self._loader.open()
            self._loading = True
        except Exception as error:
            logger.exception("vLLM could not start the update")
            self._close_failure = wire.failure_of(error)
            with self._changed:
                self._weights.break_off()
        self.load_seconds += time.monotonic() - began

    def finished(self) -> None:
        """vLLM's finish_weight_update. Never raises, for vLLM would then think the update open for ever."""
        session, self._closing, self._open = self._closing, None, False
        began = time.monotonic()
        keep = session is not None and session is self._weights.session
        try:
            if self._loading:
                self._loading = False
                self._loader.close(keep=keep)
            if keep:
                assert session is not None
                with self._changed:
                    self._weights.end(session)
        except Exception as error:
            logger.exception("vLLM could not finish the update")
            self._close_failure = wire.failure_of(error)
            with self._changed:
                self._weights.break_off()
        self.load_seconds += time.monotonic() - began

    def _receive(self, call: Call, request: Mapping[str, Any]) -> Future[Any]:
        if not self._loading:
            raise EngineFailed("vLLM's start_weight_update has not been called")
        with self._changed:
            session, part = self._weights.part(request["update_id"], call.source)
            membership = self._memberships.get(part.update.group)
        index = request["index"]
        if membership is None or index not in part.buckets:
            raise EngineFailed(f"no bucket {index}, or group {part.update.group} was left")
        job = partial(self._land, request["id"], membership, session, part, part.buckets[index], call.timeout)
        received: Future[Any] = Future()

        def over(done: Future[None]) -> None:
            error = done.exception()
            if error is None:
                received.set_result(_LOADS_LATER)
            else:
                received.set_exception(error)

        membership.receive(index, job).add_done_callback(over)
        return received

    def _land(
        self,
        request_id: str,
        membership: GroupMembership,
        session: Session,
        part: Part,
        bucket: BucketSpec,
        timeout: float,
    ) -> None:
        """In the group's thread: receive one bucket into fresh memory, and leave it for vLLM's thread."""
        try:
            device = membership.device
            targets = {m.name: torch.empty(m.shape, dtype=torch_dtype(m.dtype), device=device) for m in bucket.params}
            landing = ReceiveBuffers(lay_out(bucket, WireFormat.PACKED), targets, device=device)
            membership.broadcast(landing.buffers, timeout)
            landing.apply()
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        except Exception:
            self._fail(session, membership)
            raise
        with self._changed:
            self._landed.append((request_id, session, part, bucket, targets))
            self._changed.notify_all()

    def _fail(self, session: Session, membership: GroupMembership | None) -> None:
        if membership is not None:
            membership.abort()  # its members no longer agree on what comes next
        with self._changed:
            self._weights.break_off(session)
            self._changed.notify_all()

    def _load_landed(self) -> None:
        while True:
            with self._changed:
                if not self._landed:
                    return
                request_id, session, part, bucket, targets = self._landed.popleft()
            try:
                self._load(session, part, bucket, targets)
            except Exception as error:
                self._fail(session, self._memberships.get(part.update.group))
                self._outcomes.settle(request_id, {"failure": wire.failure_of(error)})
            else:
                self._outcomes.settle(request_id, {"value": None})

    def _load(self, session: Session, part: Part, bucket: BucketSpec, targets: dict[str, torch.Tensor]) -> None:
        named = list(targets.items())
        named += [(alias, targets[name]) for alias, name in part.update.manifest.aliases if name in targets]
        with self._changed:
            self._weights.check_open(session)
            if not self._loading:
                raise EngineFailed("vLLM's finish_weight_update came before all buckets were loaded")
            self._weights.suspect(name for name, _ in named)
        began = time.monotonic()
        self._loader.load(named)
        self.load_seconds += time.monotonic() - began
        with self._changed:
            self._weights.check_open(session)
            part.landed.add(bucket.index)

    def _end(self, call: Call, request: Mapping[str, Any]) -> None:
        self._load_landed()
        with self._changed:
            self._closing = self._weights.check_complete(request["update_id"], self._covered)

    def _covered(self, sent: set[str]) -> Iterable[str]:
        """What holds new values once all parts are loaded: a tied name may have come under another one before."""
        checked = self._checked
        whole = (
            checked is not None and not checked.findings.left_out and sent.issuperset(m.name for m in checked.params)
        )
        return self._weights.suspects | sent if whole else sent

    def _publish(self, call: Call, request: Mapping[str, Any]) -> None:
        with self._changed:
            self._weights.publish(request["version"], call.fence)

    def _reset(self, call: Call, request: Mapping[str, Any]) -> dict[str, bool]:
        self._break_off()
        for membership in self._memberships.busy():
            membership.abort()
        self._closing = None
        return {"finish": self._open}

    def _break_off(self) -> None:
        with self._changed:
            memberships = self._session_memberships()
            self._weights.break_off()
        for membership in memberships:
            if membership.busy:
                membership.abort()

    def _session_memberships(self) -> list[GroupMembership]:
        session = self._weights.session
        groups = set() if session is None or session.ended else {p.update.group for p in session.parts.values()}
        return self._memberships.of(groups)

    def _notice_desertion(self) -> None:
        """A source that died between two buckets leaves an open update that nobody will end."""
        if any(membership.useless for membership in self._session_memberships()):
            self._break_off()

    @property
    def state(self) -> EngineState:
        return self._weights.state

    def close(self) -> None:
        """Leave all groups; the worker goes."""
        self._memberships.close()


class _LoadsLater:
    """A receive that has landed and is yet to be loaded; its request_id is settled then."""


_LOADS_LATER = _LoadsLater()
