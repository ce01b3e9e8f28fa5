"""Fixtures that every test may use: one small Ray cluster, engines and peers that live through many tests."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from hypothesis import settings

from async_wsync import BroadcastLock
from tests.support.cluster import ROOT, RayCluster, Report, Row
from tests.support.fleet import Rig
from tests.support.peers import Fleet
from tests.support.scripts import Scripts, all_scripts
from tests.support.sweep_figures import Figures

OBJECT_STORE_BYTES = 200 * 1024 * 1024
TASK_GRACE_SECONDS = 2.0

# torch's store asks a name server for each address that connects to it; a lost answer would cost 5 s (the default).
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# How long an example takes says nothing on a busy machine; and a gate must not depend on luck: always the same there.
settings.register_profile("here", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("here")


def _workers_can_import_the_tests() -> None:
    """Ray workers import actor classes by module name, from this repository's root."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(ROOT) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, paths)])


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """A local Ray cluster of 8 logical CPUs for the whole session."""
    import ray

    _workers_can_import_the_tests()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    namespace = f"tests-{uuid.uuid4().hex[:8]}"
    context = ray.init(
        address="local",  # whatever other cluster runs on this machine
        num_cpus=8,
        include_dashboard=False,
        namespace=namespace,
        object_store_memory=OBJECT_STORE_BYTES,
        configure_logging=False,
    )
    try:
        yield RayCluster(namespace=namespace, address=context.address_info["gcs_address"])
    finally:
        _kill_named_actors(namespace)
        ray.shutdown()


def _kill_named_actors(namespace: str) -> None:
    import ray
    from ray.util import list_named_actors

    for entry in list_named_actors(all_namespaces=True):
        if entry["namespace"] == namespace:
            try:
                ray.kill(ray.get_actor(entry["name"], namespace=namespace))
            except ValueError:
                pass  # it died meanwhile


@pytest.fixture
async def no_tasks_left() -> AsyncIterator[None]:
    """Fails the test that leaves an asyncio task behind. Tasks get a moment to end by themselves."""
    before = asyncio.all_tasks()
    yield
    own = asyncio.current_task()
    limit = time.monotonic() + TASK_GRACE_SECONDS
    while left := asyncio.all_tasks() - before - {own}:
        if time.monotonic() > limit:
            pytest.fail("asyncio tasks left behind:\n" + "\n".join(f"  {task!r}" for task in left))
        await asyncio.sleep(0.005)


FIGURES = pytest.StashKey[list[Row]]()


@pytest.fixture
def report_figures(pytestconfig: pytest.Config) -> Report:
    """Call it with what was measured."""
    return pytestconfig.stash.setdefault(FIGURES, []).append


Judge = Callable[..., None]

NUM_RIGS = 5


@pytest.fixture(scope="session")
def _rig(ray_cluster: RayCluster) -> Iterator[Rig]:
    rig = Rig()
    rig.start()
    rig.wait()
    yield rig
    rig.close()


@pytest.fixture
async def rig(_rig: Rig) -> Rig:
    """Three engines named e0, e1, e2, alive and without a script."""
    await _rig.ready()
    return _rig


def _started(count: int) -> Iterator[list[Rig]]:
    rigs = [Rig() for _ in range(count)]
    for rig in rigs:
        rig.start()
    for rig in rigs:
        rig.wait()
    yield rigs
    for rig in rigs:
        rig.close()


@pytest.fixture(scope="session")
def _rigs(_rig: Rig) -> Iterator[list[Rig]]:
    for others in _started(NUM_RIGS - 1):
        yield [_rig, *others]


@pytest.fixture
async def rigs(_rigs: list[Rig]) -> list[Rig]:
    """As many as are worth it where updates mostly wait for a limit."""
    await asyncio.gather(*(rig.ready() for rig in _rigs))
    return _rigs


@pytest.fixture(scope="module")
def more_rigs(_rigs: list[Rig]) -> Iterator[list[Rig]]:
    """For limits of several seconds: who waits for a frozen engine needs no core."""
    yield from _started(NUM_RIGS + 2)


@pytest.fixture
async def lock(ray_cluster: RayCluster) -> AsyncIterator[BroadcastLock]:
    """A lock of the test's own."""
    lock = BroadcastLock.create(name=f"lock-{uuid.uuid4().hex[:6]}", namespace=ray_cluster.namespace)
    await lock.status(timeout=90)  # its actor is there
    yield lock
    await lock.shutdown()


@pytest.fixture
def judge(report_figures: Report) -> Judge:
    """Reports what a sweep measured. Fails if anything was wrong, or if its fault struck less often than ``hits``."""

    def judge(figures: Figures, *, hits: int = 1) -> None:
        report_figures(figures)
        assert not figures.wrong, "\n".join(figures.wrong[:20])
        assert figures.fired >= hits

    return judge


@pytest.fixture(scope="session")
def scripts(ray_cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripts]:
    scripts = all_scripts(ray_cluster, tmp_path_factory.mktemp)
    yield scripts
    scripts.close()


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.end()
