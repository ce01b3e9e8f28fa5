"""Three scripted engines that live through many tests, and whatever a test of updates asks of them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import ray
import torch
from torch import nn

from async_wsync import BroadcastLock, EngineState, ModuleSource, Timeouts, TorchEngine, UpdateFailed, WeightBroadcaster
from async_wsync.runtime.object_refs import await_ref
from async_wsync.testing import Fault, start_engine
from async_wsync.transfer.checksum import model_digests
from async_wsync.types import UpdateEvent
from tests.support.waiting import until

T = TypeVar("T")

NAMES = ("e0", "e1", "e2")
SIZE = 96
NUM_BUCKETS = 5
BUCKET_BYTES = 4 * SIZE * (SIZE + 1)  # one layer each

#: Wide enough for a busy machine; tests of a limit replace that one.
LIMITS = Timeouts(
    connect=60, lock=60, pause=40, flush=40, begin=40, bucket=40, idle=40, end=40, resume=40, drain=30, close=10
)

#: "At once", on a machine that may be busy with something else. The chaos run measures against 1 s.
SOON = 15.0


def a_model(seed: int = 0) -> nn.Module:
    """``NUM_BUCKETS`` equal layers, each of which fills a bucket of ``BUCKET_BYTES``."""
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(SIZE, SIZE) for _ in range(NUM_BUCKETS)])


def a_large_model(seed: int = 0) -> nn.Module:
    """64 MB in one matrix."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4096, 4096, bias=False))


def a_source(seed: int) -> ModuleSource:
    return ModuleSource(a_model(seed))


async def call(ref: Any) -> Any:
    return await asyncio.wait_for(await_ref(ref), 90)


@dataclass
class Rig:
    """The engines by name. A killed one is replaced before the next test needs it."""

    build: Any = a_model
    handles: dict[str, Any] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    spares: list[Any] = field(default_factory=list)
    _fired_before: dict[str, int] = field(default_factory=dict)
    version: int = 0

    def start(self) -> None:
        """Without waiting for the engines."""
        self.handles = {name: start_engine(self.build) for name in NAMES}

    def wait(self) -> None:
        for name, handle in self.handles.items():
            self.pids[name] = ray.get(handle.pid.remote(), timeout=120)
            self._fired_before[name] = 0

    def close(self) -> None:
        for handle in [*self.handles.values(), *self.spares]:
            ray.kill(handle)

    async def revive(self, name: str) -> TorchEngine:
        """Another actor in the place of a dead one. Two are started side by side, as one takes seconds on one core."""
        if not self.spares:
            self.spares = [start_engine(self.build) for _ in range(2)]
        for spare in self.spares:
            await call(spare.pid.remote())  # none starts while something is measured
        self.handles[name] = self.spares.pop()
        self.pids[name] = await call(self.handles[name].pid.remote())
        self._fired_before[name] = 0
        return TorchEngine(self.handles[name], name=name)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids[name], number)

    async def ready(self) -> None:
        """Every engine alive, without a script."""
        for name in NAMES:
            try:
                await call(self.handles[name].set_script.remote([]))
            except Exception:
                await self.revive(name)
            self._fired_before[name] = len(await call(self.handles[name].fired.remote()))

    async def script(self, name: str, *faults: Fault) -> None:
        await call(self.handles[name].set_script.remote(faults))

    async def fired(self, name: str) -> list[str]:
        """What was done in this test."""
        return list((await call(self.handles[name].fired.remote()))[self._fired_before[name] :])

    async def seen(self, name: str) -> list[Any]:
        return list(await call(self.handles[name].seen.remote()))

    async def state(self, name: str) -> tuple[str, int | None]:
        return tuple(await call(self.handles[name].state.remote()))  # type: ignore[return-value]

    async def sample(self, name: str) -> tuple[int | None, str] | None:
        """What the engine generates: its version and the checksum of what it holds. None if it lets nobody in."""
        try:
            return tuple(await call(self.handles[name].generate.remote()))  # type: ignore[return-value]
        except Exception:
            return None

    async def serves(self, name: str) -> bool:
        """Whether the engine lets a generation in."""
        return await self.sample(name) is not None

    async def holds(self, name: str, model: nn.Module) -> bool:
        return bool(await call(self.handles[name].digests.remote()) == model_digests(model.state_dict()))

    def engines(self, names: Iterable[str] = NAMES) -> list[TorchEngine]:
        return [TorchEngine(self.handles[name], name=name) for name in names]

    def next_version(self) -> int:
        self.version += 1
        return self.version

    def broadcaster(self, names: Iterable[str] = NAMES, **options: Any) -> WeightBroadcaster:
        options = {
            "lock": None,
            "backend": "gloo",
            "bucket_bytes": BUCKET_BYTES,
            "timeouts": LIMITS,
            "progress": False,
            **options,
        }
        return WeightBroadcaster(self.engines(names), **options)


