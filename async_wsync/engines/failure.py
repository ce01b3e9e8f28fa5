"""An engine's exception on its way to the source: pickled between our own processes, as plain values through vLLM.

Whoever rebuilds it from plain values unpickles nothing.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from async_wsync import errors
from async_wsync.engines.replies import looks_collective
from async_wsync.errors import EngineFailed, StaleCall, StaleFence, WeightSyncError, declared_facts

__all__ = ["EngineSideError", "Failure"]

_PLAIN = (str, int, float, tuple)
_OURS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, EngineFailed)]
_KINDS = {kind.__name__: kind for kind in _OURS}


class EngineSideError(Exception):
    """Stands in for an engine's exception that could not travel; its message has the type and the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception on its way from the engine to the source.

    ``kind``: the name of the `EngineFailed` to raise. ``facts``: what the exception said as plain values.
    ``error``: the exception pickled, empty if it could not be.
    """

    kind: str
    text: str
    trace: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    error: bytes = b""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        ours = isinstance(error, WeightSyncError)
        text = str(error) if ours else f"{type(error).__name__}: {error}"
        facts = {name: value for name, value in vars(error).items() if ours and isinstance(value, _PLAIN)}
        # An error of ours says whether some other member is likelier at fault; of others' only the type or text tells.
        collective = getattr(error, "is_collective", None)
        facts["is_collective"] = looks_collective(error) if collective is None else bool(collective)
        trace = "".join(traceback.format_exception(error))
        return cls(kind=_kind_of(error).__name__, text=text, trace=trace, facts=facts, error=_pickled(error))

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`: without the pickled exception."""
        return {"kind": self.kind, "text": self.text, "trace": self.trace, "facts": dict(self.facts)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Failure:
        facts = {name: tuple(value) if isinstance(value, list) else value for name, value in fields["facts"].items()}
        return cls(kind=fields["kind"], text=fields["text"], trace=fields["trace"], facts=facts)

    @property
    def is_collective(self) -> bool:
        """Whether some other member of the group is likelier at fault."""
        return bool(self.facts.get("is_collective", False))

    def rebuild(self, *, engine: str, phase: str, bucket: int | None = None) -> EngineFailed:
        """The error to raise at the source; the engine's own exception is its cause."""
        where = phase if bucket is None else f"{phase} {bucket}"
        kind = _KINDS.get(self.kind, EngineFailed)
        known = {name: value for name, value in self.facts.items() if name in declared_facts(kind)}
        error = kind(f"{engine}: {where}: {self.text}", **{**known, "engine": engine, "phase": phase, "bucket": bucket})
        error.__cause__ = self._original()
        error.__cause__.add_note(f"Traceback at the engine:\n{self.trace}")
        return error

    def _original(self) -> BaseException:
        try:
            error = pickle.loads(self.error)
            if isinstance(error, BaseException):
                return error
        except Exception:  # whatever a foreign class does when it is rebuilt
            pass
        return EngineSideError(self.text)


def _kind_of(error: BaseException) -> type[EngineFailed]:
    if isinstance(error, StaleFence):
        return StaleCall
    return next((kind for kind in type(error).__mro__ if kind in _OURS), EngineFailed)


def _pickled(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # many exceptions pickle but can't be rebuilt
    except Exception:
        return b""
    return data
