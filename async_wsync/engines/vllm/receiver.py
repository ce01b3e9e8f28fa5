"""One vLLM worker's end of a weight update: groups, buckets, state. Knows nothing of vLLM but the `Loader`.

vLLM runs every control call on the one thread that also runs the model, for all ranks together. A call that waits
for a broadcast would stop the whole engine, its health and its abort included, until the broadcast comes.
So nothing here waits: a receive is started in the group's thread, and `handle` is asked again until it is over. What
was received is put into the model by whichever request comes next, on vLLM's own thread, as loading must be.

Failures are answers, never exceptions: with several workers vLLM leaves the answers of the others in its queue when one
raises, and takes them for the answers to its next calls.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from async_wsync.engines.failure import Failure
from async_wsync.engines.receiving.receiving_end import IncomingBucket, ReceivingEnd
from async_wsync.engines.receiving.request_log import Outcome
from async_wsync.engines.receiving.weight_state import Part, Session
from async_wsync.engines.rejection import Findings
from async_wsync.engines.update_codec import update_from_json
from async_wsync.engines.vllm import messages as wire
from async_wsync.errors import EngineBusy, EngineFailed
from async_wsync.transfer.layout import lay_out
from async_wsync.transfer.tensors import torch_dtype
from async_wsync.transfer.unpack import ReceiveBuffers
from async_wsync.types import Call, EngineState, GroupSpec, Manifest, ParamMeta, UpdateSpec, WireFormat

__all__ = ["Loader", "VLLMReceiver"]

logger = logging.getLogger("async_wsync.vllm")

_NO_LOCK = 0
"""The fence of a caller that only asks, such as a dry run; those of locks begin at 1."""


class Loader(Protocol):
    """How tensors get into the model of this rank; called on vLLM's thread only."""

    device: torch.device

    def inspect(self, manifest: Manifest) -> Findings:
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
    findings: Findings
    params: frozenset[ParamMeta]


