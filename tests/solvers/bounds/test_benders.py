"""Benders decomposition.

Its bound is never above the exact optimum, and is above those of its models. It is given up where
its relaxation stays far below a known bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.solvers.auto import raising
from remat.solvers.auto.raising import Decomposition, Refinements
from remat.solvers.auto.reuse import Shared
from remat.solvers.auto.solver import Auto
from remat.solvers.auto.technique import Solve
from remat.solvers.bounds import benders as module
from remat.solvers.bounds.benders import Benders, raise_bound
from remat.solvers.bounds.refinement import Refinement
from remat.solvers.core.incumbent import Search
from remat.tracers.synthetic import random_layered
from tests.support.graphs import budget_between, optimum, random_training_graph

GRAPH = random_layered(40, seed=0, is_training=True)
PEAK = simulate(GRAPH, Schedule.keep_all(GRAPH)).peak_bytes
TIGHT = PEAK * 45 // 100


@cache
def known() -> tuple[float, Sequence[int]]:
    """Cost and steps of a good schedule of `GRAPH` in the tight budget."""
    solution = Auto(threads=1, time_limit_s=5, gap=0.02).solve(GRAPH, budget_bytes=TIGHT)
    assert solution.schedule is not None
    return solution.cost_s, solution.schedule.steps


@cache
def tight_bounds() -> list[float]:
    return bounds(GRAPH, TIGHT, known()[0], 2)


def bounds(graph: Graph, budget: int, cost_s: float, rounds: int) -> list[float]:
    benders = Benders(graph, budget_bytes=budget, cost_s=cost_s)
    found: list[float] = []
    while not benders.is_over and len(found) < rounds:
        benders.solve(deadline=time.perf_counter() + 60, cutoff_s=cost_s)
        found.append(benders.best_s)
    return found


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 100_000),
    share=st.sampled_from([0.0, 0.01, 0.25, 0.5]),
    above=st.sampled_from([1.0, 1.0 + 1e-12, 1.03]),
)
def test_no_bound_is_above_the_optimum(seed: int, share: float, above: float) -> None:
    graph = random_training_graph(seed, 4, 7)
    budget = budget_between(graph, share)
    best = optimum(graph, budget)
    for bound_s in bounds(graph, budget, best.cost_s * above, 8):
        assert bound_s <= best.cost_s * (1 + 1e-9)


def test_its_bound_is_above_that_of_its_models_and_integers_raise_it() -> None:
    """Every second model is looked at: each takes as long as some rounds of the decomposition."""
    found = tight_bounds()
    refinement = Refinement(GRAPH, budget_bytes=TIGHT)
    single = []
    for v in range(refinement.first, GRAPH.num_operators, 2):
        refinement.adopt(refinement.stages.cleared().with_single(v))
        single.append(refinement.relaxed_bound(math.inf))

    assert found[0] > max(single)
    assert found[-1] > found[0]


def test_with_barely_violated_cuts_no_bound_is_above_a_schedule_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_VIOLATION", 1e-9)
    known = Auto(threads=1, time_limit_s=30, gap=0.0).solve(GRAPH, budget_bytes=PEAK * 70 // 100)
    assert known.cost_s is not None
    for bound_s in bounds(GRAPH, PEAK * 70 // 100, known.cost_s * 1.5, 2):
        assert bound_s <= known.cost_s * (1 + 1e-9)


def test_it_raises_the_bound_of_a_search() -> None:
    search = Search(GRAPH, budget_bytes=TIGHT, gap=0.0, time_limit_s=20)
    search.offer(known()[1])
    before_s = search.bound_s
    raise_bound(search, lambda search: search.cost_s, deadline=time.perf_counter() + 4)
    assert before_s < search.bound_s
    assert search.cost_s is not None
    assert search.bound_s <= search.cost_s


def test_it_is_given_up_where_its_relaxation_stays_far_below_a_known_bound() -> None:
    cost_s = known()[0]
    benders = Benders(GRAPH, budget_bytes=TIGHT, cost_s=cost_s)
    benders.solve(deadline=time.perf_counter() + 60, cutoff_s=cost_s, known_s=cost_s * (1 - 1e-4))
    assert benders.is_over
    assert benders.best_s < cost_s * (1 - 1e-4)


def test_a_near_cutoff_does_not_make_it_give_up() -> None:
    """With ten minutes for ResNet-50 at 5 GB it was given up at once.

    The bound was near a cutoff half a percent below the cost.
    """
    cost_s, known_s = known()[0], tight_bounds()[0]
    benders = Benders(GRAPH, budget_bytes=TIGHT, cost_s=cost_s)
    benders.solve(
        deadline=time.perf_counter() + 3,
        cutoff_s=known_s * (1 + 1e-6),
        known_s=known_s * (1 - 1e-6),
    )

    assert not benders.is_over
    assert benders.best_s >= known_s * (1 - 0.02)


def test_without_time_or_with_a_long_forward_there_is_no_bound() -> None:
    hurried = Benders(GRAPH, budget_bytes=TIGHT, cost_s=2 * GRAPH.cost_s)
    assert hurried.solve(deadline=0.0, cutoff_s=2 * GRAPH.cost_s) is None
    assert hurried.best_s == -math.inf
    assert hurried.is_over

    assert Benders(
        random_layered(300, seed=0, is_training=True), budget_bytes=10**9, cost_s=1.0
    ).is_over


def test_with_a_long_limit_refinement_gives_way_as_soon_as_with_a_short_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = Search(GRAPH, budget_bytes=TIGHT, gap=0.0, time_limit_s=1_000)
    search.offer(known()[1])
    assert search.cost_s is not None
    search.raise_bound(search.cost_s * 0.99)
    models, deadlines = list[float](), list[float]()

    def solve_a_model(_: Solve, *, deadline: float) -> None:
        models.append(deadline)
        time.sleep(0.2)

    monkeypatch.setattr(raising, "refine", solve_a_model)
    monkeypatch.setattr(raising, "raise_bound", lambda *_, deadline: deadlines.append(deadline))

    solve = Auto().begin(search, Shared(GRAPH)).for_bounds(0.9)
    Refinements(gives_way=True, most_s=0.5)(solve)
    Decomposition()(solve)

    assert 1 <= len(models) <= 3
    assert max(models) - time.perf_counter() < 31
    assert deadlines[0] - time.perf_counter() > 800
