"""An engine's exception on its way to the source."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass

from async_wsync.errors import EngineFailed, StaleCall, StaleFence, WeightSyncError

__all__ = ["EngineSideError", "Failure"]


class EngineSideError(Exception):
    """Stands in for an engine's exception that could not travel; its message has the type and the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception on its way from the engine to the source. ``error`` is pickled, or empty if that failed."""

    text: str
    trace: str
    error: bytes

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        trace = "".join(traceback.format_exception(error))
        return cls(text=f"{type(error).__name__}: {error}", trace=trace, error=_pickled(error))

    def _original(self) -> BaseException:
        try:
            error = pickle.loads(self.error)
            if isinstance(error, BaseException):
                return error
        except Exception:  # whatever a foreign class does when it is rebuilt
            pass
        return EngineSideError(self.text)

    def rebuild(self, *, engine: str, phase: str, bucket: int | None = None) -> EngineFailed:
        """The error to raise at the source; the engine's own exception is its cause."""
        original = self._original()
        where = phase if bucket is None else f"{phase} {bucket}"
        facts = {"engine": engine, "phase": phase, "bucket": bucket}
        if isinstance(original, WeightSyncError):
            kind = type(original) if isinstance(original, EngineFailed) else EngineFailed
            if isinstance(original, StaleFence):
                kind = StaleCall
            error = kind(f"{engine}: {where}: {original}", **{**original.facts_for(kind), **facts})
        else:
            error = EngineFailed(f"{engine}: {where}: {self.text}", **facts)
        original.add_note(f"Traceback at the engine:\n{self.trace}")
        error.__cause__ = original
        return error


def _pickled(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # many exceptions pickle but can't be rebuilt
    except Exception:
        return b""
    return data
