"""Which requests an engine takes: those of whoever holds the lock, and meant for this very process."""

from __future__ import annotations

import threading

from async_wsync.engines.receiving.group_memberships import GroupMemberships
from async_wsync.errors import EngineReplaced, StaleFence
from async_wsync.types import Call

__all__ = ["Admission"]


class Admission:
    """Remembers the highest fence that was seen. ``incarnation``: names this process."""

    def __init__(self, changed: threading.Condition, memberships: GroupMemberships, *, incarnation: str) -> None:
        self._changed = changed
        self._memberships = memberships
        self._incarnation = incarnation
        self._fence = 0

    def check_incarnation(self, meant: str | None) -> None:
        """`EngineReplaced` if ``meant`` names another process; None means whoever answers."""
        if meant not in (None, self._incarnation):
            raise EngineReplaced("this engine was restarted: it has neither the group nor the weights it had")

    def admit(self, call: Call, *, ends: str | None = None) -> None:
        """`StaleFence` for a caller that has lost the lock. A higher fence than before breaks off older receives.

        ``ends``: the group that the call aborts or leaves; whoever lost the lock may still end what it started.
        """
        with self._changed:
            if ends is not None and self._memberships.owns(ends, call.source):
                return
            self.check_fence(call)
            if call.fence > self._fence:
                self._fence = call.fence
                self._changed.notify_all()
                self._memberships.abort_busy(below=call.fence)

    def check_fence(self, call: Call) -> None:
        """`StaleFence` if a higher fence was seen, also since the call was admitted."""
        with self._changed:
            if call.fence < self._fence:
                raise StaleFence(
                    f"fence {call.fence} of {call.source!r} is stale, {self._fence} was seen: the caller lost the lock",
                    fence=call.fence,
                    seen=self._fence,
                )
