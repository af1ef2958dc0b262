"""Checkpoints between segments: they trade compute for memory, by the published counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.core.errors import SolverError
from remat.core.graph import Graph
from remat.core.solution import Status
from remat.solvers import make_solver
from remat.solvers.baselines.articulation import articulation_points
from remat.tracers.synthetic import chain, chain_with_skips, diamond, training_step
from tests.support.heuristics import UNLIMITED, check, keep_all, seeds
from tests.support.oracles import sqrt_peak_bound

SEGMENTS = ("chen-sqrt", "chen-greedy", "ap-sqrt", "ap-greedy", "linear-sqrt", "linear-greedy")


@pytest.mark.parametrize("name", [*SEGMENTS, "revolve"])
@pytest.mark.parametrize("has_phases", [True, False])
def test_a_chain_at_sixty_percent_costs_more_and_holds_less(name: str, has_phases: bool) -> None:
    graph = chain(36, has_phases=has_phases)
    peak_bytes, cost_s = keep_all(graph)
    solution = make_solver(name).solve(graph, budget_bytes=int(0.6 * peak_bytes))
    check(graph, solution, int(0.6 * peak_bytes))
    assert solution.cost_s > cost_s


@pytest.mark.parametrize("length", [4, 9, 25, 36, 100, 400])
@pytest.mark.parametrize("name", ["chen-sqrt", "ap-sqrt", "linear-sqrt"])
def test_sqrt_segments_hold_two_square_roots_for_less_than_one_more_forward(
    name: str, length: int
) -> None:
    graph = chain(length)
    solution = make_solver(name).solve(graph, budget_bytes=UNLIMITED)
    peak_bytes, cost_s = keep_all(graph)
    assert solution.peak_bytes <= sqrt_peak_bound(length)
    assert cost_s < solution.cost_s < cost_s + length
    assert solution.peak_bytes < peak_bytes or length == 4


@pytest.mark.parametrize("method", ["chen", "ap", "linear"])
def test_greedy_costs_hardly_more_than_sqrt_on_a_chain(method: str) -> None:
    graph = chain(64)
    sqrt = make_solver(f"{method}-sqrt").solve(graph, budget_bytes=UNLIMITED)
    greedy = make_solver(f"{method}-greedy").solve(graph, budget_bytes=sqrt.peak_bytes + 1)
    assert greedy.is_solved
    assert greedy.cost_s <= sqrt.cost_s + 8


def test_every_segment_method_solves_a_residual_network() -> None:
    graph = diamond(12)
    peak_bytes, cost_s = keep_all(graph)
    for name in SEGMENTS:
        solution = make_solver(name).solve(graph, budget_bytes=int(0.75 * peak_bytes))
        assert solution.is_solved
        assert solution.cost_s > cost_s


def test_methods_for_sequences_refuse_other_graphs() -> None:
    with pytest.raises(SolverError, match="sequence of stages"):
        make_solver("chen-sqrt").solve(
            Graph.from_arrays([1] * 4, [1] * 4, [(0, 2), (1, 2), (0, 3), (1, 3)]),
            budget_bytes=UNLIMITED,
        )
    with pytest.raises(SolverError, match="chain; '3' reads '0'"):
        make_solver("revolve").solve(chain_with_skips(9), budget_bytes=UNLIMITED)


def test_under_a_long_skip_only_the_linear_order_finds_a_schedule() -> None:
    length = 30
    parents = [[i - 1] if i else [] for i in range(length - 1)] + [[0, length - 2]]
    graph = training_step(parents, [1.0] * length, [1] * length)
    peak_bytes, _ = keep_all(graph)
    budget_bytes = int(0.6 * peak_bytes)

    assert (
        make_solver("ap-greedy").solve(graph, budget_bytes=budget_bytes).status
        is Status.NO_SOLUTION
    )
    assert (
        make_solver("chen-greedy").solve(graph, budget_bytes=budget_bytes).status
        is Status.NO_SOLUTION
    )
    assert make_solver("linear-greedy").solve(graph, budget_bytes=budget_bytes).is_solved


def test_articulation_points_of_known_graphs_are_found() -> None:
    assert articulation_points([[1], [0, 2], [1]]) == {1}
    assert articulation_points([[1, 2], [0, 2], [0, 1]]) == set()
    assert articulation_points([[1, 2, 3], [0], [0], [0]]) == {0}
    assert articulation_points([[1, 2], [0, 2], [0, 1, 3], [2, 4, 5], [3, 5], [3, 4], []]) == {2, 3}


@settings(deadline=None, max_examples=60)
@given(num_nodes=st.integers(1, 12), density=st.floats(0, 0.5), seed=seeds)
def test_articulation_points_are_those_whose_removal_disconnects(
    num_nodes: int, density: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    adjacent = np.triu(random.random((num_nodes, num_nodes)) < density, 1)
    adjacent |= adjacent.T
    neighbours = [np.flatnonzero(row).tolist() for row in adjacent]

    def num_components(nodes: set[int]) -> int:
        count, left = 0, set(nodes)
        while left:
            stack, count = [left.pop()], count + 1
            while stack:
                found = left & set(neighbours[stack.pop()])
                left -= found
                stack += found
        return count

    everything = set(range(num_nodes))
    before = num_components(everything)
    expected = {node for node in everything if num_components(everything - {node}) > before}
    assert articulation_points(neighbours) == expected
