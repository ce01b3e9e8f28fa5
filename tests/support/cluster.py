"""What tests know of the cluster that they run on, and of the tables that sweeps report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class RayCluster:
    """The running cluster. ``namespace`` is this session's own."""

    namespace: str
    address: str


class Row(Protocol):
    """What a sweep measured, as a row of a table. Those with equal ``COLUMNS`` stand in one table."""

    COLUMNS: ClassVar[str]
    what: str

    def row(self) -> str: ...


Report = Callable[[Row], None]
