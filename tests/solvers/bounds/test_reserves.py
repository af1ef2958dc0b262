"""Reserves below the budget give schedules that fit, and rows of a program may change."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.validate import validate
from remat.solvers.bounds.lazy_rows import LazyRows
from remat.solvers.bounds.memory_margins import Reserves
from remat.solvers.bounds.refinement import Refinement
from remat.solvers.lp.linear import Program
from remat.tracers.synthetic import random_layered, transformer


def budget_of(graph: Graph, share: float) -> int:
    return int(share * simulate(graph, Schedule.keep_all(graph)).peak_bytes)


def relaxed(lazy: LazyRows) -> float:
    return lazy.solve(deadline=time.perf_counter() + 60, is_relaxed=True).bound


def test_a_changed_row_acts_as_in_a_new_program() -> None:
    """Minimises -x - 2 y under one row that changes after each solve."""
    for starts_from_last in (False, True):
        program = Program()
        program.starts_from_last = starts_from_last
        columns = program.add_columns(np.array([-1.0, -2.0]))
        row = program.add_row(columns, np.array([1.0, 1.0]), upper=2.0)

        bounds = []
        for upper in (2.0, 0.5, 1.5, 0.0):
            program.change_upper(row, upper)
            bounds.append(program.minimise(is_relaxed=True, time_limit_s=10).bound)
        assert bounds == pytest.approx([-3.0, -1.0, -2.5, 0.0], abs=1e-6)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 100_000), share=st.sampled_from([0.6, 0.75, 0.9]))
def test_reserves_set_later_act_as_if_set_from_the_start(seed: int, share: float) -> None:
    graph = random_layered(20, seed=seed)
    budget = budget_of(graph, share)
    reserve = (
        np.random.default_rng(seed)
        .integers(0, 1 + budget // 20, graph.num_operators)
        .astype(np.float64)
    )

    refinement = Refinement(graph, budget_bytes=budget)
    later = refinement.relaxation()
    later.model.program.starts_from_last = True
    without = relaxed(later)
    later.model.set_reserve(reserve)

    first = refinement.relaxation()
    first.model.set_reserve(reserve)
    assert relaxed(later) == pytest.approx(relaxed(first), abs=1e-4)
    assert relaxed(later) >= without - 1e-6

    later.model.set_reserve(np.zeros(graph.num_operators))
    assert relaxed(later) >= without - 1e-6  # rows were added meanwhile


@pytest.mark.parametrize(
    ("graph", "share"),
    [(transformer(6), 0.7), (transformer(6), 0.8), (random_layered(80, seed=3), 0.6)],
    ids=["t70", "t80", "l60"],
)
def test_schedules_with_reserves_fit_where_the_plain_one_does_not(
    graph: Graph, share: float
) -> None:
    budget = budget_of(graph, share)
    refinement = Refinement(graph, budget_bytes=budget)
    schedules = list(Reserves(refinement).schedules(deadline=time.perf_counter() + 60))
    simulations = [simulate(graph, Schedule.from_steps(graph, steps)) for steps in schedules]

    assert not any(validate(graph, Schedule.from_steps(graph, steps)) for steps in schedules)
    assert simulations[0].peak_bytes > budget
    fitting = [simulation.cost_s for simulation in simulations if simulation.peak_bytes <= budget]
    assert fitting
    assert any(later < earlier for earlier, later in pairwise(fitting)), "no later one is cheaper"
