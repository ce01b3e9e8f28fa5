"""Whether a broadcaster is open, and which of its calls may run then.

    new -> open -> closing -> closed -> open again, by connect()

| call                                            | new   | open | closing | closed      |
|-------------------------------------------------|-------|------|---------|-------------|
| connect                                         | opens | yes  | refused | opens again |
| update_weights, catch_up                        | opens | yes  | refused | refused     |
| add_engines, remove_engines, replace_engine     | yes   | yes  | refused | yes         |
| aclose                                          | yes   | yes  | joins   | yes         |

A call that was admitted and still waits for its turn when `closing` comes is over: it must ask `still_wanted` once it
has its turn. Pure: no clock, no I/O.
"""

from __future__ import annotations

import enum

from async_wsync.errors import Cancelled

__all__ = ["LifeCycle", "Phase"]


class Phase(enum.StrEnum):
    NEW = "new"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


_UPDATES = frozenset({"update_weights", "catch_up"})


class LifeCycle:
    """The life cycle of the broadcaster called ``name``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.phase = Phase.NEW
        self._closings = 0

    def admit(self, call: str) -> int:
        """Raise ValueError if ``call`` may not begin now; else a number to give to `still_wanted`."""
        if self.phase is Phase.CLOSING:
            raise ValueError(f"{call}: {self.name} is being closed: wait until its aclose() has returned")
        if self.phase is Phase.CLOSED and call in _UPDATES:
            raise ValueError(f"{call}: {self.name} is closed: connect() it again, or make a new broadcaster")
        return self._closings

    def still_wanted(self, call: str, admitted: int) -> None:
        """Raise `Cancelled` if the broadcaster was closed since ``call`` was admitted."""
        if admitted != self._closings:
            raise self._closed_under(call)

    def opened(self, call: str) -> None:
        """The work of ``call`` is done. Raises `Cancelled` if the broadcaster was closed under it: it stays closed."""
        if self.phase is Phase.CLOSING:
            raise self._closed_under(call)
        self.phase = Phase.OPEN

    def _closed_under(self, call: str) -> Cancelled:
        return Cancelled(f"{self.name} was closed during {call}")

    def failed_to_open(self) -> None:
        """A connect() failed. One that was open before stays open; the next update forms its groups."""
        if self.phase is Phase.NEW:
            self.phase = Phase.CLOSED

    def closing(self) -> None:
        self._closings += 1
        self.phase = Phase.CLOSING

    def closed(self) -> None:
        assert self.phase is Phase.CLOSING, self.phase
        self.phase = Phase.CLOSED
