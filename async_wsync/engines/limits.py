"""Which field of `Timeouts` bounds which call to an engine, so that an error can say what to raise."""

from __future__ import annotations

__all__ = ["field_of", "not_within"]

#: By the phase that an adapter's error names.
FIELDS = {
    "hello": "connect",  # before an update Timeouts.begin, by a clock of its own that comes first
    "check": "begin",
    "connect": "connect",
    "join": "connect",
    "leave": "close",
    "pause": "pause",
    "flush": "flush",
    "begin": "begin",
    "reset": "begin",
    "bucket": "bucket",
    "receive": "bucket",
    "end": "end",
    "verify": "end",
    "checksums": "end",
    "publish": "end",
    "resume": "resume",
    "abort": "drain",
}
#: Calls that are no part of an update: whoever makes one gives its limit.
UNBOUND = frozenset({"lora", "status"})


def field_of(phase: str) -> str:
    """The field's name, empty for a call whose limit is its caller's own."""
    return FIELDS.get(phase, "")


def not_within(seconds: float, phase: str) -> str:
    """ "within 30 s (Timeouts.begin)": how long, and what to raise if that was too short."""
    field = field_of(phase)
    return f"within {seconds:g} s" + (f" (Timeouts.{field})" if field else "")
