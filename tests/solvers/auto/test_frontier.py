"""The trade-off curve.

Monotone, valid, bounded by the exact optimum, and found in the time of a few solves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import pytest

import remat
from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution, Status
from remat.core.validate import validate
from remat.solvers.auto.frontier import frontier_solutions
from remat.solvers.auto.minimum import minimum
from remat.solvers.auto.reuse import Shared
from remat.solvers.auto.solver import Auto
from remat.solvers.baselines.chen import ChenGreedy
from remat.solvers.baselines.linearized import LinearizedGreedy
from remat.solvers.baselines.segment_family import Family
from remat.solvers.bounds.refinement import Refinement
from remat.solvers.checkmate.milp import MILP
from remat.solvers.free_order.solver import FreeOrder
from remat.tracers.synthetic import chain, random_layered, random_step, transformer

QUICK = Auto(gap=0.01, rounds=1, time_limit_s=0.5)


def spread(graph: Graph, count: int) -> list[int]:
    first, last = minimum(graph).peak_bytes, simulate(graph, Schedule.keep_all(graph)).peak_bytes
    return [first + (last - first) * i // (count - 1) for i in range(count)]


def check(graph: Graph, budgets: Sequence[int], solutions: Sequence[Solution]) -> None:
    """Each schedule fits, and neither cost nor bound rises with the budget."""
    assert [s.budget_bytes for s in solutions] == list(budgets)
    for s in solutions:
        assert s.schedule is not None
        assert validate(graph, s.schedule, budget_bytes=s.budget_bytes) == []
    ordered = sorted(solutions, key=lambda s: s.budget_bytes)
    for numbers in ([s.cost_s for s in ordered], [s.lower_bound_s for s in ordered]):
        assert numbers == sorted(numbers, reverse=True)


@pytest.mark.parametrize(
    "graph", [random_layered(14, seed=3), transformer(2)], ids=["layered", "transformer"]
)
def test_the_curve_is_monotone_and_valid(graph: Graph) -> None:
    budgets = spread(graph, 8)
    check(graph, budgets[::-1], frontier_solutions(graph, budgets[::-1], QUICK))


def test_each_point_names_who_found_it_and_who_proved_its_bound() -> None:
    graph = random_layered(24, seed=3, is_training=True)
    solver = Auto(gap=0.0, time_limit_s=2.0, threads=1)
    solutions = frontier_solutions(graph, [1, *spread(graph, 6)], solver)

    assert solutions[0].status is Status.INFEASIBLE and solutions[0].proved_by
    names = {name for s in solutions[1:] for name in (s.found_by, s.proved_by) if name}
    assert "known" not in names
    for solution in solutions[1:]:
        assert solution.found_by
        assert bool(solution.proved_by) == (solution.lower_bound_s > graph.cost_s)


def test_bounds_are_below_the_optimum_at_every_budget() -> None:
    graph = random_layered(6, seed=1, width=2)
    budgets = spread(graph, 6)
    for solution in frontier_solutions(graph, budgets, QUICK):
        best = MILP(time_limit_s=20).solve(graph, budget_bytes=solution.budget_bytes)
        assert best.status is Status.OPTIMAL
        assert solution.lower_bound_s <= best.cost_s * (1 + 1e-9)
        assert solution.cost_s >= best.cost_s * (1 - 1e-9)


def test_twenty_budgets_are_allowed_the_time_of_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the time allowed or taken, whichever is less: a busy machine makes no difference.

    Each budget gets a share of the time limit, and all second looks get one limit.
    """
    allowed: list[float] = []
    improve = Auto.improve

    def counted(self: Auto, graph: Graph, **options: Any) -> Solution:
        began = time.perf_counter()
        solution = improve(self, graph, **options)
        allowed.append(min(self.time_limit_s, time.perf_counter() - began))
        return solution

    monkeypatch.setattr(Auto, "improve", counted)
    graph = random_layered(30, seed=2)
    budgets = spread(graph, 20)

    check(
        graph,
        budgets,
        frontier_solutions(graph, budgets, Auto(gap=1e-6, rounds=1, time_limit_s=0.8)),
    )
    assert sum(allowed) <= 3.5 * 0.8


