"""One fleet of peer processes for a module's tests; starting one costs seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gloo.peers import Fleet


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.end()
