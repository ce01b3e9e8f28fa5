"""The lock, in one place to import from. `docs/lock.md` says what it promises."""

from __future__ import annotations

from async_wsync.lock_adopt import AdoptedLockServer, adopt
from async_wsync.lock_client import BroadcastLock
from async_wsync.lock_hold import Hold
from async_wsync.lock_server import LockServer
from async_wsync.polled_lock import PolledLock

__all__ = ["AdoptedLockServer", "BroadcastLock", "Hold", "LockServer", "PolledLock", "adopt"]