def test_second_looks_go_to_the_narrowest_gap_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gap at the least budget may never close, so it does not get all of the time."""
    looks: list[tuple[int, float]] = []

    def counted(
        self: Auto, graph: Graph, *, budget_bytes: int, known_bound_s: float, **_: Any
    ) -> Solution:
        looks.append((budget_bytes, self.time_limit_s))
        return Solution.of_steps(
            graph,
            budget_bytes,
            steps,
            lower_bound_s=bounds_s[budget_bytes],
            solver="",
            wall_s=0.0,
        )

    monkeypatch.setattr(Auto, "improve", counted)
    graph = chain(20)
    budgets = spread(graph, 4)[:3]
    steps = minimum(graph).steps
    cost_s = simulate(graph, Schedule.from_steps(graph, steps)).cost_s
    bounds_s = dict(zip(budgets, (0.9 * cost_s, 0.8 * cost_s, 0.7 * cost_s), strict=True))
    frontier_solutions(graph, budgets, Auto(gap=1e-6, time_limit_s=8_000.0))

    first, second = looks[:3], looks[3:]
    assert [limit_s for _, limit_s in first] == [1_000.0] * 3
    assert [budget for budget, _ in second] == budgets  # the first looks had another order
    assert [limit_s for _, limit_s in second] == pytest.approx([8_000 / 3, 4_000, 8_000], rel=0.01)


def test_budgets_whose_answer_is_known_are_not_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the keep-all peak there is one answer; below a budget proved infeasible, none."""
    asked: list[int] = []
    improve = Auto.improve

    def counted(self: Auto, graph: Graph, *, budget_bytes: int, **options: Any) -> Solution:
        asked.append(budget_bytes)
        return improve(self, graph, budget_bytes=budget_bytes, **options)

    monkeypatch.setattr(Auto, "improve", counted)
    graph = chain(9)
    most = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    solutions = frontier_solutions(graph, [1, 2, 3, most, most + 1], QUICK)
    assert [s.status for s in solutions] == [Status.INFEASIBLE] * 3 + [Status.OPTIMAL] * 2
    assert all(s.minimum_bytes == minimum(graph).peak_bytes for s in solutions)
    assert asked == [most + 1, 1, 3]  # not 2, below 3, nor `most`, where keeping everything fits


def test_other_solvers_have_curves_too() -> None:
    graph = chain(20)
    budgets = spread(graph, 5)
    solutions = frontier_solutions(graph, budgets, ChenGreedy())
    costs = [s.cost_s for s in solutions if s.is_solved]
    assert len(costs) > 1
    assert costs == sorted(costs, reverse=True)


def test_schedules_in_another_order_have_a_curve() -> None:
    graph = random_layered(14, seed=3)
    solutions = frontier_solutions(graph, 4, FreeOrder(time_limit_s=1.0, rounds=1))
    assert any(s.is_free_order for s in solutions)
    costs = [s.cost_s for s in solutions]
    assert costs == sorted(costs, reverse=True)


def test_remat_frontier_spreads_budgets_from_the_least_to_keep_all() -> None:
    graph = chain(9)
    solutions = remat.frontier(graph, 4, time_limit_s=0.5)
    assert [s.budget_bytes for s in solutions] == spread(graph, 4)
    check(graph, spread(graph, 4), solutions)


def test_budgets_share_the_closed_form_schedules_and_the_least_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    for kind in (ChenGreedy, LinearizedGreedy):

        def counted(self: Family, graph: Graph, members: Any = kind.members) -> Any:
            made.append(type(self).__name__)
            return members(self, graph)

        monkeypatch.setattr(kind, "members", counted)
    frontier_solutions(chain(20), 6, QUICK)
    assert sorted(made) == ["ChenGreedy", "LinearizedGreedy"]


def test_a_model_starts_from_the_stages_of_the_nearest_budget() -> None:
    graph = random_step(40, seed=1)
    shared, least = Shared(graph), minimum(graph)
    most = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    tight, loose = ((least.peak_bytes * part + most * (4 - part)) // 4 for part in (3, 1))

    first = shared.refinement(tight)
    assert len(first.boundaries) == 2
    for _ in range(4):
        first.solve(deadline=math.inf, is_relaxed=True)
    first.return_to_best_relaxed()
    assert len(first.boundaries) > 2
    assert len(shared.refinement(loose).boundaries) > 2

    near = shared.refinement(tight + 1)
    assert near.boundaries == first.boundaries

    fresh = Refinement(graph, budget_bytes=tight + 1)
    assert (
        near.solve(deadline=math.inf, is_relaxed=True).bound_s
        >= fresh.solve(deadline=math.inf, is_relaxed=True).bound_s
    )


def test_stages_of_models_with_integers_are_not_reused() -> None:
    graph = random_step(12, seed=1)
    shared, budget = Shared(graph), minimum(graph).peak_bytes
    refinement = shared.refinement(budget)
    refinement.adopt(refinement.stages.with_single(graph.num_operators - 2))
    assert len(shared.refinement(budget).boundaries) == 2
