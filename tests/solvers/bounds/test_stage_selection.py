"""Stages chosen by their bound.

That bound is never above the exact optimum, and better than with stages cut where schedules fail.
"""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.core.schedule import Schedule, simulate
from remat.solvers.auto import raising
from remat.solvers.auto.solver import Auto
from remat.solvers.bounds import stage_selection
from remat.solvers.bounds.refinement import Refinement
from remat.solvers.bounds.stage_selection import scout, scout_crowded
from remat.solvers.core.accounting import working_set_bytes
from remat.tracers.synthetic import chain, random_layered, transformer
from tests.support.graphs import budget_between, optimum, random_training_graph, with_a_crowded_loss

GRAPH = random_layered(40, seed=0, is_training=True)
TIGHT = simulate(GRAPH, Schedule.keep_all(GRAPH)).peak_bytes * 28 // 100


@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 100_000), share=st.sampled_from([0.0, 0.01, 0.25, 0.5]))
def test_no_bound_of_chosen_stages_is_above_the_optimum(seed: int, share: float) -> None:
    graph = random_training_graph(seed, 4, 7)
    budget = budget_between(graph, share)
    best = optimum(graph, budget)
    refinement = Refinement(graph, budget_bytes=budget)
    bound_s = scout(refinement, deadline=math.inf)
    assert bound_s <= best.cost_s * (1 + 1e-9)
    if refinement.stages.singles:
        # the refinement has the stages that gave the bound
        assert refinement.relaxed_bound(math.inf) >= bound_s * (1 - 1e-6)
    while not refinement.is_over:
        assert refinement.solve(deadline=time.perf_counter() + 20).bound_s <= best.cost_s * (
            1 + 1e-9
        )


def test_chosen_stages_give_a_higher_bound_than_cut_ones_and_are_kept() -> None:
    refinement = Refinement(GRAPH, budget_bytes=TIGHT)
    bound_s = scout(refinement, deadline=math.inf)
    assert 1 <= len(refinement.stages.singles) <= 3
    assert refinement.best_s == bound_s
    other = Refinement(GRAPH, budget_bytes=TIGHT)
    cut = [other.solve(deadline=math.inf, is_relaxed=True).bound_s for _ in range(4)]
    assert bound_s > max(cut)

    refinement.solve(deadline=time.perf_counter() + 2)
    refinement.resume()
    assert refinement.relaxed_bound(math.inf) >= bound_s * (1 - 1e-6)


def test_without_a_better_stage_or_without_time_the_stages_stay() -> None:
    ample = Refinement(GRAPH, budget_bytes=simulate(GRAPH, Schedule.keep_all(GRAPH)).peak_bytes)
    ample.adopt(ample.stages.with_cut(GRAPH.num_operators - 5))
    scout(ample, deadline=math.inf)
    assert ample.stages.singles == frozenset()
    assert ample.stages.cuts == {GRAPH.num_operators - 5}
    hurried = Refinement(GRAPH, budget_bytes=TIGHT)
    hurried.adopt(hurried.stages.with_cut(GRAPH.num_operators - 5))
    assert scout(hurried, deadline=0.0) == -math.inf
    assert hurried.stages.cuts == {GRAPH.num_operators - 5}


def test_stages_of_long_forwards_are_not_scouted() -> None:
    graph = random_layered(300, seed=0, is_training=True)
    refinement = Refinement(graph, budget_bytes=10**9)
    assert scout(refinement, deadline=math.inf) == -math.inf


@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 100_000), share=st.sampled_from([0.0, 0.01, 0.25, 0.5]))
def test_no_bound_of_crowded_stages_is_above_the_optimum(seed: int, share: float) -> None:
    graph = random_training_graph(seed, 4, 7)
    budget = budget_between(graph, share)
    best = optimum(graph, budget)
    refinement = Refinement(graph, budget_bytes=budget)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_selection, "MOST_FORWARD", 0)
        assert scout_crowded(refinement, deadline=math.inf) <= best.cost_s * (1 + 1e-9)
    while not refinement.is_over:
        assert refinement.solve(deadline=time.perf_counter() + 20).bound_s <= best.cost_s * (
            1 + 1e-9
        )


def test_a_loss_that_leaves_little_room_is_found() -> None:
    graph = with_a_crowded_loss(chain(260, size=4))
    loss = graph.num_forward
    refinement = Refinement(graph, budget_bytes=working_set_bytes(graph))
    alone_s = refinement.solve(deadline=math.inf, is_relaxed=True).bound_s
    bound_s = scout_crowded(refinement, deadline=math.inf)
    assert bound_s > 1.1 * alone_s
    assert refinement.best_s == bound_s
    assert refinement.stages.singles == {loss}


def test_crowded_stages_are_not_scouted_without_time_or_in_short_or_too_long_forwards() -> None:
    long = Refinement(chain(260), budget_bytes=100)
    assert scout_crowded(long, deadline=0.0) == -math.inf
    assert (long.stages.singles, long.stages.cuts) == (frozenset(), frozenset())
    short, too_long = (
        Refinement(GRAPH, budget_bytes=TIGHT),
        Refinement(chain(6_001), budget_bytes=100),
    )
    assert (
        scout_crowded(short, deadline=math.inf)
        == scout_crowded(too_long, deadline=math.inf)
        == -math.inf
    )


def test_nothing_is_scouted_once_the_requested_gap_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a large graph, prices close the gap before any linear program."""
    monkeypatch.setattr(raising, "scout_crowded", lambda *_, **__: pytest.fail("scouted"))
    graph = transformer(24)
    assert graph.num_operators > 500
    budget = int(0.7 * simulate(graph, Schedule.keep_all(graph)).peak_bytes)
    assert (
        Auto(gap=0.05, time_limit_s=20.0, threads=1).solve(graph, budget_bytes=budget).gap <= 0.05
    )
