"""The figures that sweeps measure are printed as a table at the end of the run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.lock_scenarios import Figures

_FIGURES = pytest.StashKey[list[Figures]]()


@pytest.fixture
def report_figures(pytestconfig: pytest.Config) -> Callable[[Figures], None]:
    """Call it with what was measured."""
    figures: list[Figures] = pytestconfig.stash.setdefault(_FIGURES, [])
    return figures.append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    figures = config.stash.get(_FIGURES, [])
    if figures:
        terminalreporter.write_line("\n| fault | times | seconds | what came of it |\n|---|---|---|---|")
        for row in figures:
            terminalreporter.write_line(row.row())
