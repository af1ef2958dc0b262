"""Every solver on every kind of graph at the budgets where things go wrong.

The exact optimum is known at each point.

The graphs are small enough for the MILP to prove the optimum and the least budget, so that
`bound <= optimum <= cost` is checked for every solver."""

from __future__ import annotations

from functools import cache

import pytest

from remat.core.errors import SolverError
from remat.core.graph import Graph
from remat.core.schedule import simulate
from remat.core.solution import Solution, Status
from remat.core.validate import validate
from remat.solvers import SOLVER_NAMES, make_solver
from remat.solvers.auto.minimum import minimum
from remat.solvers.checkmate.milp import MILP
from remat.tracers import synthetic
from tests.support.graphs import keep_all_bytes

GRAPHS = {
    "chain": synthetic.chain(5),
    "chain_without_phases": synthetic.chain(4, has_phases=False),
    "chain_with_skips": synthetic.chain_with_skips(5),
    "unet": synthetic.unet(1),
    "diamond": synthetic.diamond(1),
    "random_layered": synthetic.random_layered(6, seed=1, width=2),
    "random_layered_without_phases": synthetic.random_layered(
        12, seed=2, width=3, is_training=False
    ),
    "transformer": synthetic.transformer(1),
    "star": synthetic.star(3),
    "wide_fan_in": synthetic.wide_fan_in(3),
    "all_pinned": synthetic.all_pinned(3),
    "half_zero_size": synthetic.half_zero_size(5),
    "zero_cost": synthetic.zero_cost(4),
    "two_regions": synthetic.two_regions(2),
    "random_step": synthetic.random_step(10, seed=6),
    "single": Graph.from_arrays([1.0], [3], []),
    "empty": Graph.from_arrays([], [], []),
}
SMALL = tuple(name for name in GRAPHS if name != "transformer")
TRANSFORMER_BYTES = 2700  # near its least budget the MILP needs minutes; here it needs a second
SPECIAL = ("chen-sqrt", "chen-greedy", "revolve", "recompute-attention", "per-block")
BUDGETS = ("minimum", "minimum + 1", "middle", "unlimited")


@cache
def least_budget(family: str) -> int:
    """Returns the smallest budget that can be met, proved by the MILP on both sides."""
    if family == "transformer":
        return TRANSFORMER_BYTES

    graph = GRAPHS[family]
    low, high = -1, keep_all_bytes(graph)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (middle, high) if optimum(family, middle).status is Status.INFEASIBLE else (low, middle)
        )
    return high


@cache
def optimum(family: str, budget_bytes: int) -> Solution:
    """Returns the proved answer."""
    solution = MILP().solve(GRAPHS[family], budget_bytes=budget_bytes)
    assert solution.status in (Status.OPTIMAL, Status.INFEASIBLE)
    return solution


def _solve(solver: str, graph: Graph, budget_bytes: int) -> Solution | None:
    """The solution, or None if the graph is outside the class of a `SPECIAL` method."""
    if solver not in SPECIAL:
        return make_solver(solver, time_limit_s=0.5).solve(graph, budget_bytes=budget_bytes)
    try:
        return make_solver(solver).solve(graph, budget_bytes=budget_bytes)
    except SolverError:
        return None


def _budget(family: str, name: str) -> int:
    least, most = least_budget(family), keep_all_bytes(GRAPHS[family])
    return {
        "minimum": least,
        "minimum + 1": least + 1,
        "middle": (least + most) // 2,
        "unlimited": 2 * most,
    }[name]


@pytest.mark.parametrize("family", GRAPHS)
@pytest.mark.parametrize("solver", SOLVER_NAMES)
def test_bounds_optimum_and_costs_are_in_order(solver: str, family: str) -> None:
    graph = GRAPHS[family]
    for name in BUDGETS:
        budget_bytes = _budget(family, name)
        exact = optimum(family, budget_bytes)
        solution = _solve(solver, graph, budget_bytes)
        if solution is None:
            return

        assert solution.status is not Status.INFEASIBLE
        assert solution.lower_bound_s <= exact.cost_s * (1 + 1e-9)
        if solution.schedule is not None:
            assert validate(graph, solution.schedule, budget_bytes=budget_bytes) == []
            assert solution.cost_s >= exact.cost_s * (1 - 1e-9)
            assert solution.cost_s == pytest.approx(simulate(graph, solution.schedule).cost_s)
        # a transformer has too many states for the exhaustive search
        assert solution.is_solved or name != "unlimited" or solver == "exhaustive"


@pytest.mark.parametrize("family", GRAPHS)
def test_pulp_finds_the_same_optimum_at_the_minimum(family: str) -> None:
    solution = make_solver("milp-pulp").solve(GRAPHS[family], budget_bytes=least_budget(family))
    assert solution.status is Status.OPTIMAL
    assert solution.cost_s == pytest.approx(optimum(family, least_budget(family)).cost_s)


@pytest.mark.parametrize("family", SMALL)
@pytest.mark.parametrize("solver", SOLVER_NAMES)
def test_one_byte_below_the_minimum_no_solver_has_a_schedule(solver: str, family: str) -> None:
    budget_bytes = least_budget(family) - 1
    solution = _solve(solver, GRAPHS[family], budget_bytes)
    assert solution is None or not solution.is_solved


@pytest.mark.parametrize("family", SMALL)
def test_the_least_budget_is_between_its_bounds(family: str) -> None:
    found = minimum(GRAPHS[family])
    assert found.lower_bound_bytes <= least_budget(family) <= found.peak_bytes
