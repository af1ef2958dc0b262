"""Keep everything: the plain training step.

Other names: store-all, checkpoint-all (Checkmate), no rematerialization.
Optimal: whenever it fits, as no schedule costs less than computing every operator once.
Complexity: O(E).
Imperfections: one schedule, which fits the budget or does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from remat.core.graph import Graph
from remat.solvers.baselines.segment_family import Family


@final
@dataclass(frozen=True)
class KeepAll(Family):
    """Computes every operator once and keeps each value to its last use."""

    def members(self, graph: Graph) -> list[range]:
        """Returns the plain step."""
        return [range(graph.num_operators)]
