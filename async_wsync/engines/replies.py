"""What an engine's reply means.

Engines answer "I failed" in many shapes: ``False``, ``(False, message)``, ``{"success": False}``, an object with a
``success`` attribute, an HTTP response, one of these for each tensor parallel rank, or nothing at all. If any answer
counted as a success, a weight update could fail unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist

from async_wsync.errors import BroadcastFailed, EngineFailed, EngineRejected

__all__ = ["Answer", "failure_in", "failure_in_http", "looks_collective", "says_vllm_is_dead", "short"]

_BAD_WORDS = frozenset({"error", "failed", "failure", "fail"})
_MISSING = object()
_LONGEST_CHAIN = 5
# Engines that are not ours pass on another process's exception as text only. These are the only tables of foreign
# messages that decide what a failure is. An entry matches the start of a message: the start of the text, or of an
# error that the text quotes ("HTTP 400: ...", "RuntimeError: ...").

#: torch.distributed's own exceptions, and how messages of gloo, of NCCL and of torch about them start.
_BROKEN_COLLECTIVE = (
    r"(?:torch\.distributed\.)?Dist(?:Backend|Network|Store)?Error\b",
    r"\[\S*\bgloo/\S+\.(?:cc|h):\d+\] ",
    r"Gloo connectFullMesh failed with ",
    r"NCCL error in: ",
    r"NCCL error: ",
    r"NCCL communicator was aborted ",
    r"\[Rank \d+\] Watchdog caught collective operation timeout: ",
)
#: vLLM's exception for an engine that has ended, how its messages start, and how our own actor says so.
_DEAD_VLLM = (
    r"(?:vllm\.v1\.engine\.exceptions\.)?EngineDeadError\b",
    r"EngineCore encountered an issue\. ",
    r"Executor failed\.",
    r"Engine core process \S+ died unexpectedly",
    r"vLLM's engine is dead: ",
)


def _at_a_start(messages: Sequence[str]) -> re.Pattern[str]:
    return re.compile(rf"(?:^|: )['\"]?(?:{'|'.join(messages)})", re.MULTILINE)


_COLLECTIVE, _DEAD = _at_a_start(_BROKEN_COLLECTIVE), _at_a_start(_DEAD_VLLM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an engine answered to one call.

    Args:
        engine, method, phase, bucket: who was asked, for what, and in which phase of an update.
        status: HTTP's status. For an actor: 200, `RAISED` or `NO_METHOD`.
        data: the decoded JSON body, or its text if it is no JSON; what an actor's method returned.
        failure: what failed, in words; None for a success. A 200 whose body says otherwise is a failure.
        error: what an actor's method raised.
    """

    RAISED: ClassVar[int] = 500
    NO_METHOD: ClassVar[int] = 501

    engine: str
    method: str
    phase: str
    bucket: int | None
    status: int = 200
    data: Any = None
    failure: str | None = None
    error: BaseException | None = None

    @property
    def unknown_call(self) -> bool:
        """The engine has no such call, so that nothing was done."""
        return self.status in (404, self.NO_METHOD)

    def says(self, *words: str) -> bool:
        """Whether it failed with any of these words."""
        return self.failure is not None and any(some in self.failure for some in words)

    def raise_failure(self) -> Answer:
        """Raise `EngineFailed` (`EngineRejected` if an actor has no such method) for a failure; else the answer."""
        if self.failure is not None:
            raise self.failed(self.failure)
        return self

    def failed(self, why: str) -> EngineFailed:
        kind = EngineRejected if self.status == self.NO_METHOD and self.bucket is None else EngineFailed
        error = kind(
            f"{self.engine}: {self.method} failed: {why}",
            engine=self.engine,
            phase=self.phase,
            bucket=self.bucket,
            is_collective=self.bucket is not None and looks_collective(why),
        )
        error.__cause__ = self.error
        return error


def failure_in_http(status: int, data: Any) -> str | None:
    """The failure that an HTTP answer tells of; None if it tells of none. ``data``: the decoded body."""
    if status < 400:
        return failure_in(data, none_is_failure=False)
    words = _words(data) if isinstance(data, Mapping) else None
    return f"HTTP {status}: {short(words or data)}"


