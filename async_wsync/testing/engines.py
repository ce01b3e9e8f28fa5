"""A rollout engine that fails on cue: a real Ray actor, a real model, a real `WeightReceiver`, and a script."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import nn

from async_wsync.engines.failure import Failure
from async_wsync.engines.torch import messages as p
from async_wsync.engines.torch.receiver import WeightReceiver
from async_wsync.engines.update_codec import pack_update, unpack_update
from async_wsync.errors import EngineFailed
from async_wsync.transfer.checksum import combined_digest, model_digests
from async_wsync.types import BucketSpec

__all__ = ["Action", "Fault", "ScriptedEngine", "Seen", "start_engine"]

Action = Literal[
    "raise_before", "raise_after", "answer", "answer_early", "skip", "delay", "sleep", "exit", "stop", "wrong_order"
]
VERBS = frozenset(cls.__name__.lower() for cls in p.Verb.__subclasses__()) - {"poll"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """``do`` this when the call ``at`` arrives (for ``bucket`` only, if given), after letting ``skip`` pass.

    ``at``: hello, join, leave, check, pause, flush, begin, receive, end, publish, resume, abort, reset, checksums.

    * ``raise_before``: raise ``error`` at once and do nothing: in a receive, never enter the collective.
    * ``raise_after``: do all of it, then report ``error`` instead of success, no sooner than ``seconds`` later.
    * ``answer``: answer ``answer`` (``None``, ``False``, ``{"success": False}``, ``(False, "why")``) and do nothing.
    * ``answer_early``: report success at once, do the work all the same. ``skip``: report success, do nothing.
    * ``delay``: report the outcome no sooner than ``seconds`` later; the actor keeps answering others meanwhile.
    * ``sleep``: block the thread that took the call for ``seconds`` first; the source's later calls wait behind it.
    * ``exit``: kill -9 itself ``seconds`` after the call was taken (0: before). ``stop``: SIGSTOP itself, likewise.
    * ``wrong_order`` (at begin): lay out the update's tensors in reverse, as an engine with another order would.
    """

    do: Action
    at: str = "receive"
    bucket: int | None = None
    seconds: float = 0.0
    error: Exception | None = None
    answer: Any = None
    skip: int = 0
    times: int = 1

    def __post_init__(self) -> None:
        if self.do not in get_args(Action):
            raise ValueError(f"do must be one of {', '.join(get_args(Action))}, got {self.do!r}")
        if self.at not in VERBS:
            raise ValueError(f"at must be one of {', '.join(sorted(VERBS))}, got {self.at!r}")
        if self.do == "wrong_order" and self.at != "begin":
            raise ValueError("wrong_order happens at 'begin'")
        if self.do.startswith("raise") and self.error is None:
            object.__setattr__(self, "error", RuntimeError(f"scripted failure at {self.at}"))

    def matches(self, verb: p.Verb) -> bool:
        here = type(verb).__name__.lower() == self.at
        return here and (self.bucket is None or getattr(verb, "index", None) == self.bucket)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A call that arrived. ``at`` is time.time(), comparable between the processes of one machine."""

    verb: str
    source: str
    fence: int
    bucket: int | None
    at: float


