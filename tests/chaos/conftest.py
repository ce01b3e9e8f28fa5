"""The figures that sweeps measure are printed as tables at the end of the run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import ClassVar, Protocol

import pytest

from tests.ray.conftest import _rig, lock, rig

__all__ = ["SLACK", "Figures", "Report", "_rig", "lock", "report_figures", "rig"]

#: A busy machine may take so many times longer than the promise before a test fails; the table shows what it took.
SLACK = float(os.environ.get("WSYNC_CHAOS_SLACK", "1.0"))


class Figures(Protocol):
    COLUMNS: ClassVar[str]

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