async def side_by_side(rigs: Sequence[Rig], jobs: Iterable[Callable[[Rig], Awaitable[T]]]) -> list[T]:
    """What ``jobs`` return, each done with a rig of its own, as many at a time as there are rigs."""
    free: asyncio.Queue[Rig] = asyncio.Queue()
    for rig in rigs:
        free.put_nowait(rig)

    async def done(job: Callable[[Rig], Awaitable[T]]) -> T:
        rig = await free.get()
        try:
            return await job(rig)
        finally:
            free.put_nowait(rig)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(done(job)) for job in jobs]
    return [task.result() for task in tasks]


class Events(list[UpdateEvent]):
    """Give it as ``on_event``."""

    def __call__(self, event: UpdateEvent) -> None:
        self.append(event)

    def kinds(self) -> list[str]:
        return [event.kind for event in self]


class Bar:
    """A progress bar that only remembers."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.moved: list[int] = []
        self.closed: list[str] = []

    def start(self, *, version: int, total_bytes: int, num_buckets: int) -> None:
        self.started.append(total_bytes)

    def advance(self, *, nbytes: int, bucket: int) -> None:
        self.moved.append(bucket)

    def close(self, *, status: str) -> None:
        self.closed.append(status)


def set_limits(broadcaster: WeightBroadcaster, limits: Timeouts) -> None:
    """Other limits from its next update on; its groups keep theirs."""
    context = broadcaster._context
    broadcaster._context = replace(context, settings=replace(context.settings, timeouts=limits))


async def failure_of(update: Any) -> tuple[UpdateFailed, float]:
    """The failure of an update that must fail, and how long it took."""
    started = time.monotonic()
    try:
        report = await update
    except UpdateFailed as failure:
        return failure, time.monotonic() - started
    raise AssertionError(f"the update did not fail: {report.summary()}")


def update_tasks() -> list[str]:
    """The names of this loop's tasks that belong to an update."""
    return [t.get_name() for t in asyncio.all_tasks() if "wsync" in t.get_name() or "update" in t.get_name()]


async def is_free(lock: BroadcastLock) -> bool:
    return not (await lock.status(timeout=30))["held"]


async def heals(rig: Rig, broadcaster: WeightBroadcaster, seed: int = 77) -> None:
    """The next update reaches every engine, whatever was before."""
    await broadcaster.update_weights(a_source(seed), version=rig.next_version(), verify="source")
    assert set(broadcaster.engine_states.values()) == {EngineState.CURRENT}
    for engine in broadcaster.current_engines():
        assert await rig.holds(engine, a_model(seed))
        assert await rig.serves(engine)


async def has_fired(rig: Rig, name: str) -> bool:
    return bool(await rig.fired(name))


async def received(rig: Rig, name: str) -> list[Any]:
    return [s for s in await rig.seen(name) if s.verb == "receive"]


async def updating(rig: Rig, broadcaster: WeightBroadcaster, *, seconds: float = 1.0) -> asyncio.Task[Any]:
    """An update whose second bucket takes e1 a while, and is under way."""
    await rig.script("e1", Fault(do="delay", bucket=1, seconds=seconds))
    fired = len(await rig.fired("e1"))
    update = asyncio.ensure_future(broadcaster.update_weights(a_source(5), version=rig.next_version()))

    async def begun() -> bool:
        return len(await rig.fired("e1")) > fired

    await until(begun)
    return update
