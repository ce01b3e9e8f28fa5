"""Fault injection for your own tests: real actors, real processes, real sockets, no mocks.

* `ScriptedEngine`, `Fault`: a rollout engine that does what you tell it at the moment you name.
* `BoolLockActor`, `SlowLockServer`: locks as other frameworks have them, and locks that answer late.
* `PortSquatter`: a listener that never answers. `LoopGapMeter`: how long the event loop was kept from coming round.
* `cancel_at_every_await`, `kill_at_every_event`: replay a scenario with a cancellation, or a kill, at each step.

Every fault is recorded when it happens: assert that yours did (`ScriptedEngine.fired`, `CancelRun.fired`,
`KillRun.fired`), or a test that no longer reaches it will pass for nothing.
"""

from __future__ import annotations

from async_wsync.runtime.loop_gap import LoopGapMeter
from async_wsync.testing.cancel import CANCEL_KINDS, CancelKind, CancelRun, cancel_at_every_await
from async_wsync.testing.engines import Fault, ScriptedEngine, Seen, start_engine
from async_wsync.testing.kill import KillRun, kill_at_every_event
from async_wsync.testing.locks import BoolLockActor, SlowLockServer
from async_wsync.testing.network import PortSquatter

__all__ = [
    "CANCEL_KINDS",
    "BoolLockActor",
    "CancelKind",
    "CancelRun",
    "Fault",
    "KillRun",
    "LoopGapMeter",
    "PortSquatter",
    "ScriptedEngine",
    "Seen",
    "SlowLockServer",
    "cancel_at_every_await",
    "kill_at_every_event",
    "start_engine",
]