class ScriptedEngine(WeightReceiver):
    """``build()`` makes the model, in the actor; ``faults`` are tried in order, one a call.

    Start one with `start_engine`, or with ``ray.remote(ScriptedEngine).options(...).remote(build, faults)``.
    To give an engine a tensor of a wrong dtype or shape, build its model that way.
    """

    def __init__(self, build: Callable[[], nn.Module], faults: Iterable[Fault] = ()) -> None:
        torch.set_num_threads(1)
        self.model = build()
        self.init_weight_receiver(self.model, name=f"scripted-{os.getpid()}")
        self._guard = threading.Lock()
        self._faults: list[Fault] = list(faults)
        self._fired: list[str] = []
        self._seen: list[Seen] = []
        self._replaced: dict[str, Exception] = {}
        self._not_before: dict[str, float] = {}

    # ------------------------------------------------------------------ for the test

    def ping(self) -> str:
        return "pong"

    def pid(self) -> int:
        return os.getpid()

    def set_script(self, faults: Iterable[Fault]) -> None:
        """Replace the script; what has fired stays on record."""
        with self._guard:
            self._faults = list(faults)

    def fired(self) -> list[str]:
        """What was done, oldest first, as "action at verb"."""
        with self._guard:
            return list(self._fired)

    def seen(self) -> list[Seen]:
        """The calls that arrived, polls apart, oldest first."""
        with self._guard:
            return list(self._seen)

    def state(self) -> tuple[str, int | None]:
        """State and version, as the engine itself sees them."""
        return self.weight_state.value, self.weight_version

    def digests(self) -> dict[str, str]:
        """Checksum of each tensor, whatever the gate says."""
        return model_digests(self.model.state_dict())

    def generate(self, seconds: float = 0.0) -> tuple[int | None, str]:
        """Stand-in for a generation of that length: the version, and one checksum of the weights that it used.

        Raises `EngineNotServing` like any engine that guards itself with `serving`.
        """
        with self.serving() as version:
            _pass_time(seconds)
            return version, combined_digest(self.digests())

    # ------------------------------------------------------------------ the script

    def weight_sync(self, request: p.Request) -> Any:
        verb = request.verb
        if isinstance(verb, p.Poll):
            return self._retold(verb.request_id, super().weight_sync(request))
        fault = self._take(request)
        if fault is None:
            return self._retold(request.id, super().weight_sync(request))
        if fault.do in ("exit", "stop"):
            self._signal_self(fault)
        elif fault.do == "sleep":
            _pass_time(fault.seconds)
        elif fault.do == "delay":
            self._not_before[request.id] = time.monotonic() + fault.seconds
        elif fault.do == "raise_after":
            assert fault.error is not None
            self._replaced[request.id] = fault.error
            self._not_before[request.id] = time.monotonic() + fault.seconds
        elif fault.do == "raise_before":
            assert fault.error is not None
            raise fault.error
        elif fault.do == "answer":
            return fault.answer
        elif fault.do == "wrong_order":
            assert isinstance(verb, p.Begin)
            request = replace(request, verb=p.Begin(_reversed(verb.update)))
        if fault.do == "skip":
            return self._success(request)
        reply = super().weight_sync(request)
        return self._success(request) if fault.do == "answer_early" else self._retold(request.id, reply)

    def _take(self, request: p.Request) -> Fault | None:
        """Note the call; the fault that it meets, if any."""
        verb, call = request.verb, request.call
        name, bucket = type(verb).__name__.lower(), getattr(verb, "index", None)
        with self._guard:
            self._seen.append(Seen(verb=name, source=call.source, fence=call.fence, bucket=bucket, at=time.time()))
            for i, fault in enumerate(self._faults):
                if not fault.matches(verb):
                    continue
                if fault.skip:
                    self._faults[i] = replace(fault, skip=fault.skip - 1)
                    return None
                left = replace(fault, times=fault.times - 1)
                self._faults[i : i + 1] = [left] if left.times else []
                self._fired.append(f"{fault.do} at {fault.at}")
                return fault
        return None

    def _success(self, request: p.Request) -> p.Reply:
        hello = super().weight_sync(p.Request(id=f"{request.id}-hello", call=request.call, verb=p.Hello()))
        return replace(hello, done=True, value=None, failure=None)

    def _retold(self, request_id: str, reply: p.Reply) -> p.Reply:
        """The reply as the script wants it told."""
        if self._not_before.get(request_id, 0.0) > time.monotonic():
            return replace(reply, done=False, value=None, failure=None)
        if reply.done and request_id in self._replaced:
            return replace(reply, value=None, failure=Failure.of(self._replaced[request_id]))
        return reply

    def _signal_self(self, fault: Fault) -> None:
        number = signal.SIGKILL if fault.do == "exit" else signal.SIGSTOP
        if fault.seconds <= 0:
            # To this very thread: one sent to the process may stop another thread first, and this one would still
            # have the time to answer the call.
            signal.pthread_kill(threading.get_ident(), number)
            return
        timer = threading.Timer(fault.seconds, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()


def start_engine(build: Callable[[], nn.Module], *faults: Fault, **options: Any) -> Any:
    """The handle of a new `ScriptedEngine` actor. ``options`` go to Ray (``max_concurrency=4``, ``max_restarts=1``)."""
    import ray

    return ray.remote(ScriptedEngine).options(**{"num_cpus": 0, **options}).remote(build, faults)


def _reversed(packed: bytes) -> bytes:
    update = unpack_update(packed)
    buckets = [BucketSpec(index=b.index, params=b.params[::-1], nbytes=b.nbytes) for b in update.buckets]
    if all(len(b.params) < 2 for b in buckets):
        raise EngineFailed("wrong_order needs a bucket with two tensors")
    return pack_update(replace(update, buckets=tuple(buckets)))


def _pass_time(seconds: float) -> None:
    if seconds > 0:
        threading.Event().wait(seconds)
