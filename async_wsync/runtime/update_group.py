"""Update groups: the `torch.distributed` groups over which weights travel.

The source opens a `Rendezvous`, hands its ``spec`` to the engines, and completes it to an `UpdateGroup`; each engine
rank calls `join_group` and gets a `GroupMember`. Nothing here imports Ray.
"""

from __future__ import annotations

from async_wsync.runtime.group_member import GroupMember
from async_wsync.runtime.group_source import UpdateGroup
from async_wsync.runtime.rendezvous import Rendezvous, join_group

__all__ = ["GroupMember", "Rendezvous", "UpdateGroup", "join_group"]
