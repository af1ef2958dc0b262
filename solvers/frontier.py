"""The trade-off curve: many budgets at once, monotone, what is found for one used for the others.

A schedule that fits a budget fits each larger one, and a bound proved for a budget holds for each smaller one. So budgets
are solved from the smallest up, each starting from the schedules found before; afterwards every budget takes the
cheapest schedule that fits it and the best bound of the larger ones. Cost and bound then never rise with the budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..graph import Graph
from ..solution import Solution
from .auto import Auto
from .base import Solver
from .minimum import Minimum, minimum

_POINT_LIMIT_S = 6.0


@dataclass(frozen=True, slots=True)
class _Found:
    """A schedule somebody found: what it costs and the least budget it fits."""

    cost_s: float
    peak_bytes: int
    steps: tuple[int, ...]


def frontier_solutions(graph: Graph, budgets: Iterable[int], solver: Solver | None = None) -> list[Solution]:
    """Returns one solution a budget, in the order of `budgets`, costs and bounds monotone in the budget.

    Args:
        graph: any graph.
        budgets: in bytes, resident bytes included.
        solver: `Auto` with a modest time limit a budget where None; any solver works, `Auto` shares best.
    """
    used = solver if solver is not None else Auto(time_limit_s=_POINT_LIMIT_S)
    asked = list(budgets)
    least = minimum(graph)
    found: list[_Found] = []
    solved: dict[int, Solution] = {}
    for budget in sorted(set(asked)):
        solution = _solve(graph, budget, used, found, least)
        solved[budget] = solution
        if solution.schedule is not None:
            found.append(_Found(solution.cost_s, solution.peak_bytes, solution.schedule.steps))
    return _monotone(graph, asked, solved, found, used)


def _solve(graph: Graph, budget: int, solver: Solver, found: Sequence[_Found], least: Minimum) -> Solution:
    if not isinstance(solver, Auto):
        return solver.solve(graph, budget_bytes=budget)
    if budget < least.peak_bytes:  # unlikely to be met; a short look is enough
        solver = replace(solver, rounds=min(solver.rounds, 1))
    return solver.improve(graph, budget_bytes=budget, known_steps=[f.steps for f in found[-3:]], least=least)


def _monotone(graph: Graph, asked: Sequence[int], solved: dict[int, Solution], found: Sequence[_Found], solver: Solver) -> list[Solution]:
    """Gives each budget the cheapest schedule that fits it and the best bound of those that are larger."""
    gap = solver.gap if isinstance(solver, Auto) else 0.0
    bound_s = graph.cost_s
    result: dict[int, Solution] = {}
    for budget in sorted(solved, reverse=True):
        mine = solved[budget]
        bound_s = max(bound_s, mine.lower_bound_s)
        fitting = [f for f in found if f.peak_bytes <= budget]
        best = min(fitting, key=lambda f: f.cost_s, default=None)
        if best is None:
            result[budget] = mine
            continue
        is_better = not mine.is_solved or best.cost_s < mine.cost_s or bound_s > mine.lower_bound_s
        if is_better:
            mine = Solution.of_steps(graph, budget, best.steps, lower_bound_s=bound_s, solver=mine.solver, wall_s=mine.wall_s, gap=gap)
        result[budget] = mine
    return [result[budget] for budget in asked]
