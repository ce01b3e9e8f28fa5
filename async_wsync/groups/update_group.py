"""Update groups: the `torch.distributed` groups over which weights travel.

The source opens a `Rendezvous`, hands its ``spec`` to the engines, and completes it to an `UpdateGroup`; each engine
rank calls `join_group` and gets a `GroupMember`. Nothing here imports Ray.
"""

from __future__ import annotations

from async_wsync.groups.member_end import GroupMember
from async_wsync.groups.rendezvous import Rendezvous, join_group
from async_wsync.groups.source_end import UpdateGroup

__all__ = ["GroupMember", "Rendezvous", "UpdateGroup", "join_group"]
