"""The cheapest schedule within a budget by exhaustive search, with its proof.

Optimal over all schedules of the fixed order (see `states`): some 14 operators take less than a
tenth of a second, 20 take seconds. Where a limit ends the search, only a bound is returned.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import final

from remat.core.errors import SolverError
from remat.core.graph import Graph
from remat.core.solution import SearchRecord, Solution, Status
from remat.solvers.core.base import Solver
from remat.solvers.core.interrupt import heeding_interrupts
from remat.solvers.exhaustive.states import Found, cheapest

# most graphs end at a limit above some 20 operators, and each snapshot doubles the states; round
# numbers, not measured
_MOST_OPERATORS, _MOST_SNAPSHOTS = 100, 10


@final
@dataclass(frozen=True)
class Exhaustive(Solver):
    """Exhaustive search over what is in memory.

    Attributes:
        time_limit_s: ends the search after this long.
        most_states: ends the search at this many states; a million take some 0.5 GiB.
    """

    time_limit_s: float = 60.0
    most_states: int = 1_000_000

    def solve(self, graph: Graph, *, budget_bytes: int) -> Solution:
        """Returns the optimum, a proof that no schedule fits, or only a bound at a limit.

        Raises:
            SolverError: the graph has too many operators or snapshots.
        """
        _check_size(graph)
        began = time.perf_counter()

        with heeding_interrupts() as heeded:
            found = cheapest(
                graph,
                budget_bytes=budget_bytes,
                deadline=began + self.time_limit_s,
                most_states=self.most_states,
            )

        if found.steps is None:
            return self._without_schedule(graph, budget_bytes, found, began, heeded.cut_short)

        return Solution.of_steps(
            graph,
            budget_bytes,
            found.steps,
            lower_bound_s=graph.cost_s + found.least,
            solver=repr(self),
            wall_s=time.perf_counter() - began,
        )

    def _without_schedule(
        self, graph: Graph, budget_bytes: int, found: Found, began: float, cut_short: str
    ) -> Solution:
        return Solution.without_schedule(
            graph,
            budget_bytes,
            Status.INFEASIBLE if found.is_finished else Status.NO_SOLUTION,
            solver=repr(self),
            wall_s=time.perf_counter() - began,
            lower_bound_s=graph.cost_s + (0.0 if found.is_finished else found.least),
            record=SearchRecord(cut_short=cut_short),
        )


def _check_size(graph: Graph) -> None:
    num_snapshots = sum(op.is_snapshot for op in graph.operators)
    if graph.num_operators > _MOST_OPERATORS or num_snapshots > _MOST_SNAPSHOTS:
        raise SolverError(
            f"exhaustive search is for graphs of some 20 operators, with {_MOST_OPERATORS} "
            f"operators and {_MOST_SNAPSHOTS} snapshots at most; this one has "
            f"{graph.num_operators:,} and {num_snapshots}; use solver='auto'"
        )
