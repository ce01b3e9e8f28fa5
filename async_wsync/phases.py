"""The phases of an update: the one table of their names, their order and the `Timeouts` field that bounds each.

`EngineFailed.phase`, `UpdateFailed.phase`, `EngineOutcome.phase` and `UpdateReport.phases` use these names, whatever
the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PHASES", "Phase", "field_of", "not_within"]


@dataclass(frozen=True, slots=True)
class Phase:
    """``order``: its place in an update. ``timeouts_field``: empty if the caller of the call gives its limit."""

    name: str
    order: int
    timeouts_field: str


#: In the order of an update; then how one ends early; then calls that an adapter offers beside updates.
_FIELDS = {
    "turn": "",  # behind the broadcaster's own earlier calls
    "plan": "total",
    "hello": "connect",  # before an update Timeouts.begin, which the broadcaster keeps itself
    "gather": "lock",
    "lock": "lock",
    "check": "begin",
    "connect": "connect",
    "pause": "pause",
    "reset": "begin",
    "flush": "flush",
    "begin": "begin",
    "source": "idle",
    "receive": "bucket",
    "wait": "total",  # for the other sources of a round
    "end": "end",
    "verify": "end",
    "publish": "end",
    "resume": "resume",
    "abort": "drain",
    "settle": "drain",
    "leave": "close",
    "lora": "",
    "status": "",
}
PHASES = {name: Phase(name, order, field) for order, (name, field) in enumerate(_FIELDS.items())}


def field_of(phase: str) -> str:
    """The `Timeouts` field of a phase, empty if the limit is the caller's own."""
    return PHASES[phase].timeouts_field


def not_within(seconds: float, phase: str) -> str:
    """ "within 30 s (Timeouts.begin)": how long, and what to raise if that was too short."""
    field = field_of(phase)
    return f"within {seconds:g} s" + (f" (Timeouts.{field})" if field else "")