class VLLMReceiver:
    """``rank``: this worker's among all ranks of its engine, data parallel replicas included."""

    def __init__(self, loader: Loader, *, rank: int, num_ranks: int, name: str = "vllm") -> None:
        self._loader = loader
        self._rank = rank
        self._num_ranks = num_ranks
        self._receiving = ReceivingEnd(member=f"{name} rank {rank}", num_ranks=num_ranks, device=lambda: loader.device)
        self._changed = self._receiving.changed
        self._weights = self._receiving.weights
        self._received: deque[tuple[Future[None], IncomingBucket, dict[str, torch.Tensor]]] = deque()
        self._checked: _Checked | None = None
        self._open = False  # between vLLM's own start and finish
        self._loading = False  # between the loader's open and close
        self._closing: Session | None = None
        self._close_failure: Failure | None = None
        self.load_seconds = 0.0
        self._verbs: dict[str, Callable[[Call, Mapping[str, Any]], Any]] = {
            "hello": self._hello,
            "join": self._join,
            "leave": lambda call, request: self._receiving.leave(request["group"]),
            "abort": lambda call, request: self._receiving.abort(request["group"]),
            "check": self._check,
            "begin": self._begin,
            "receive": self._receive,
            "end": self._end,
            "status": self._status,
            "publish": lambda call, request: self._receiving.publish(call, request["version"]),
            "reset": self._reset,
        }

    # ------------------------------------------------------------------------ requests and replies

    def handle(self, text: str) -> dict[str, Any]:
        """Answer a request; on vLLM's thread. Raises nothing for what the world does.

        One that has an ``id`` may come twice, is not done twice, and can be asked for with ``poll``.
        """
        request = json.loads(text)
        if request["verb"] == "poll":
            return self._poll(request["request_id"], float(request.get("wait", 0.0)))
        requests, request_id = self._receiving.requests, request.get("id")
        if request_id is not None:
            requests.run(request_id, lambda: self._start(request))
            return self._poll(request_id, 0.0)
        try:
            value = self._start(request)
            return self._reply(None if isinstance(value, Future) else Outcome(value=value))
        except Exception as error:
            return self._reply(Outcome(failure=Failure.of(error)))

    def _start(self, request: Mapping[str, Any]) -> Any:
        verb, call = request["verb"], Call(**request["call"])
        if verb not in ("hello", "status") and not (verb == "check" and call.fence == _NO_LOCK):
            self._receiving.admission.admit(call, ends=request["group"] if verb in ("leave", "abort") else None)
        return self._verbs[verb](call, request)

    def _reply(self, outcome: Outcome | None) -> dict[str, Any]:
        with self._changed:
            state = self._weights.state.value
        told = {} if outcome is None else {"value": outcome.value, "failure": outcome.failure}
        incarnation = self._receiving.incarnation
        return wire.Reply(done=outcome is not None, state=state, incarnation=incarnation, **told).to_json()

    def _poll(self, request_id: str, wait: float) -> dict[str, Any]:
        """What became of a request; loads what was received meanwhile. Waits at most ``wait`` seconds."""
        until = time.monotonic() + wait
        while True:
            self._load_received()
            with self._changed:
                outcome = self._receiving.requests.outcome(request_id)
                left = until - time.monotonic()
                if outcome is not None or left <= 0:
                    return self._reply(outcome)
                if not self._received:
                    self._changed.wait(left)

    # ------------------------------------------------------------------------ what this worker is

    def _hello(self, call: Call, request: Mapping[str, Any]) -> dict[str, Any]:
        self._close_update_of_dead_source()
        return {
            "rank": self._rank,
            "num_ranks": self._num_ranks,
            "version": self._weights.version,
            "update_id": self._weights.update_id,
            "device": str(self._loader.device),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }

    def _join(self, call: Call, request: Mapping[str, Any]) -> Future[None]:
        rank = request["rank_offset"] + self._rank
        return self._receiving.memberships.join(call, GroupSpec(**request["group"]), rank)

    def _status(self, call: Call, request: Mapping[str, Any]) -> dict[str, Any]:
        session = self._weights.session
        return {
            "open": self._open,
            "ended": session is not None and session.ended and session.update_id == request.get("update_id"),
            "failure": None if self._close_failure is None else self._close_failure.to_json(),
            "load_seconds": self.load_seconds,
        }

    def _check(self, call: Call, request: Mapping[str, Any]) -> dict[str, Any]:
        update = update_from_json(request["update"])
        sent = [meta for bucket in update.buckets for meta in bucket.params]
        if sent and sent != list(update.manifest.params):
            raise EngineFailed("the buckets do not hold the manifest's tensors in the manifest's order")
        findings = self._check_only(update) if call.fence == _NO_LOCK else self._check_once(update)
        with self._changed:
            why = self._weights.lacks(update.base, Part(source="", update=update).names()) if findings.left_out else ""
        return asdict(replace(findings, lacks=(why,) if why else ()))

    def _check_once(self, update: UpdateSpec) -> Findings:
        key = f"{update.manifest.fingerprint()} {update.strict}"
        if self._checked is None or self._checked.key != key:
            self._drop_stale()
            self._checked = _Checked(key, self._inspect(update), frozenset(update.manifest.params))
        return self._checked.findings

    def _inspect(self, update: UpdateSpec) -> Findings:
        findings = self._loader.inspect(update.manifest)
        return findings if update.strict else replace(findings, missing=(), left_out=findings.missing)

    def _check_only(self, update: UpdateSpec) -> Findings:
        """For a caller without the lock. Another's update may be between its check and its end, and is left alone."""
        if self._loading:
            raise EngineBusy("an update is open, or was left open: ask again later, or send one that closes it")
        return self._inspect(update)

    def _drop_stale(self) -> None:
        """Whoever may check has the lock: an update that is open now was left open by a source that is gone."""
        if self._loading:
            self._receiving.break_off()
            self._loader.close(keep=False)
            self._loading = False

    def _require_checked(self, update: UpdateSpec) -> None:
        """A source of a round sends a part of what was checked for all of them."""
        checked = self._checked
        if checked is None or checked.findings.bad or not checked.params.issuperset(update.manifest.params):
            raise EngineFailed("this manifest was not checked, or did not fit")

    # ------------------------------------------------------------------------ one update

    def _begin(self, call: Call, request: Mapping[str, Any]) -> dict[str, bool]:
        """Open the update. Answers which of vLLM's own calls must follow."""
        update = update_from_json(request["update"])
        self._require_checked(update)
        with self._changed:
            adds_part = self._weights.accepts_part(update.update_id, call.source)
        if not adds_part:
            self._receiving.break_off()
        self._receiving.begin(call, update, {})
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
            self._close_failure = Failure.of(error)
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
            self._close_failure = Failure.of(error)
            with self._changed:
                self._weights.break_off()
        self.load_seconds += time.monotonic() - began

    def _receive(self, call: Call, request: Mapping[str, Any]) -> Future[None]:
        """Done once the bucket is loaded."""
        if not self._loading:
            raise EngineFailed("vLLM's start_weight_update has not been called")
        loaded: Future[None] = Future()

        def over(done: Future[None]) -> None:
            if (error := done.exception()) is not None:
                loaded.set_exception(error)

        receiving = partial(self._receive_bucket, loaded)
        self._receiving.receive(call, request["update_id"], request["index"], receiving).add_done_callback(over)
        return loaded

    def _receive_bucket(self, loaded: Future[None], incoming: IncomingBucket) -> None:
        """In the group's thread: receive one bucket into fresh memory, and leave it for vLLM's thread."""
        device, bucket = incoming.membership.device, incoming.bucket
        tensors = {m.name: torch.empty(m.shape, dtype=torch_dtype(m.dtype), device=device) for m in bucket.params}
        buffers = ReceiveBuffers(lay_out(bucket, WireFormat.PACKED), tensors, device=device)
        incoming.receive_into(buffers.buffers)
        buffers.apply()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        with self._changed:
            self._received.append((loaded, incoming, tensors))
            self._changed.notify_all()

    def _load_received(self) -> None:
        while True:
            with self._changed:
                if not self._received:
                    return
                loaded, incoming, tensors = self._received.popleft()
            try:
                self._load(incoming, tensors)
            except Exception as error:
                self._receiving.fail(incoming)
                loaded.set_exception(error)
            else:
                loaded.set_result(None)
            del loaded, incoming, tensors  # or the error's traceback would keep them

    def _load(self, incoming: IncomingBucket, tensors: dict[str, torch.Tensor]) -> None:
        aliases = incoming.part.update.manifest.aliases
        named = [*tensors.items(), *((alias, tensors[name]) for alias, name in aliases if name in tensors)]
        if not self._loading:
            raise EngineFailed("vLLM's finish_weight_update came before all buckets were loaded")
        self._receiving.will_write(incoming, (name for name, _ in named))
        began = time.monotonic()
        self._loader.load(named)
        self.load_seconds += time.monotonic() - began
        self._receiving.arrived(incoming)

    def _end(self, call: Call, request: Mapping[str, Any]) -> None:
        self._load_received()
        with self._changed:
            self._closing = self._weights.check_complete(request["update_id"], self._covered)

    def _covered(self, sent: set[str]) -> Iterable[str]:
        """What holds new values once all parts are loaded: a tied name may have come under another one before."""
        checked = self._checked
        whole = (
            checked is not None and not checked.findings.left_out and sent.issuperset(m.name for m in checked.params)
        )
        return self._weights.suspects | sent if whole else sent

    def _reset(self, call: Call, request: Mapping[str, Any]) -> dict[str, bool]:
        self._receiving.break_off()
        self._closing = None
        return {"finish": self._open}

    def _close_update_of_dead_source(self) -> None:
        """A source that died between two buckets leaves an open update that nobody will end."""
        with self._changed:
            session = self._weights.session
            groups = set() if session is None or session.ended else {p.update.group for p in session.parts.values()}
            if self._receiving.memberships.any_unusable(groups):
                self._receiving.break_off()

    @property
    def state(self) -> EngineState:
        return self._weights.state

    def close(self) -> None:
        """Leave all groups; the worker goes."""
        self._receiving.memberships.close()
