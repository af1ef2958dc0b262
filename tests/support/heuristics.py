"""Checks of a heuristic's solution, for the tests of several heuristics."""

from __future__ import annotations

from hypothesis import strategies as st

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution, Status
from remat.core.validate import validate

UNLIMITED = 2**62
seeds = st.integers(0, 2**32 - 1)


def keep_all(graph: Graph) -> tuple[int, float]:
    simulation = simulate(graph, Schedule.keep_all(graph))
    return simulation.peak_bytes, simulation.cost_s


def check(graph: Graph, solution: Solution, budget_bytes: int) -> None:
    """The solution is valid, fits, and its numbers are the simulator's."""
    assert solution.schedule is not None
    assert validate(graph, solution.schedule, budget_bytes=budget_bytes) == []
    simulation = simulate(graph, solution.schedule)
    assert (solution.peak_bytes, solution.cost_s) == (simulation.peak_bytes, simulation.cost_s)
    assert solution.lower_bound_s <= solution.cost_s
    assert solution.minimum_bytes <= solution.peak_bytes <= budget_bytes
    assert (solution.status is Status.OPTIMAL) == (solution.cost_s <= graph.cost_s * (1 + 1e-9))
