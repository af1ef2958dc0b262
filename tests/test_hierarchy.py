"""Models over even stages: never above the exact optimum, and better than refined ones near the least budget."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.graph import Graph
from remat.schedule import Schedule, simulate
from remat.solution import Status
from remat.solvers.hierarchy import Hierarchy
from remat.solvers.linear import Program
from remat.solvers.milp import MILP
from remat.solvers.minimum import minimum
from remat.solvers.refinement import Refinement
from remat.tracers.synthetic import random_layered
from tests.test_refinement import random_training_graph


def rungs(graph: Graph, budget: int, cutoff_s: float | None = None) -> list[tuple[int, bool, float]]:
    """(operators of a stage, with integers, bound) of every model."""
    hierarchy, found = Hierarchy(graph, budget), []
    while not hierarchy.is_over:
        length, is_integer = hierarchy.length, hierarchy.is_integer
        found.append((length, is_integer, hierarchy.solve(deadline=time.perf_counter() + 60, cutoff_s=cutoff_s)))
    return found


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 100_000), share=st.sampled_from([0.0, 0.01, 0.25, 0.5]), is_cut_off=st.booleans())
def test_no_rung_is_above_the_optimum(seed: int, share: float, is_cut_off: bool) -> None:
    graph = random_training_graph(seed, 5, 9)
    floor, ceiling = minimum(graph).peak_bytes, simulate(graph, Schedule.keep_all(graph)).peak_bytes
    budget = int(floor + share * (ceiling - floor))
    best = MILP(time_limit_s=20).solve(graph, budget_bytes=budget)
    assert best.status is Status.OPTIMAL
    found = rungs(graph, budget, best.cost_s if is_cut_off else None)
    assert found
    assert max(bound_s for *_, bound_s in found) <= best.cost_s * (1 + 1e-9)


def test_near_the_least_budget_it_bounds_more_than_refined_models() -> None:
    graph = random_layered(40, seed=0, is_training=True)
    budget = simulate(graph, Schedule.keep_all(graph)).peak_bytes * 28 // 100
    hierarchy = Hierarchy(graph, budget)
    first, second = (hierarchy.solve(deadline=time.perf_counter() + 60) for _ in range(2))
    assert graph.cost_s < first < second
    refinement = Refinement(graph, budget_bytes=budget)
    refined = [refinement.solve(deadline=time.perf_counter() + 20, is_relaxed=True).bound_s for _ in range(4)]
    assert second > max(refined)


def test_stages_are_halved_and_the_ladder_ends_with_integers() -> None:
    graph = random_layered(40, seed=1, is_training=True)
    budget = simulate(graph, Schedule.keep_all(graph)).peak_bytes * 40 // 100
    found = rungs(graph, budget)
    assert graph.num_operators - graph.num_forward == 40
    assert [length for length, is_integer, _ in found if not is_integer] == [4, 2]
    assert [is_integer for _, is_integer, _ in found] == [False, False, True]
    assert found[2][2] >= max(found[0][2], found[1][2]) * (1 - 1e-6)


def test_a_graph_without_a_backward_or_too_large_a_forward_has_no_ladder() -> None:
    assert Hierarchy(random_layered(300, seed=0, is_training=True), 10**9).is_over
    chain = Graph.from_arrays([1.0] * 3, [1] * 3, [(0, 1), (1, 2)], first_backward=2)
    assert Hierarchy(chain, 3).is_over


def test_without_time_there_is_no_bound_and_no_more_models() -> None:
    graph = random_layered(20, seed=1, is_training=True)
    hierarchy = Hierarchy(graph, simulate(graph, Schedule.keep_all(graph)).peak_bytes * 40 // 100)
    assert hierarchy.solve(deadline=time.perf_counter() - 1) <= graph.cost_s
    assert hierarchy.is_over


@pytest.mark.parametrize("seed", range(5))
def test_relaxations_that_go_on_from_the_last_basis_give_the_same_bounds(seed: int) -> None:
    random = np.random.default_rng(seed)
    programs = [Program(), Program()]
    programs[1].starts_from_last = True
    bounds: list[list[float]] = [[], []]
    for _ in range(4):
        cost, width = random.uniform(0, 5, 12), np.stack([random.permutation(12)[:3] for _ in range(6)])
        for program, found in zip(programs, bounds, strict=True):
            first = program.num_columns
            program.add_columns(cost)
            program.add_rows(width + first, [1.0, 1.0, 1.0], lower=1.0)
            if first:
                program.add_rows(np.stack([width[:, 0] + first, width[:, 1] + first - 12], axis=1), [1.0, 1.0], lower=1.5)
            found.append(program.minimise(is_relaxed=True, time_limit_s=10).bound)
    assert bounds[1] == pytest.approx(bounds[0], rel=1e-9)
    assert bounds[0] == sorted(bounds[0])
    assert bounds[0][0] > 0
