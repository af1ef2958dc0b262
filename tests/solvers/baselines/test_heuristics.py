"""Every heuristic on every graph family, and the builder of their schedules."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.core.errors import SolverError
from remat.core.graph import Graph
from remat.core.schedule import Schedule
from remat.core.solution import Solution, Status
from remat.core.validate import validate
from remat.solvers import make_solver
from remat.solvers.core.on_demand import forward_length, steps_on_demand, values_always_kept
from remat.tracers.synthetic import FAMILIES, chain, random_step, star, transformer
from tests.support.heuristics import UNLIMITED, check, keep_all, seeds
from tests.support.oracles import brute_force

GENERAL = (
    "keep-all",
    "ap-sqrt",
    "ap-greedy",
    "linear-sqrt",
    "linear-greedy",
    "recompute-cheap",
    "pytorch-knapsack",
)
CHAINS_ONLY = ("revolve",)
STAGES_ONLY = ("chen-sqrt", "chen-greedy")
NAMED_ONLY = ("recompute-attention", "per-block")
HEURISTICS = (*GENERAL, *STAGES_ONLY, *CHAINS_ONLY, *NAMED_ONLY)
# the same schedules whatever the budget
FIXED_FAMILIES = tuple(name for name in HEURISTICS if name != "pytorch-knapsack")


@functools.cache
def family(name: str) -> Graph:
    return FAMILIES[name]()


def solve(name: str, graph: Graph, budget_bytes: int) -> Solution | None:
    """The solution, or None if the graph is outside the class of a method not in `GENERAL`."""
    try:
        return make_solver(name).solve(graph, budget_bytes=budget_bytes)
    except SolverError:
        assert name not in GENERAL
        return None


@pytest.mark.parametrize("graph_name", FAMILIES)
@pytest.mark.parametrize("name", HEURISTICS)
def test_every_heuristic_is_valid_on_every_family_and_kind_of_budget(
    name: str, graph_name: str
) -> None:
    graph = family(graph_name)
    unlimited = solve(name, graph, UNLIMITED)
    if unlimited is None:
        return
    check(graph, unlimited, UNLIMITED)

    least = unlimited.minimum_bytes
    for budget_bytes in (least, least + 1, (least + unlimited.peak_bytes) // 2):
        solution = make_solver(name).solve(graph, budget_bytes=budget_bytes)
        check(graph, solution, budget_bytes)

    below = make_solver(name).solve(graph, budget_bytes=least - 1)
    if name in FIXED_FAMILIES:
        assert below.status is Status.NO_SOLUTION
        assert (below.schedule, below.minimum_bytes, below.lower_bound_s) == (
            None,
            least,
            graph.cost_s,
        )
    else:
        # a bisection may find what the grid missed
        assert below.status is Status.NO_SOLUTION or below.peak_bytes < least


def test_every_heuristic_solves_some_family() -> None:
    for name in HEURISTICS:
        assert any(solve(name, family(graph_name), UNLIMITED) for graph_name in FAMILIES)


@pytest.mark.parametrize("name", FIXED_FAMILIES)
@pytest.mark.parametrize(
    "graph_name", ["chain", "chain_with_skips", "random_layered", "transformer"]
)
def test_more_budget_never_costs_more(name: str, graph_name: str) -> None:
    graph = family(graph_name)
    unlimited = solve(name, graph, UNLIMITED)
    if unlimited is None:
        return
    budgets = np.linspace(unlimited.minimum_bytes, keep_all(graph)[0] + 1, 8).astype(int).tolist()
    costs = [make_solver(name).solve(graph, budget_bytes=budget).cost_s for budget in budgets]
    assert costs == sorted(costs, reverse=True)


@settings(deadline=None, max_examples=30)
@given(graph=st.builds(random_step, st.integers(0, 20), seed=seeds))
def test_general_heuristics_are_valid_on_random_graphs(graph: Graph) -> None:
    for name in HEURISTICS:
        solution = solve(name, graph, UNLIMITED)
        if solution is not None:
            check(graph, solution, UNLIMITED)


@settings(deadline=None, max_examples=25)
@given(graph=st.builds(random_step, st.integers(1, 6), seed=seeds))
def test_no_heuristic_beats_brute_force(graph: Graph) -> None:
    for name in HEURISTICS:
        unlimited = solve(name, graph, UNLIMITED)
        if unlimited is None:
            continue

        solution = make_solver(name).solve(graph, budget_bytes=unlimited.minimum_bytes)
        optimum = brute_force(graph, unlimited.minimum_bytes)
        assert optimum is not None
        assert optimum <= solution.cost_s


@pytest.mark.parametrize("name", FIXED_FAMILIES)
def test_scaling_sizes_and_budget_changes_nothing(name: str) -> None:
    for graph_name in ("chain", "random_layered", "transformer"):
        graph = family(graph_name)
        scaled = replace(
            graph,
            values=tuple(replace(v, size_bytes=v.size_bytes * 7) for v in graph.values),
            operators=tuple(
                replace(op, workspace_bytes=op.workspace_bytes * 7) for op in graph.operators
            ),
        )

        budget_bytes = int(0.8 * keep_all(graph)[0])
        one, other = solve(name, graph, budget_bytes), solve(name, scaled, 7 * budget_bytes)
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert (one.cost_s, one.peak_bytes * 7) == (other.cost_s, other.peak_bytes)


def test_values_that_cannot_be_computed_again_are_kept() -> None:
    graph = transformer(2)
    kept = values_always_kept(graph)
    for op in graph.operators:
        is_bound = op.is_snapshot or bool(op.pinned) or not set(op.writes).isdisjoint(graph.outputs)
        assert all((value in kept) == is_bound for value in op.writes)
    assert all(v in kept for v, value in enumerate(graph.values) if value.is_resident)


def test_values_that_cross_regions_are_kept() -> None:
    graph = family("two_regions")
    crossing = {
        v
        for v, users in enumerate(graph.users_of)
        if {graph.operators[u].region for u in users} == {0, 1}
    }

    assert crossing
    assert crossing <= values_always_kept(graph)


@settings(deadline=None, max_examples=60)
@given(graph=st.builds(random_step, st.integers(1, 25), seed=seeds), seed=seeds)
def test_on_demand_computes_every_operator_at_most_twice(graph: Graph, seed: int) -> None:
    random = np.random.default_rng(seed)
    steps = steps_on_demand(graph, {v for v in range(len(graph.values)) if random.random() < 0.4})
    assert max(map(steps.count, steps)) <= 2
    assert validate(graph, Schedule.from_steps(graph, steps)) == []
    assert steps_on_demand(graph, range(len(graph.values))) == list(range(graph.num_operators))


def test_the_end_of_the_forward_is_found_without_phases() -> None:
    for length in (1, 2, 9, 36):
        assert forward_length(chain(length, has_phases=False)) in (length, length + 1)
        assert forward_length(chain(length)) == length + 1
    assert forward_length(family("empty")) == 0


def test_no_method_lowers_the_peak_of_a_star() -> None:
    graph = star(6)
    for name in GENERAL:
        solution = make_solver(name).solve(graph, budget_bytes=UNLIMITED)
        assert solution.peak_bytes == keep_all(graph)[0]
