"""Results shared by solves of one graph under several budgets: closed forms, least budget, stages.

Stages that give a good bound under one budget also do so under the next: one relaxation with them
replaces the several that it takes to find them. Only stages found by linear relaxations of large
graphs are taken over. On small graphs models are solved with integers, and each unnecessary stage
costs seconds.
"""

from __future__ import annotations

import math

from remat.core.graph import Graph
from remat.solvers.auto.minimum import Minimum, minimum
from remat.solvers.baselines.families import Families
from remat.solvers.bounds.refinement import Refinement


class Shared:
    """Results for one graph that are computed once.

    Attributes:
        graph: any graph.
        families: its closed-form schedules.
    """

    def __init__(self, graph: Graph, least: Minimum | None = None) -> None:
        """Computes nothing yet.

        Args:
            graph: any graph.
            least: the result of `minimum`, where it is known.
        """
        self.graph = graph
        self.families = Families(graph)
        self._least = least
        self._refinements: list[Refinement] = []

    def least(self, *, time_limit_s: float = math.inf) -> Minimum:
        """Returns the least budget, computed within the time limit when it is first asked for."""
        if self._least is None:
            self._least = minimum(self.graph, time_limit_s=time_limit_s, families=self.families)
        return self._least

    def refinement(self, budget_bytes: int) -> Refinement:
        """Returns a refinement for a budget; it starts from the stages of the nearest budget."""
        refinement = Refinement(self.graph, budget_bytes=budget_bytes)
        near = min(
            self._refinements,
            key=lambda known: abs(known.budget_bytes - budget_bytes),
            default=None,
        )
        if near is not None:
            refinement.start_from(near)

        self._refinements.append(refinement)
        return refinement
