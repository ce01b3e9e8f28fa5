"""What every test shares: one small Ray cluster, a check that no asyncio task is left behind, and tables of what sweeps
measured at the end of the run."""

from __future__ import annotations

import asyncio
import inspect
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
OBJECT_STORE_BYTES = 200 * 1024 * 1024
TASK_GRACE_SECONDS = 2.0

# torch's store asks a name server for each address that connects to it; a lost answer would cost 5 s (the default).
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# How long an example takes says nothing on a busy machine; and a gate must not depend on luck: always the same there.
settings.register_profile("here", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("here")


@dataclass(frozen=True)
class RayCluster:
    """The running cluster. ``namespace`` is this session's own."""

    namespace: str
    address: str


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


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Every coroutine test is checked for tasks left behind; first in, so last out."""
    for item in items:
        if inspect.iscoroutinefunction(getattr(item, "function", None)) and "no_tasks_left" not in item.fixturenames:
            item.fixturenames.insert(0, "no_tasks_left")


class Figures(Protocol):
    """What a sweep measured, as a row of a table. Those with equal ``COLUMNS`` stand in one table."""

    COLUMNS: ClassVar[str]
    what: str

    def row(self) -> str: ...


Report = Callable[[Figures], None]

_FIGURES = pytest.StashKey[list[Figures]]()


@pytest.fixture
def report_figures(pytestconfig: pytest.Config) -> Report:
    """Call it with what was measured."""
    return pytestconfig.stash.setdefault(_FIGURES, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    tables: dict[str, list[Figures]] = {}
    for figures in config.stash.get(_FIGURES, []):
        tables.setdefault(figures.COLUMNS, []).append(figures)
    for columns, rows in tables.items():
        terminalreporter.write_line(f"\n{columns}\n{'|---' * (columns.count('|') - 1)}|")
        for row in rows:
            terminalreporter.write_line(row.row())
        for row in rows:
            for retried in getattr(row, "retried", ()):
                terminalreporter.write_line(f"LATE, in time when tried again: {row.what}: {retried}")
