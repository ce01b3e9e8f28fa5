"""Real actors as slime and miles have them: a bool lock, and engines that receive over a real gloo group."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist

from async_wsync.groups.member_end import GroupMember
from async_wsync.groups.rendezvous import join_group
from async_wsync.types import GroupSpec


@ray.remote(num_cpus=0)
class BoolLock:
    """``acquire() -> bool`` and ``release()``, and a log of (what, when) for the tests."""

    def __init__(self, slow_answer: float = 0.0, broken: bool = False) -> None:
        self._locked = False
        self._slow_answer = slow_answer
        self._broken = broken
        self._log: list[tuple[str, float]] = []

    def acquire(self) -> bool:
        if self._broken:
            raise RuntimeError("the lock is broken")
        if self._locked:
            self._log.append(("refused", time.time()))
            return False
        self._locked = True
        self._log.append(("granted", time.time()))
        time.sleep(self._slow_answer)
        return True

    def release(self) -> None:
        self._log.append(("released", time.time()))
        if not self._locked:
            raise AssertionError("released while it was free")
        self._locked = False

    def log(self) -> list[tuple[str, float]]:
        return self._log

    def locked(self) -> bool:
        return self._locked


@ray.remote(num_cpus=0)
class MilesEngine:
    """An engine with SGLang's method. ``plan`` says what the next call does besides its work."""

    def __init__(self) -> None:
        self._members: dict[str, GroupMember] = {}
        self.weights: dict[str, torch.Tensor] = {}
        self.calls: list[dict[str, Any]] = []
        self.finished: list[float] = []
        self.plan: dict[str, Any] = {}

    def join_world(self, address: str, port: int, rank: int, world_size: int, timeout: float) -> None:
        """A plain torch process group, as those frameworks make it."""
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout))
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )

    def join(self, spec: GroupSpec, rank: int, member: str) -> None:
        """A group of ours, used for the buckets that name it."""
        self._members[spec.name] = join_group(spec, rank, member=member)

    def leave(self, name: str) -> None:
        self._members.pop(name).close()

    def forget(self) -> None:
        """As new, but for the groups."""
        self.weights, self.calls, self.finished, self.plan = {}, [], [], {}

    def set_plan(self, **plan: Any) -> None:
        self.plan = plan

    def update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: list[torch.dtype],
        shapes: list[torch.Size],
        group_name: str,
        weight_version: str | None = None,
        selector: str = "all",
    ) -> Any:
        self.calls.append(
            {
                "names": names,
                "dtypes": dtypes,
                "shapes": shapes,
                "group_name": group_name,
                "weight_version": weight_version,
                "selector": selector,
            }
        )
        plan, self.plan = self.plan, {}
        try:
            if "raise_at_entry" in plan:
                raise plan["raise_at_entry"]
            if not plan.get("skip_receive"):
                self._receive(names, dtypes, shapes, self._members.get(group_name))
            time.sleep(plan.get("seconds", 0.0))
            if "raise_at_exit" in plan:
                raise plan["raise_at_exit"]
            return plan.get("reply", {"success": True, "message": "Succeeded to update parameter online."})
        finally:
            self.finished.append(time.time())

    def _receive(
        self, names: list[str], dtypes: list[torch.dtype], shapes: list[torch.Size], member: GroupMember | None
    ) -> None:
        buffers = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        if member is not None:
            member.broadcast(buffers, timeout=30.0)
        else:
            for work in [dist.broadcast(buffer, 0, async_op=True) for buffer in buffers]:
                work.wait()
        self.weights.update(zip(names, buffers, strict=True))

    def seen(self) -> dict[str, Any]:
        return {"calls": self.calls, "finished": self.finished, "weights": self.weights}


class Bar:
    """Counts what `update_bucket` reports."""

    def __init__(self) -> None:
        self.moves: list[int] = []

    def update(self, n: int) -> None:
        self.moves.append(n)


class BrokenBar:
    def update(self, n: int) -> None:
        raise OSError("the terminal is gone")


async def ray_value(ref: Any) -> Any:
    return await asyncio.wrap_future(ref.future())
