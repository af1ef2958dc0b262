"""The Checkmate MILP, exact over all schedules in fixed order, solved by HiGHS.

Also called: optimal tensor rematerialization, Checkmate ILP. Papers: Jain et al., "Checkmate",
MLSys 2020; Hooker and Ottosson, "Logic-based Benders decomposition", 2003 (for the inside of stages).
Optimal: for every graph and budget, where it ends before its limits; the class is all schedules whose
first computations come in the graph's order, with any order and repetition of recomputations. The
paper's own model allows each operator once a stage, in the graph's order; see `stage_search` for how
the two meet. The bound is valid whenever it stops.
Complexity: NP-hard; O(n (n + E)) nonzeros.

Known imperfections: above about 150 operators HiGHS rarely closes the gap in minutes (use `auto`).
A stage that recomputes many operators beside many live values may exceed the exact search of its
order; then the answer is `FEASIBLE` with a valid bound. Where costs are not whole multiples of one
number, a gap of 0 means 1e-7.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import final

from ..graph import Graph
from ..solution import Solution, Status
from .base import Solver
from .highs_backend import Backend, Highs
from .on_demand import forward_length, steps_on_demand
from .progress import ProgressCallback
from .stage_form import stage_form
from .stage_search import TOLERANCE, Limits, StageSearch


@final
@dataclass(frozen=True)
class MILP(Solver):
    """The Checkmate MILP through HiGHS.

    Attributes:
        gap: stop where the cost is proved within this fraction of the optimum.
        time_limit_s: stop after this long, with the best schedule and bound so far.
        threads: of HiGHS; 0 leaves the number to it.
        incumbent: steps to start from, where a schedule is known.
        progress: called with the best cost and bound so far.

    >>> graph = Graph.from_arrays([1, 1, 1, 1], [4, 4, 4, 1], [(0, 1), (1, 2), (2, 3), (0, 3)])
    >>> MILP().solve(graph, budget_bytes=9).cost_s
    5.0
    """

    gap: float = 0.0
    time_limit_s: float = 60.0
    threads: int = 1
    incumbent: tuple[int, ...] = field(default=(), repr=False)
    progress: ProgressCallback | None = field(default=None, repr=False, compare=False)

    def solve(self, graph: Graph, *, budget_bytes: int) -> Solution:
        """Returns the optimum, or the best schedule within the limits with a valid bound.

        Raises:
            SolverError: the model would be absurdly big, or HiGHS is not installed.
        """
        limits = Limits(self.gap, self.time_limit_s)
        return solve_exactly(
            graph, budget_bytes, Highs(self.threads), limits, solver=repr(self), incumbent=self.incumbent, progress=self.progress
        )


def solve_exactly(
    graph: Graph,
    budget_bytes: int,
    backend: Backend,
    limits: Limits,
    *,
    solver: str,
    incumbent: tuple[int, ...] = (),
    progress: ProgressCallback | None = None,
) -> Solution:
    """Returns the answer of the stage model with any backend."""
    began = time.monotonic()
    form = stage_form(graph, budget_bytes)
    if any(form.working_bytes(i) > form.capacity_bytes for i in range(form.num_operators)) or form.capacity_bytes < 0:
        wall_s = time.monotonic() - began
        return Solution.without_schedule(graph, budget_bytes, Status.INFEASIBLE, solver=solver, wall_s=wall_s)
    search = StageSearch(form, graph, budget_bytes, backend, limits, progress)
    for steps in [tuple(range(graph.num_operators)), incumbent, *_on_demand(graph)]:
        if steps and not search.is_closed:
            search.offer(steps)
    search.run()
    wall_s = time.monotonic() - began
    if search.steps is None:
        status = Status.INFEASIBLE if search.is_infeasible else Status.NO_SOLUTION
        return Solution.without_schedule(graph, budget_bytes, status, solver=solver, wall_s=wall_s, lower_bound_s=search.bound_s)
    return Solution.of_steps(
        graph,
        budget_bytes,
        search.steps,
        lower_bound_s=search.bound_s,
        solver=solver,
        wall_s=wall_s,
        gap=max(limits.gap, TOLERANCE),
    )


def _on_demand(graph: Graph) -> list[tuple[int, ...]]:
    """Returns a few schedules that forget the largest values of the forward, more and more of them."""
    boundary = forward_length(graph)
    written = [v for i in range(boundary) for v in graph.operators[i].writes]
    by_size = sorted(written, key=lambda v: graph.values[v].size_bytes)
    return [tuple(steps_on_demand(graph, by_size[: len(by_size) * part // 8])) for part in range(7, -1, -1)]
