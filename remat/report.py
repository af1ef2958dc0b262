"""What was planned and what came of it, as a table a person likes to read."""

from __future__ import annotations

from dataclasses import dataclass

from .graph import Graph
from .solution import Solution


@dataclass(frozen=True)
class Report:
    graph: Graph
    solution: Solution
    measured_peak_bytes: int | None
