"""The trade-off curve: many budgets in the time of a few solves, monotone in the budget.

A schedule that fits a budget fits each larger one, and a bound proved for a budget holds for each
smaller one. The largest and the smallest budget are solved first, then the rest by halving, each
for a share of the time limit. So a budget has a schedule from smaller budgets and a bound from
larger ones before it is solved, and is skipped where these are within the gap. Then the budgets
whose gaps are still open share one more time limit evenly, the narrowest gap first, as it closes
soonest and leaves its time to the others. The search also starts from schedules of the next larger
budgets, which exceed this budget a little; closed-form schedules are built once, and models start
from the stages of the nearest budget (`reuse`). So 20 budgets take at most 3.5 limits, and half of
that where gaps close early: the time of a few solves at a tight budget. Before that, the search for
the least budget takes one limit at most. Ctrl-C ends the curve with the budgets solved so far.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from remat.core.graph import Graph
from remat.core.schedule import keep_all_peak
from remat.core.solution import SearchRecord, Solution, Status
from remat.narration.stages import stage
from remat.solvers.auto.reuse import Shared
from remat.solvers.auto.solver import Auto
from remat.solvers.core.base import Solver
from remat.solvers.core.interrupt import heeding_interrupts, is_interrupted

_POINT_LIMIT_S = 6.0  # seconds; the time limit where no solver is given; round, not measured
# the numbers below were measured together, on curves of 20 budgets (traced steps)
_SHARE = 1 / 8  # of the time limit, for the first solve of a budget
# shares of the time limit: for all second solves together, and the least for one of them
_SECOND_SHARE, _LEAST_SHARE = 1.0, 1 / 5
_NUM_NEAR = 2  # schedules slightly over a budget to start from


@dataclass(frozen=True, slots=True)
class _Found:
    """A schedule found so far: its cost and the least budget that it fits."""

    cost_s: float
    peak_bytes: int
    steps: tuple[int, ...]
    is_free_order: bool


def frontier_solutions(
    graph: Graph,
    budgets: Iterable[int] | int,
    solver: Solver | None = None,
    *,
    shared: Shared | None = None,
) -> list[Solution]:
    """Returns one solution per budget, in the order of `budgets`.

    Costs and bounds are monotone in the budget.

    Args:
        graph: any graph.
        budgets: in bytes, resident bytes included; or their number, spread evenly from the least
            budget found to the peak of keeping everything.
        solver: by default `Auto` with a modest time limit per budget; any solver works, but only
            `Auto` shares its time between budgets.
        shared: results shared with other solves of `graph`.
    """
    shared = shared or Shared(graph)
    solver = solver if solver is not None else Auto(time_limit_s=_POINT_LIMIT_S)
    least = shared.least(time_limit_s=getattr(solver, "time_limit_s", math.inf))
    curve = _Curve(graph, solver, shared)
    asked = _spread(graph, budgets, least.peak_bytes) if isinstance(budgets, int) else list(budgets)

    what = f"planning {graph.num_operators:,} operators in {len(asked)} budgets"
    with heeding_interrupts() as heeded, stage(what) as told:
        for count, budget in enumerate(_by_halves(sorted(set(asked)))):
            told.say(f"{count} done")
            curve.solve(budget, share=_SHARE)
        told.say("solving those with an open gap again")
        curve.look_again(_SECOND_SHARE)

    return [curve.solution(budget, heeded.cut_short) for budget in asked]


def _spread(graph: Graph, count: int, first: int) -> list[int]:
    last = keep_all_peak(graph)
    return [first + (last - first) * i // max(1, count - 1) for i in range(count)]


def _by_halves(items: Sequence[int]) -> Iterator[int]:
    """Yields the last item, the first, the middle, the middles of the halves and so on; each once.

    >>> list(_by_halves([0, 1, 2, 3, 4, 5, 6, 7, 8]))
    [8, 0, 4, 2, 6, 1, 3, 5, 7]
    """
    yield from dict.fromkeys([*items[-1:], *items[:1]])
    spans = [(0, len(items) - 1)]
    while spans:
        inner = [(low, (low + high) // 2, high) for low, high in spans if high - low > 1]
        yield from (items[middle] for _, middle, _ in inner)
        spans = [half for low, middle, high in inner for half in ((low, middle), (middle, high))]


class _Curve:
    """The results for one graph so far: schedules with their peaks, bounds by budget."""

    def __init__(self, graph: Graph, solver: Solver, shared: Shared) -> None:
        self._graph = graph
        self._solver = solver
        self._shared = shared
        self._least = shared.least()
        self._gap = solver.gap if isinstance(solver, Auto) else 0.0

        self._found: list[_Found] = []
        self._bounds: dict[int, float] = {}
        self._wall_s: dict[int, float] = {}
        self._infeasible_bytes = -1  # the largest budget proved infeasible

        # the technique that first found each schedule, first proved each bound, and proved that
        # the largest infeasible budget is infeasible
        self._finders = {tuple(self._least.steps): "least-budget"}
        self._provers: dict[float, str] = {}
        self._infeasible_by = ""

    def solve(self, budget: int, *, share: float) -> None:
        """Solves for a budget within a share of the time limit, unless known results suffice."""
        if self._is_known(budget) or is_interrupted():
            return

        began = time.perf_counter()
        solver = self._solver
        solution = (
            self._improve(solver, budget, share)
            if isinstance(solver, Auto)
            else solver.solve(self._graph, budget_bytes=budget)
        )

        self._wall_s[budget] = self._wall_s.get(budget, 0.0) + time.perf_counter() - began
        self._bounds[budget] = max(self._bounds.get(budget, 0.0), solution.lower_bound_s)
        self._provers.setdefault(solution.lower_bound_s, solution.proved_by)

        if solution.schedule is not None:
            steps = solution.schedule.steps
            self._found.append(
                _Found(solution.cost_s, solution.peak_bytes, steps, solution.is_free_order)
            )
            self._finders.setdefault(steps, solution.found_by)
        elif solution.status is Status.INFEASIBLE and budget > self._infeasible_bytes:
            self._infeasible_bytes, self._infeasible_by = budget, solution.proved_by

    def look_again(self, share: float) -> None:
        """Solves the budgets with open gaps once more, the narrowest gap first.

        All of them together take a share of the time limit.
        """
        if not isinstance(self._solver, Auto):
            return

        is_open = [
            budget
            for budget in self._wall_s
            if budget >= self._least.peak_bytes and not self._is_known(budget)
        ]

        deadline = time.perf_counter() + share * self._solver.time_limit_s
        for count, budget in enumerate(sorted(is_open, key=self._open_gap)):
            left = (deadline - time.perf_counter()) / self._solver.time_limit_s
            if left > 0:
                self.solve(
                    budget, share=min(left, max(left / (len(is_open) - count), _LEAST_SHARE))
                )

    def _open_gap(self, budget: int) -> float:
        best = self._cheapest(budget)
        return math.inf if best is None else 1 - self._bound_s(budget) / max(best.cost_s, 1e-300)

    def _is_known(self, budget: int) -> bool:
        is_close = self._open_gap(budget) <= self._gap + 1e-9
        return isinstance(self._solver, Auto) and (is_close or budget <= self._infeasible_bytes)

    def _improve(self, solver: Auto, budget: int, share: float) -> Solution:
        solver = replace(solver, time_limit_s=share * solver.time_limit_s)
        if budget < self._least.peak_bytes:  # unlikely to be met, so a short solve is enough
            solver = replace(solver, rounds=min(solver.rounds, 1))

        near = sorted(
            (found for found in self._found if found.peak_bytes > budget),
            key=lambda found: found.peak_bytes,
        )[:_NUM_NEAR]
        known = [
            self._least.steps,
            *(found.steps for found in (self._cheapest(budget), *near) if found is not None),
        ]

        return solver.improve(
            self._graph,
            budget_bytes=budget,
            known_steps=known,
            known_bound_s=self._bound_s(budget),
            shared=self._shared,
        )

    def _cheapest(self, budget: int) -> _Found | None:
        fitting = [found for found in self._found if found.peak_bytes <= budget]
        return min(fitting, key=lambda found: found.cost_s, default=None)

    def _bound_s(self, budget: int) -> float:
        """Returns the best bound of this budget and the larger ones."""
        return max(
            (
                bound
                for size, bound in self._bounds.items()
                if size >= budget and math.isfinite(bound)
            ),
            default=self._graph.cost_s,
        )

    def solution(self, budget: int, cut_short: str) -> Solution:
        """Returns the cheapest known schedule that fits, with the best valid bound."""
        best, bound_s, wall_s, solver = (
            self._cheapest(budget),
            self._bound_s(budget),
            self._wall_s.get(budget, 0.0),
            repr(self._solver),
        )
        record = SearchRecord(
            gap=self._gap, minimum_bytes=self._least.peak_bytes, cut_short=cut_short
        )

        if best is not None:
            return Solution.of_steps(
                self._graph,
                budget,
                best.steps,
                lower_bound_s=bound_s,
                solver=solver,
                wall_s=wall_s,
                record=replace(
                    record,
                    is_free_order=best.is_free_order,
                    found_by=self._finders[best.steps],
                    proved_by=self._provers.get(bound_s, ""),
                ),
            )

        status = Status.INFEASIBLE if budget <= self._infeasible_bytes else Status.NO_SOLUTION
        return Solution.without_schedule(
            self._graph,
            budget,
            status,
            solver=solver,
            wall_s=wall_s,
            lower_bound_s=bound_s,
            record=replace(
                record, proved_by=self._infeasible_by if status is Status.INFEASIBLE else ""
            ),
        )