def failure_in(reply: Any, *, none_is_failure: bool = True) -> str | None:
    """The failure that ``reply`` tells of, in words; None if it tells of none.

    ``none_is_failure``: an engine method that should answer and returned None did not do its work. Pass False for
    methods that return nothing by design.
    """
    if reply is None:
        return "it answered None" if none_is_failure else None
    if isinstance(reply, BaseException):
        return f"it answered with an error: {short(reply)}"
    if isinstance(reply, bool):
        return None if reply else "it answered False"
    if isinstance(reply, Mapping):
        return _failure_in_mapping(reply)
    if isinstance(reply, Sequence) and not isinstance(reply, str | bytes | bytearray):
        return _failure_in_sequence(reply, none_is_failure)
    return _failure_in_object(reply)


def short(value: Any, limit: int = 300) -> str:
    """``value`` in at most ``limit`` characters, for messages."""
    text = " ".join(str(value).split()) or repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _failure_in_mapping(reply: Mapping[Any, Any]) -> str | None:
    success = reply.get("success", _MISSING)
    words = _words(reply)
    if success is not _MISSING:
        return None if _is_true(success) else f"it answered success: {success!r}{_because(words)}"
    if reply.get("error"):
        return f"it answered an error: {short(words or reply['error'])}"
    if str(reply.get("status", "")).lower() in _BAD_WORDS:
        return f"it answered status: {reply['status']!r}{_because(words)}"
    return _bad_status(reply.get("status_code"), words)


def _words(reply: Mapping[Any, Any]) -> Any:
    error = reply.get("error")
    inner = error.get("message") if isinstance(error, Mapping) else None
    return _first(inner, reply.get("message"), reply.get("error_message"), error, reply.get("detail"))


def _failure_in_sequence(reply: Sequence[Any], none_is_failure: bool) -> str | None:
    if reply and isinstance(reply[0], bool) and any(isinstance(part, str) for part in reply[1:]):
        # (success, message, ...): SGLang's own return convention.
        return None if reply[0] else f"it answered {reply[0]!r}{_because(_first(*reply[1:]))}"
    for part in reply:
        # One answer for each rank: any failure is a failure.
        failure = failure_in(part, none_is_failure=none_is_failure)
        if failure is not None:
            return failure
    return None


def _failure_in_object(reply: Any) -> str | None:
    success = getattr(reply, "success", _MISSING)
    words = _first(getattr(reply, "message", None), getattr(reply, "error_message", None), getattr(reply, "text", None))
    if success is not _MISSING and not callable(success):
        return None if _is_true(success) else f"it answered success: {success!r}{_because(words)}"
    return _bad_status(getattr(reply, "status_code", None), words)


def _bad_status(status: Any, words: Any) -> str | None:
    if isinstance(status, int) and status >= 400:
        return f"it answered HTTP {status}{_because(words)}"
    return None


def _is_true(success: Any) -> bool:
    # A list of flags is one for each rank; all() of an empty list would call nothing a success.
    if isinstance(success, list | tuple):
        return bool(success) and all(bool(flag) for flag in success)
    return bool(success)


def _first(*candidates: Any) -> Any:
    return next((c for c in candidates if isinstance(c, str) and c), None)


def _because(words: Any) -> str:
    return f": {short(words)}" if words else ""


def looks_collective(error: BaseException | str) -> bool:
    """Whether an engine's failure tells only that the broadcast broke, so that some other member is likelier at fault.

    By the type of an exception or of one of its causes; gloo's have none of their own, and are known by their message.
    """
    if isinstance(error, str):
        return _COLLECTIVE.search(error) is not None
    return any(_is_collective(link) for link in _chain(error))


def says_vllm_is_dead(text: str) -> bool:
    """Whether what vLLM's server or actor answered tells that its engine has ended."""
    return _DEAD.search(text) is not None


def _is_collective(error: BaseException) -> bool:
    if isinstance(error, EngineFailed):
        return error.is_collective
    if isinstance(error, BroadcastFailed | dist.DistError):
        return True
    # These types say nothing; vLLM raises an Exception with the text of another process's.
    return type(error) in (RuntimeError, Exception) and _COLLECTIVE.search(str(error)) is not None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(_LONGEST_CHAIN):
        if error is None:
            return
        yield error
        cause = getattr(error, "cause", None)  # Ray's task errors
        error = cause if isinstance(cause, BaseException) else error.__cause__
