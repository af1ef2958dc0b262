"""A time limit holds on graphs so large that a piece of the search alone takes longer.

Process time is asserted, not wall-clock time: a busy machine makes no difference.
"""

from __future__ import annotations

import copy
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution, Status
from remat.core.validate import validate
from remat.solvers import make_solver
from remat.solvers.auto import minimum as minimum_module
from remat.solvers.auto.frontier import frontier_solutions
from remat.solvers.auto.minimum import minimum
from remat.solvers.auto.solver import Auto
from remat.solvers.core.interrupt import until
from remat.solvers.core.pace import pace_s

LIMIT_S, SLACK_S = 2.0, 1.0


def long_chain(num_nodes: int = 250_000) -> Graph:
    """A chain whose second half reads what its first half wrote, from the end backwards."""
    half = num_nodes // 2
    chain = [(i, i + 1) for i in range(num_nodes - 1)]
    again = [(num_nodes - 2 - i, i + 1) for i in range(half, num_nodes - 1)]
    return Graph.from_arrays([1.0] * num_nodes, [1] * num_nodes, [*chain, *again])


def complete(num_nodes: int = 800) -> Graph:
    edges = ((i, j) for i in range(num_nodes) for j in range(i + 1, num_nodes))
    return Graph.from_arrays([1.0] * num_nodes, [1 + i % 9 for i in range(num_nodes)], edges)


def halves(num_nodes: int = 1000) -> Graph:
    """Every node of the second half reads all of the first: many edges, and room for choices."""
    half = num_nodes // 2
    edges = [(i, j) for j in range(half, num_nodes) for i in range(max(0, j - half), half)]
    chain = [(i, i + 1) for i in range(num_nodes - 1)]
    sizes = [1 + i % 9 for i in range(num_nodes)]
    return Graph.from_arrays([1.0] * num_nodes, sizes, [*edges, *chain], first_backward=half)


@cache
def _built(make: Callable[[], Graph]) -> Graph:
    return make()


def new(make: Callable[[], Graph]) -> Graph:
    """A copy of a graph that is built once; nothing has been derived from the copy yet."""
    return copy.copy(_built(make))


def seconds_of(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


@pytest.mark.parametrize(("make", "percent"), [(long_chain, 90), (complete, 90), (halves, 97)])
@pytest.mark.parametrize("name", ["auto", "free-order"])
def test_a_limit_holds(make: Callable[[], Graph], percent: int, name: str) -> None:
    """Naive: each piece reads the clock when it is done, and the final check is not counted."""
    graph = new(make)
    budget = simulate(graph, Schedule.keep_all(graph)).peak_bytes * percent // 100
    solver, found = make_solver(name, time_limit_s=LIMIT_S), list[Solution]()
    took_s = seconds_of(lambda: found.append(solver.solve(graph, budget_bytes=budget)))
    assert took_s < LIMIT_S + SLACK_S
    if make is complete and name == "auto":
        assert found[0].status is Status.INFEASIBLE  # found at once, however little time there is


@pytest.mark.parametrize("make", [long_chain, complete])
def test_the_search_for_the_least_budget_keeps_its_limit(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Graph]
) -> None:
    graph = new(make)
    graph.arrays, graph.users_of, graph.fingerprint  # noqa: B018 - derived before the clock starts
    monkeypatch.setattr(minimum_module, "_searched", OrderedDict())
    assert seconds_of(lambda: minimum(graph, time_limit_s=0.5)) < 0.5 + SLACK_S


def test_usual_graphs_lose_no_time_to_pacing() -> None:
    chain = Graph.from_arrays([1.0] * 2000, [1] * 2000, [(i, i + 1) for i in range(1999)])
    assert pace_s(chain) == 0.0


def test_nothing_is_made_past_the_deadline() -> None:
    made: list[int] = []

    def endless() -> Iterator[int]:
        while True:
            made.append(1)
            yield 1

    items = until(endless(), math.inf)
    assert [next(items), next(items)] == [1, 1]
    assert list(until(endless(), time.perf_counter() - 1)) == []
    assert len(made) == 2


def test_a_curve_of_a_large_graph_takes_a_few_limits() -> None:
    """Naive: the curve's first and last budgets are searched for without a limit.

    The final checks of the solutions are not part of the limits.
    """
    graph = new(long_chain)
    check_s = seconds_of(lambda: validate(graph, Schedule.keep_all(graph)))
    took_s = seconds_of(lambda: frontier_solutions(graph, 3, Auto(time_limit_s=1.0)))
    assert took_s < 4 * LIMIT_S + 4 * check_s
