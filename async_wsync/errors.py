"""Every way a weight update can go wrong, as a type.

``ValueError`` is for a caller's mistake and stays plain. Everything the world does to us is a
`WeightSyncError`. Each error carries its facts as attributes, so that code can act on them,
says them in its message, so that a person can, and survives pickling, so that it can cross a
Ray boundary unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from async_wsync.types import EngineOutcome

__all__ = [
    "AcquireTimeout",
    "BaseMissing",
    "BroadcastFailed",
    "Cancelled",
    "EngineBusy",
    "EngineDied",
    "EngineFailed",
    "EngineNotServing",
    "EngineRejected",
    "EngineReplaced",
    "EngineTimeout",
    "LeaseLost",
    "LockError",
    "LockUnavailable",
    "PhaseTimeout",
    "RendezvousError",
    "RoundFailed",
    "SelfDeadlock",
    "SourceError",
    "StaleCall",
    "StaleFence",
    "UpdateFailed",
    "WeightSyncError",
]


def declared_facts(kind: type[WeightSyncError]) -> frozenset[str]:
    """The names that ``kind`` and the kinds it is made from annotate."""
    kinds = [cls for cls in kind.__mro__ if issubclass(cls, WeightSyncError)]
    return frozenset(name for cls in kinds for name in vars(cls).get("__annotations__", ()))


def _rebuild(cls: type[WeightSyncError], message: str, state: dict[str, Any]) -> WeightSyncError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class WeightSyncError(Exception):
    """Root of the tree.

    Args:
        message: what went wrong, for a person.
        facts: what code can act on, as attributes. Each kind of error declares its own.

    Raises TypeError for a fact that the kind does not declare.
    """

    def __init__(self, message: str, **facts: Any) -> None:
        if unknown := facts.keys() - declared_facts(type(self)):
            raise TypeError(f"{type(self).__name__} has no fact {', '.join(sorted(unknown))}")
        super().__init__(message)
        self.__dict__.update(facts)

    def facts_for(self, kind: type[WeightSyncError]) -> dict[str, Any]:
        """The facts that this error was given and that ``kind`` declares too."""
        return {name: value for name, value in vars(self).items() if name in declared_facts(kind)}

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call ``cls(*args)`` and lose every keyword argument.
        return (_rebuild, (type(self), str(self.args[0]) if self.args else "", dict(self.__dict__)))


# ---------------------------------------------------------------------------------- the lock


class LockError(WeightSyncError):
    """Something about the shared lock. ``status`` is the lock's status() where it was known."""

    status: Mapping[str, Any] | None = None


class AcquireTimeout(LockError, TimeoutError):
    """The lock was not granted in time. The message names the holder, its stage and how long it has held."""


class LeaseLost(LockError):
    """Our lease lapsed or was revoked while we believed we held the lock."""

    claim: str = ""


class LockUnavailable(LockError):
    """The lock actor is dead, was never scheduled, or does not answer."""


class SelfDeadlock(LockError):
    """The task that waits for the lock already holds it."""


class StaleFence(WeightSyncError):
    """A call carried a fence lower than one the engine has seen: its sender lost the lock."""

    fence: int = 0
    seen: int = 0


# --------------------------------------------------------------------------------- waiting


class PhaseTimeout(WeightSyncError, TimeoutError):
    """A phase ran over its limit. ``field`` is the `Timeouts` field to raise."""

    phase: str = ""
    field: str = ""
    seconds: float = 0.0
    waiting_for: tuple[str, ...] = ()


class Cancelled(WeightSyncError):
    """Why an update ended when its caller was cancelled; the caller itself sees CancelledError."""


class RendezvousError(WeightSyncError):
    """The update group could not be formed. ``step``: listen, reach, hello or connect, see docs/failure-modes.md.

    ``missing_ranks``, of the engines ``waiting_for``, never said hello, or a wrong one.
    ``is_collective``: a member gave up because the source or another member did not answer, or left.
    """

    group: str = ""
    phase: str = ""
    step: str = ""
    missing_ranks: tuple[int, ...] = ()
    waiting_for: tuple[str, ...] = ()
    is_collective: bool = False


class BroadcastFailed(WeightSyncError):
    """The collective itself failed at the source; engines usually know better why."""

    group: str = ""
    bucket: int | None = None


class SourceError(WeightSyncError):
    """The weight source raised, ended early, or yielded something its manifest does not say."""

    param: str | None = None


# -------------------------------------------------------------------------------- engines


class EngineFailed(WeightSyncError):
    """An engine call raised or answered failure. ``__cause__`` is the engine's own error.

    ``is_collective`` tells that the engine only saw the broadcast break: some other member is
    the likelier culprit, so any other failure is blamed before this one.
    """

    engine: str = ""
    phase: str = ""
    bucket: int | None = None
    is_collective: bool = False


class EngineDied(EngineFailed):
    """The engine's process is gone."""


class EngineTimeout(EngineFailed, TimeoutError):
    """The engine did not answer within the limit named by ``field``."""

    field: str = ""
    seconds: float = 0.0
    waiting_for: tuple[str, ...] = ()


class EngineReplaced(EngineFailed):
    """The engine answered with another incarnation: it restarted, and has neither group nor weights."""


class EngineRejected(EngineFailed):
    """The engine refused the manifest before the first byte. Lists are complete; the message shows the first few."""

    unknown: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()


class BaseMissing(EngineRejected):
    """The update is a part of the model, and the engine does not hold the version that it builds on.

    ``missing`` names tensors that the update leaves out, as far as the engine can tell. ``holds`` is the version
    the engine says it holds, None for none; ``torn`` that it may hold a mix.
    """

    holds: int | None = None
    torn: bool = False


class StaleCall(EngineFailed, StaleFence):
    """An engine refused a call for its fence: both an `EngineFailed` and a `StaleFence`."""


class EngineBusy(EngineFailed):
    """The engine refused for now (a flush with requests running, say); the call may be retried."""


class EngineNotServing(WeightSyncError):
    """Raised at the engine by ``serving()``: it is paused, updating or torn and must not generate."""

    state: str = ""


# --------------------------------------------------------------------------------- updates


class RoundFailed(WeightSyncError):
    """A source of a shared update failed or died, so that the update ended for all."""

    source: str = ""
    round_id: str = ""


class UpdateFailed(WeightSyncError):
    """An update ended without all engines on the new version.

    ``outcomes`` has every engine's state, last acknowledged bucket and own error; ``__cause__`` is
    the first failure, ``at_fault`` names the engines that caused it. The message is a short table.
    ``started`` is False if nothing was touched: no engine was paused or sent anything, none has changed its state.
    """

    version: int = 0
    phase: str = ""
    bucket: int | None = None
    outcomes: Mapping[str, EngineOutcome] = {}
    at_fault: tuple[str, ...] = ()
    started: bool = True
