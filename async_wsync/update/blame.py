"""Which failure explains the others, and which engines are at fault."""

from __future__ import annotations

from collections.abc import Mapping

from async_wsync.errors import (
    BroadcastFailed,
    EngineDied,
    EngineFailed,
    EngineReplaced,
    EngineTimeout,
    RendezvousError,
    StaleFence,
)
from async_wsync.runtime.engine_calls import EngineCalls, Sent

__all__ = ["blame"]


def blame(first: BaseException, calls: EngineCalls, silent: Mapping[str, Sent]) -> tuple[BaseException, set[str]]:
    """The failure that explains the others, and the engines at fault.

    A broken collective is seen by every member at once, often before the death that broke it. So once all has
    settled, an engine's own failure is blamed before a broken collective, and an engine that never settled
    before those that were only waiting for it.
    """
    own = [s for s in calls.failures() if _is_own(s.failure)]
    own.sort(key=lambda s: not isinstance(s.failure, EngineDied | EngineReplaced))
    at_fault = {s.engine for s in own if not isinstance(s.failure, StaleFence)} | set(silent)
    if isinstance(first, RendezvousError):
        culprits = set(first.waiting_for) or at_fault  # the others' joins failed for want of these
        return _with_names(first, culprits), culprits
    if isinstance(first, EngineTimeout):
        waiting = set(first.waiting_for) or set(silent)
        culprits = at_fault & waiting or at_fault or waiting
        return _renamed(first, culprits), culprits
    if not _is_collateral(first):
        return first, at_fault
    if own:
        cause = own[0].failure
        assert cause is not None
        return cause, at_fault
    if silent:
        return _never_settled(silent), at_fault
    return first, at_fault


def _never_settled(silent: Mapping[str, Sent]) -> EngineTimeout:
    sent = next(iter(silent.values()))
    where = sent.phase if sent.bucket is None else f"{sent.phase} {sent.bucket}"
    names = ", ".join(sorted(silent))
    return EngineTimeout(
        f"{where}: {names} went silent: the broadcast broke for the others, and its call never settled "
        "(Timeouts.drain). The engine may be stopped or cut off.",
        engine=sent.engine,
        phase=sent.phase,
        bucket=sent.bucket,
        field="drain",
        waiting_for=tuple(sorted(silent)),
    )


def _renamed(error: EngineTimeout, culprits: set[str]) -> EngineTimeout:
    """A deadline names everyone still waiting; afterwards we know who held them up."""
    if not culprits or culprits == set(error.waiting_for):
        return error
    facts = {**error.facts_for(EngineTimeout), "engine": sorted(culprits)[0], "waiting_for": tuple(sorted(culprits))}
    names = ", ".join(sorted(culprits))
    where = error.phase if error.bucket is None else f"{error.phase} {error.bucket}"
    return EngineTimeout(
        f"{where}: {names} did not answer within {error.seconds:g} s (Timeouts.{error.field}) and held up the rest. "
        f"The engine may be stopped or cut off; replace it, or raise Timeouts.{error.field} if it only needs longer.",
        **facts,
    )


def _with_names(error: RendezvousError, culprits: set[str]) -> RendezvousError:
    """Which member did not connect is not always seen in the group; an engine whose call never settled is."""
    if error.waiting_for or not culprits:
        return error
    names = tuple(sorted(culprits))
    facts = {**error.facts_for(RendezvousError), "waiting_for": names}
    named = RendezvousError(f"{error}; {', '.join(names)} held it up", **facts)
    named.__cause__ = error
    return named


def _is_collateral(error: BaseException | None) -> bool:
    return isinstance(error, BroadcastFailed) or (isinstance(error, EngineFailed) and error.is_collective)


def _is_own(error: BaseException | None) -> bool:
    return isinstance(error, EngineFailed) and not error.is_collective
