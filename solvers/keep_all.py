"""Keep everything: the plain training step.

Other names: store-all, checkpoint-all (Checkmate), no rematerialization.
Optimal: whenever it fits, as no schedule costs less than computing every operator once.
Complexity: O(E).
Imperfections: it fits or it does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from ..graph import Graph
from ..solution import Solution
from .base import Solver
from .segments import cheapest_that_fits


@final
@dataclass(frozen=True)
class KeepAll(Solver):
    """Computes every operator once and keeps each value to its last use."""

    def solve(self, graph: Graph, *, budget_bytes: int) -> Solution:
        """Returns the plain step where it fits, `NO_SOLUTION` where not."""
        return cheapest_that_fits(graph, budget_bytes, [range(graph.num_operators)], solver=repr(self))
