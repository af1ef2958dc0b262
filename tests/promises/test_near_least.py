"""Near the least budget, under short limits: an answer or a `BudgetError`, nothing else.

Few graphs here; `experiments/near_least.py` solves thousands and records the results.
"""

from __future__ import annotations

import math
import time

import pytest

import remat
from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.solvers.auto.solver import Auto
from remat.solvers.bounds.refinement import Refinement
from remat.solvers.bounds.stage_selection import scout
from remat.solvers.core.incumbent import Search
from remat.solvers.exhaustive import states
from remat.tracers.synthetic import random_layered
from tests.support.near_least import Problem, outcome

LEAST_OF_EIGHT = Graph.from_arrays(
    [6, 2, 7, 7, 3, 0, 6, 8],
    [9, 8, 5, 7, 5, 3, 1, 1],
    [
        (0, 1), (0, 6), (0, 7), (1, 2), (1, 5), (1, 6), (2, 3),
        (2, 4), (2, 5), (3, 4), (4, 5), (5, 6), (6, 7),
    ],
)  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_a_budget_near_the_least_ends_in_an_answer_or_a_budget_error(seed: int) -> None:
    assert outcome(Problem(seed)) in {
        "optimal", "feasible", "BudgetError, proved", "BudgetError, not proved",
    }  # fmt: skip


def test_a_budget_that_no_heuristic_meets_is_met() -> None:
    """A report: no schedule was found at 23, and the least known budget was 25."""
    solution = remat.solve(LEAST_OF_EIGHT, 23, time_limit_s=5.0)
    assert (solution.cost_s, solution.status) == (60.0, remat.Status.OPTIMAL)

    with pytest.raises(remat.BudgetError) as error:
        remat.solve(LEAST_OF_EIGHT, 21, time_limit_s=5.0)
    assert error.value.is_proved
    assert error.value.minimum_bytes == 22


def test_the_scout_reports_a_budget_no_stage_can_meet_and_leaves_the_stages() -> None:
    """Infinite bounds were once compared as `inf - 1e-6 * inf`, and no stage was the best."""
    graph = random_layered(16, seed=3, width=2)
    keep_all = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    seen = 0

    for percent in range(20, 100, 8):
        refinement = Refinement(graph, budget_bytes=keep_all * percent // 100)
        refinement.adopt(refinement.stages.with_cut(refinement.first + 1))
        bound_s = scout(refinement, deadline=math.inf)

        assert not math.isnan(bound_s)
        if bound_s == math.inf:
            seen += 1
            assert refinement.stages.singles == frozenset()
            assert refinement.stages.cuts == {refinement.first + 1}
            assert refinement.best_s < math.inf
        elif seen:
            break  # larger budgets can be met as well

    assert seen


def test_a_search_refuses_infinite_bounds() -> None:
    search = Search(LEAST_OF_EIGHT, budget_bytes=30, gap=0.0, time_limit_s=1.0)
    for bound_s in (math.inf, math.nan):
        with pytest.raises(AssertionError, match="no bound"):
            search.raise_bound(bound_s)


def test_at_the_limit_of_states_the_bound_is_that_of_the_best_state_left() -> None:
    found = states.cheapest(LEAST_OF_EIGHT, budget_bytes=23, deadline=math.inf, most_states=60)
    assert found.steps is None
    assert not found.is_finished
    assert 0 < found.least <= 60 - LEAST_OF_EIGHT.cost_s

    late = states.cheapest(
        LEAST_OF_EIGHT, budget_bytes=23, deadline=time.perf_counter() - 1, most_states=10**6
    )
    assert (late.steps, late.is_finished, late.least) == (None, False, 0.0)


def test_exhaustive_search_refuses_large_graphs_and_auto_skips_it() -> None:
    graph = random_layered(60, seed=0)
    with pytest.raises(remat.SolverError, match="graphs of some 20 operators"):
        remat.solve(graph, "90%", solver="exhaustive")
    assert Auto(time_limit_s=2.0).solve(graph, budget_bytes=10**9).is_solved
