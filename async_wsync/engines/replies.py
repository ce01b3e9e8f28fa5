"""What an engine's reply means.

Engines answer "I failed" in many shapes: ``False``, ``(False, message)``, ``{"success": False}``, an object with a
``success`` attribute, an HTTP response, one of these for each tensor parallel rank, or nothing at all. Taking an
answer for a success because it is an answer is how a weight update gets lost in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["failure_in", "looks_collective", "short"]

_BAD_WORDS = frozenset({"error", "failed", "failure", "fail"})
_MISSING = object()
_COLLECTIVE_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "timed out waiting",
    "gloo",
    "nccl",
    "collective",
    "socket closed",
    "application timeout",
)


def failure_in(reply: Any, *, none_is_failure: bool = True) -> str | None:
    """The failure that ``reply`` tells of, in words; None where it tells of none.

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
    words = _first(reply.get("message"), reply.get("error_message"), reply.get("error"), reply.get("detail"))
    if success is not _MISSING:
        return None if _is_true(success) else f"it answered success: {success!r}{_because(words)}"
    if reply.get("error"):
        return f"it answered an error: {short(reply['error'])}"
    if str(reply.get("status", "")).lower() in _BAD_WORDS:
        return f"it answered status: {reply['status']!r}{_because(words)}"
    return _bad_status(reply.get("status_code"), words)


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
    """Whether an engine's words tell only that the broadcast broke, so that some other member is likelier at fault.

    Engines that are not ours pass on torch's error as text, and text is all there is to go by.
    """
    text = error if isinstance(error, str) else _chain_text(error)
    return any(word in text.lower() for word in _COLLECTIVE_WORDS)


def _chain_text(error: BaseException | None) -> str:
    parts: list[str] = []
    while error is not None and len(parts) < 5:
        parts.append(f"{type(error).__name__}: {error}")
        error = getattr(error, "cause", None) or error.__cause__
    return "\n".join(parts)
