"""What solves of one graph under several budgets share.

Closed-form schedules, the least budget, and where models were cut.

Stages that bound much under one budget bound much under the next: a relaxation over them is solved
at once, where finding them takes several. Only stages found by linear relaxations are taken over,
of graphs large enough for these; on small ones models are solved with integers, and each stage more
than is needed costs seconds.
"""

from __future__ import annotations

import math

from remat.core.graph import Graph
from remat.solvers.auto.minimum import Minimum, minimum
from remat.solvers.baselines.families import Families
from remat.solvers.bounds.refinement import Refinement


class Shared:
    """The work on one graph that is done once.

    Attributes:
        graph: any graph.
        families: its closed-form schedules.
    """

    def __init__(self, graph: Graph, least: Minimum | None = None) -> None:
        """Prepares; nothing is computed yet.

        Args:
            graph: any graph.
            least: what `minimum` says of it, where it was asked before.
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
        """Returns a refinement for a budget, which starts from the stages of the one solved with
        the nearest budget.
        """
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
