"""Engines that live through many tests: starting one costs seconds."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from async_wsync import BroadcastLock
from tests.conftest import RayCluster, Report
from tests.ray.fleet import Rig
from tests.ray.scripts import Scripts, all_scripts
from tests.sweep_figures import Figures

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


@pytest.fixture(scope="session")
def _rigs(_rig: Rig) -> Iterator[list[Rig]]:
    others = [Rig() for _ in range(NUM_RIGS - 1)]
    for rig in others:
        rig.start()
    for rig in others:
        rig.wait()
    yield [_rig, *others]
    for rig in others:
        rig.close()


@pytest.fixture
async def rigs(_rigs: list[Rig]) -> list[Rig]:
    """As many as are worth it where updates mostly wait for a limit."""
    await asyncio.gather(*(rig.ready() for rig in _rigs))
    return _rigs


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
