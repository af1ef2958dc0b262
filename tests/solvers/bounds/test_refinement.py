"""Refined window models.

Their bounds are never above the exact optimum, and better than one window's where transients bind.
"""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.solvers.auto.minimum import minimum
from remat.solvers.bounds.lazy_rows import LazyRows
from remat.solvers.bounds.refinement import MAX_STAGES, Refinement
from remat.solvers.bounds.window import WindowModel
from remat.tracers.synthetic import random_layered
from tests.support.graphs import budget_between, optimum, random_training_graph


def bounds_s(graph: Graph, budget: int, cutoff_s: float | None) -> list[float]:
    refinement, found = Refinement(graph, budget_bytes=budget), []
    while not refinement.is_over:
        found.append(refinement.solve(deadline=time.perf_counter() + 20, cutoff_s=cutoff_s).bound_s)
    return found


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 100_000),
    share=st.sampled_from([0.0, 0.01, 0.25, 0.5]),
    is_cut_off=st.booleans(),
)
def test_no_refined_bound_is_above_the_optimum(seed: int, share: float, is_cut_off: bool) -> None:
    graph = random_training_graph(seed)
    budget = budget_between(graph, share)
    best = optimum(graph, budget)
    assert max(
        bounds_s(graph, budget, best.cost_s if is_cut_off else None), default=0
    ) <= best.cost_s * (1 + 1e-9)


def test_refinement_sees_what_one_window_does_not() -> None:
    """The first model is below the optimum on some graphs; refinement closes most such gaps."""
    opened = closed = 0
    for seed in range(25):
        graph = random_training_graph(seed)
        floor, ceiling = (
            minimum(graph).peak_bytes,
            simulate(graph, Schedule.keep_all(graph)).peak_bytes,
        )
        if floor == ceiling:
            continue

        bounds = bounds_s(graph, floor, None)
        best = optimum(graph, floor)
        opened += bounds[0] < best.cost_s
        closed += bounds[0] < best.cost_s and max(bounds) >= best.cost_s

    assert opened >= 5
    assert closed >= opened / 2


@pytest.mark.parametrize("seed", range(4))
def test_moment_rows_hold_for_the_optimum(seed: int) -> None:
    """With each operator of the backward as a stage, all moment rows are checked."""
    graph = random_training_graph(seed, 5, 6)
    budget = minimum(graph).peak_bytes
    boundaries = [0, *range(graph.num_forward, graph.num_operators + 1)]
    stages = list(pairwise(boundaries))
    windows = sorted({*stages, *((a, graph.num_operators) for a in boundaries[:-1])})

    model = WindowModel(graph, windows, priced=stages, budget_bytes=budget)
    lazy = LazyRows(model)
    bound_s = model.bound_s(lazy.solve(deadline=time.perf_counter() + 20))
    assert bound_s <= optimum(graph, budget).cost_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", [93, 392])
def test_relaxing_goes_on_if_the_schedule_fits_but_is_expensive(seed: int) -> None:
    """Values that are kept fractionally then do not show where the model fails."""
    graph = random_training_graph(seed, 6, 14)
    floor, ceiling = (
        minimum(graph).peak_bytes,
        simulate(graph, Schedule.keep_all(graph)).peak_bytes,
    )
    budget = int(floor + 0.25 * (ceiling - floor))
    refinement = Refinement(graph, budget_bytes=budget)
    stages = refinement.boundaries

    first = refinement.solve(deadline=time.perf_counter() + 20, is_relaxed=True)
    assert first.steps is not None
    schedule = simulate(graph, Schedule.from_steps(graph, first.steps))
    assert schedule.peak_bytes <= budget
    assert schedule.cost_s > first.bound_s * 1.005
    assert refinement.boundaries != stages

    best = optimum(graph, budget)
    for _ in range(3):
        assert refinement.solve(
            deadline=time.perf_counter() + 20, is_relaxed=True
        ).bound_s <= best.cost_s * (1 + 1e-9)


def test_two_stages_do_not_replace_each_other_forever() -> None:
    """Naive: two operators become stages in turn, each after the other was given up."""
    cost = [9, 20, 9, 20, 1, 5, 20, 9, 20, 2, 9, 9]
    size = [13, 13, 8, 1, 1, 5, 3, 1, 13, 3, 13, 1]
    edges = [
        (0, 1),
        (1, 2),
        (2, 3),
        (3, 4),
        (4, 5),
        (5, 6),
        (3, 7),
        (4, 7),
        (6, 7),
        (2, 8),
        (3, 8),
        (5, 8),
        (7, 8),
        (2, 9),
        (8, 9),
    ]
    edges += [(0, 10), (1, 10), (9, 10), (0, 11), (8, 11), (10, 11)]

    refinement = Refinement(Graph.from_arrays(cost, size, edges, first_backward=6), budget_bytes=53)
    for _ in range(3 * MAX_STAGES):
        if refinement.is_over:
            break
        refinement.solve(deadline=time.perf_counter() + 20, cutoff_s=176.0)

    assert refinement.is_over


def test_further_stages_of_a_relaxation_do_not_lower_the_bound() -> None:
    """Without the windows of earlier relaxations the fourth bound is below the third."""
    graph = random_layered(60, seed=3, is_training=True)
    refinement = Refinement(
        graph, budget_bytes=simulate(graph, Schedule.keep_all(graph)).peak_bytes * 40 // 100
    )

    bounds = [
        refinement.solve(deadline=time.perf_counter() + 20, is_relaxed=True).bound_s
        for _ in range(5)
    ]

    assert bounds == sorted(bounds)
    assert len(refinement.boundaries) > 4


def test_the_next_stage_is_where_a_schedule_repeats_a_recomputation() -> None:
    """Operators 0 to 2, of the forward, are read by 3 to 6 of the backward.

    1 is computed again for 4, and for 5 once more.
    """
    edges = [(0, 1), (1, 2), (2, 3), (3, 4), (1, 4), (4, 5), (1, 5), (5, 6), (0, 6)]
    graph = Graph.from_arrays([1.0] * 7, [1] * 7, edges, first_backward=3)
    steps = [0, 1, 2, 3, 1, 4, 1, 5, 0, 6]

    refinement = Refinement(graph, budget_bytes=10)
    refinement.adopt(refinement.stages.with_single(6))  # of the last model
    refinement.cut_where_repeated(steps, [3, 7])
    assert (refinement.stages.singles, refinement.stages.cuts) == (frozenset({5}), frozenset())

    refinement.adopt(refinement.stages.with_cut(4))
    refinement.cut_where_repeated(steps, [3, 5, 6, 7])  # once in each stage
    assert (refinement.stages.singles, refinement.stages.cuts) == (frozenset({5}), frozenset({4}))
