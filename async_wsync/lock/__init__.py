"""The lock, in one place to import from. `docs/lock.md` says what it promises."""

from __future__ import annotations

from async_wsync.lock.adopt import AdoptedLockServer, adopt
from async_wsync.lock.bool_lock import PolledLock
from async_wsync.lock.client import BroadcastLock
from async_wsync.lock.hold import Hold
from async_wsync.lock.server import LockServer

__all__ = ["AdoptedLockServer", "BroadcastLock", "Hold", "LockServer", "PolledLock", "adopt"]
