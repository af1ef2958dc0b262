"""Every solver on random graphs of up to 7 operators, against brute force.

Few graphs by default; `REMAT_EXAMPLES=10000 pytest tests/promises/test_many_graphs.py` runs 10,000
(`experiments/many_graphs.py` does so, and records the results)."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remat.core.errors import SolverError
from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Status
from remat.core.validate import validate
from remat.solvers import SOLVER_NAMES, make_solver
from remat.solvers.registry import FREE_ORDER
from remat.tracers.synthetic import chain, chain_with_skips, random_layered, random_step
from tests.support.oracles import brute_force, minimum_bytes

EXAMPLES = int(os.environ.get("REMAT_EXAMPLES", "8"))
EXACT = ("auto", "exhaustive", "milp", "milp-pulp")
GAP = 1e-6


@st.composite
def problems(draw: st.DrawFn) -> tuple[Graph, int]:
    """A graph of up to 7 operators, and a budget around the least one or anywhere above."""
    kind, seed = (
        draw(st.sampled_from(["step", "step", "layered", "training", "chain", "skips"])),
        draw(st.integers(0, 2**20)),
    )

    count = draw(st.integers(1, 7))
    graph = {
        "step": lambda: random_step(count, seed=seed),
        "layered": lambda: random_layered(count, seed=seed, width=1 + seed % 3, is_training=False),
        "training": lambda: random_layered(min(count, 3), seed=seed, width=1 + seed % 2),
        "chain": lambda: chain(min(count, 3), size=1 + seed % 5, has_phases=seed % 2 == 0),
        "skips": lambda: chain_with_skips(min(count, 3), span=2, size=1 + seed % 5),
    }[kind]()

    least, most = minimum_bytes(graph), simulate(graph, Schedule.keep_all(graph)).peak_bytes
    place = draw(st.sampled_from(["below", "least", "above", "between"]))
    between = least + int(draw(st.floats(0, 1)) * (most - least))
    return graph, {"below": least - 1, "least": least, "above": least + 1, "between": between}[
        place
    ]


def check(name: str, graph: Graph, budget: int, best: float | None) -> None:
    """Asserts what holds for every method."""
    try:
        solution = make_solver(name, time_limit_s=5.0, gap=GAP, rounds=1).solve(
            graph, budget_bytes=budget
        )
    except SolverError:
        # the others may say that the graph is outside their class
        assert name not in (*EXACT, FREE_ORDER)
        return

    if name in EXACT:
        assert solution.status is (Status.INFEASIBLE if best is None else Status.OPTIMAL)
    if best is None:
        assert not solution.is_solved or name == FREE_ORDER
    else:
        assert solution.status is not Status.INFEASIBLE
        assert solution.lower_bound_s <= best * (1 + 1e-9)

    if solution.schedule is not None:
        assert (
            validate(
                graph, solution.schedule, budget_bytes=budget, is_free_order=name == FREE_ORDER
            )
            == []
        )
        assert solution.cost_s == pytest.approx(simulate(graph, solution.schedule).cost_s)

        if name != FREE_ORDER:
            assert best is not None
            assert solution.cost_s >= best * (1 - 1e-9)
            assert (
                solution.status is not Status.OPTIMAL
                or solution.cost_s <= best * (1 + 2 * GAP) + 1e-9
            )


@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(problem=problems())
def test_no_solver_is_wrong_on_a_random_graph(problem: tuple[Graph, int]) -> None:
    graph, budget = problem
    best = brute_force(graph, budget)

    for name in (*SOLVER_NAMES, FREE_ORDER):
        try:
            check(name, graph, budget, best)
        except AssertionError as failure:
            raise AssertionError(
                f"{name} at {budget} of {graph}, whose optimum is {best}"
            ) from failure
