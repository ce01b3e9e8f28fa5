"""What every test run does: checks that no asyncio task is left behind, and prints what sweeps measured."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.support.cluster import Row
from tests.support.fixtures import (
    FIGURES,
    _rig,
    _rigs,
    fleet,
    judge,
    lock,
    more_rigs,
    no_tasks_left,
    ray_cluster,
    report_figures,
    rig,
    rigs,
    scripts,
)

__all__ = [
    "_rig",
    "_rigs",
    "fleet",
    "judge",
    "lock",
    "more_rigs",
    "no_tasks_left",
    "ray_cluster",
    "report_figures",
    "rig",
    "rigs",
    "scripts",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without-ray", action="store_true", help="only tests that start no Ray cluster and no processes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Every coroutine test is checked for tasks left behind; first in, so last out."""
    for item in items:
        if inspect.iscoroutinefunction(getattr(item, "function", None)) and "no_tasks_left" not in item.fixturenames:
            item.fixturenames.insert(0, "no_tasks_left")
    if config.getoption("--without-ray"):
        slow = [item for item in items if {"ray_cluster", "fleet"} & set(getattr(item, "fixturenames", ()))]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    tables: dict[str, list[Row]] = {}
    for figures in config.stash.get(FIGURES, []):
        tables.setdefault(figures.COLUMNS, []).append(figures)
    for columns, rows in tables.items():
        terminalreporter.write_line(f"\n{columns}\n{'|---' * (columns.count('|') - 1)}|")
        for row in rows:
            terminalreporter.write_line(row.row())
        for row in rows:
            for retried in getattr(row, "retried", ()):
                terminalreporter.write_line(f"LATE, in time when tried again: {row.what}: {retried}")
