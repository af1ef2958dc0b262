"""The Checkmate MILP, exact over all schedules in fixed order, solved by HiGHS.

Other names: optimal tensor rematerialization, Checkmate ILP.
Papers: Jain et al., "Checkmate", MLSys 2020; Hooker and Ottosson, "Logic-based Benders
decomposition", 2003 (for the inside of stages).
Optimal: for every graph and budget, where it ends before its limits; the class is all schedules
whose first computations come in the graph's order, with recomputations in any order and number. The
paper's own model allows each operator once per stage, in the graph's order; `stage_search` says how
the two are combined. The bound is valid whenever the solve stops.
Complexity: NP-hard; O(n (n + E)) nonzeros.
Imperfections: above about 150 operators HiGHS rarely closes the gap in minutes (use `auto`). A
stage that recomputes many operators beside many live values may be too large for the exact search
of its order; then the answer is `FEASIBLE` with a valid bound. Where costs are not whole multiples
of one number, a gap of 0 means 1e-7.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import final

from remat.core.graph import Graph
from remat.core.schedule import Schedule
from remat.core.solution import SearchRecord, Solution, Status
from remat.core.validate import validate
from remat.solvers.checkmate.lp_rounding import relax, round_to_steps
from remat.solvers.checkmate.stage_form import stage_form
from remat.solvers.checkmate.stage_search import TOLERANCE, Limits, StageSearch
from remat.solvers.core.base import Solver
from remat.solvers.core.interrupt import heeding_interrupts
from remat.solvers.core.memory import leaving_out
from remat.solvers.core.on_demand import forward_length, steps_on_demand
from remat.solvers.core.progress import ProgressCallback
from remat.solvers.lp.backend import Backend, Highs
from remat.solvers.search.greedy_eviction import Rule, steps_with_eviction

# schedules to start from; these numbers are round and were not measured
_LIMIT_DIVISOR = 10  # of the time limit, for each relaxation that is rounded
_ALLOWANCES = (0.0, 0.1)  # shares of the budget that it leaves free; the second is the paper's
_PARTS = 8  # the smallest 7, 6, ... eighths of the forward values are kept


@final
@dataclass(frozen=True)
class MILP(Solver):
    """The Checkmate MILP through HiGHS.

    Attributes:
        gap: stop where the cost is proved within this fraction of the optimum.
        time_limit_s: stop after this long, with the best schedule and bound so far.
        threads: of HiGHS; 0 leaves the number to it.
        incumbent: steps of a known schedule to start from.
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
            SolverError: the graph is too large for the model, or HiGHS is not installed.
        """
        limits = Limits(self.gap, self.time_limit_s)
        rounded = _rounded_schedules(graph, budget_bytes, self.time_limit_s / _LIMIT_DIVISOR)
        starts = chain([self.incumbent], quick_schedules(graph, budget_bytes), rounded)

        return solve_exactly(
            graph,
            budget_bytes,
            Highs(self.threads),
            limits,
            starts,
            solver=repr(self),
            progress=self.progress,
        )


def solve_exactly(
    graph: Graph,
    budget_bytes: int,
    backend: Backend,
    limits: Limits,
    starts: Iterable[Sequence[int]],
    *,
    solver: str,
    progress: ProgressCallback | None = None,
) -> Solution:
    """Returns the stage model's solution with any backend.

    `starts` yields schedules to begin with; they are drawn until one closes the gap.
    """
    began = time.monotonic()
    keep_all = Schedule.keep_all(graph)
    if not validate(graph, keep_all, budget_bytes=budget_bytes):
        return Solution.of_steps(
            graph,
            budget_bytes,
            keep_all.steps,
            lower_bound_s=graph.cost_s,
            solver=solver,
            wall_s=time.monotonic() - began,
        )

    form = stage_form(graph, budget_bytes)
    if not form.fits_every_operator:
        wall_s = time.monotonic() - began
        return Solution.without_schedule(
            graph, budget_bytes, Status.INFEASIBLE, solver=solver, wall_s=wall_s
        )

    search = StageSearch(form, graph, budget_bytes, backend, limits, progress)
    left_out: list[str] = []
    with heeding_interrupts() as heeded, leaving_out("the rest of the search", left_out.append):
        iterator = iter(starts)
        while not search.is_closed and (steps := next(iterator, None)) is not None:
            search.offer(steps)
        search.run()

    cut_short = heeded.cut_short or "".join(left_out)
    return _solution(search, solver, time.monotonic() - began, cut_short)


def _solution(search: StageSearch, solver: str, wall_s: float, cut_short: str) -> Solution:
    if search.steps is None:
        return Solution.without_schedule(
            search.graph,
            search.budget_bytes,
            Status.INFEASIBLE if search.is_infeasible else Status.NO_SOLUTION,
            solver=solver,
            wall_s=wall_s,
            lower_bound_s=search.bound_s,
            record=SearchRecord(cut_short=cut_short),
        )

    return Solution.of_steps(
        search.graph,
        search.budget_bytes,
        search.steps,
        lower_bound_s=search.bound_s,
        solver=solver,
        wall_s=wall_s,
        record=SearchRecord(gap=max(search.limits.gap, TOLERANCE), cut_short=cut_short),
    )


def quick_schedules(graph: Graph, budget_bytes: int) -> Iterator[list[int]]:
    """Yields schedules to start from.

    First greedy eviction, then schedules that drop ever more of the largest forward values.
    """
    for rule in Rule:
        steps = steps_with_eviction(graph, budget_bytes, rule)
        if steps is not None:
            yield steps.tolist()

    boundary = forward_length(graph)
    written = [v for i in range(boundary) for v in graph.operators[i].writes]
    by_size = sorted(written, key=lambda v: graph.values[v].size_bytes)
    for part in range(_PARTS - 1, -1, -1):
        yield steps_on_demand(graph, by_size[: len(by_size) * part // _PARTS])


def _rounded_schedules(graph: Graph, budget_bytes: int, time_limit_s: float) -> Iterator[list[int]]:
    """Yields deterministic roundings of the LP relaxation, within 100 and 90 % of the budget."""
    for allowance in _ALLOWANCES:
        form = stage_form(graph, budget_bytes)
        relaxed = relax(form, allowance=allowance, time_limit_s=time_limit_s)
        if relaxed is not None and math.isfinite(relaxed.bound_s):
            yield round_to_steps(form, relaxed.keep > 0.5)
