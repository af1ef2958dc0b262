"""Annealing and eviction, compiled or not: valid sequences, true numbers, plans that fit."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.validate import validate
from remat.solvers.auto.solver import Auto
from remat.solvers.core import compiled
from remat.solvers.core.on_demand import forward_length, steps_on_demand
from remat.solvers.search.annealing import LocalSearch, Round
from remat.solvers.search.greedy_eviction import Rule, steps_with_eviction
from remat.solvers.search.sequence import OVER, SLOT, bytes_held, pack
from remat.solvers.search.timeline import lay_out
from remat.tracers.synthetic import chain, random_layered, random_step, two_regions, unet
from tests.support.graphs import keep_all_bytes


def walk(local: LocalSearch, steps: Sequence[int]) -> list[int]:
    return [
        int(op) for op in local.run(np.array(steps, np.int64), Round(300, 1e-2, 1e-3), chunk=50)
    ]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), num_operators=st.integers(2, 14))
def test_the_sequence_agrees_with_the_simulator_to_the_byte(seed: int, num_operators: int) -> None:
    graph = random_step(num_operators, seed=seed)
    local = LocalSearch(graph, budget_bytes=int(0.8 * keep_all_bytes(graph)), seed=seed)
    steps = walk(local, range(graph.num_operators))
    schedule = Schedule.from_steps(graph, steps)
    assert validate(graph, schedule) == []

    state, simulation = (
        lay_out(pack(graph, room=0), np.array(steps, np.int64)),
        simulate(graph, schedule),
    )

    is_step = (state.slots[SLOT] >= 0) & (state.slots[SLOT] < graph.num_operators)
    assert (
        bytes_held(state.slots)[is_step] + graph.resident_bytes
    ).tolist() == simulation.bytes_at.tolist()
    assert state.costs[-1] == pytest.approx(simulation.cost_s)
    assert state.sums[OVER] == np.maximum(bytes_held(state.slots), 0).sum()


def test_annealing_never_leaves_the_regions() -> None:
    graph = two_regions(8)
    local = LocalSearch(graph, budget_bytes=int(0.7 * keep_all_bytes(graph)), seed=1)
    steps = walk(local, range(graph.num_operators))
    assert len(steps) > graph.num_operators
    assert validate(graph, Schedule.from_steps(graph, steps)) == []


@pytest.mark.parametrize("rule", Rule)
def test_eviction_fits_or_returns_none(rule: Rule) -> None:
    graph = chain(30)
    found = {budget: steps_with_eviction(graph, budget, rule) for budget in range(3, 40, 9)}
    for budget, steps in found.items():
        if steps is not None:
            assert simulate(graph, Schedule.from_steps(graph, steps.tolist())).peak_bytes <= budget
    most = keep_all_bytes(graph)
    assert steps_with_eviction(graph, most - 1, rule) is not None
    assert steps_with_eviction(graph, 2, rule) is None


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 100_000),
    chances=st.lists(st.sampled_from([0.0, 0.3, 0.7]), min_size=1, max_size=3),
)
def test_eviction_returns_a_plan_that_fits_and_repairs_one_that_does_not(
    seed: int, chances: list[float]
) -> None:
    graph, rng = random_layered(12, seed=seed), random.Random(seed)
    first = forward_length(graph)
    kept = {
        first + 3 * index: [
            v
            for v in range(len(graph.values))
            if graph.producer[v] < first + 3 * index and rng.random() < chance
        ]
        for index, chance in enumerate(chances)
    }

    plan = steps_on_demand(graph, kept[first], later=kept)
    roomy = steps_with_eviction(graph, 1 << 40, kept=kept)
    assert roomy is not None
    assert roomy.tolist() == plan

    needed = simulate(graph, Schedule.from_steps(graph, plan)).peak_bytes
    for rule in Rule:
        assert steps_with_eviction(graph, needed, rule, kept=kept) is not None
        steps = steps_with_eviction(graph, needed * 9 // 10, rule, kept=kept)
        if steps is not None:
            assert (
                simulate(graph, Schedule.from_steps(graph, steps.tolist())).peak_bytes
                <= needed * 9 // 10
            )


@pytest.mark.parametrize("graph", [random_layered(40, seed=1), unet(4)], ids=["layered", "unet"])
def test_eviction_repairs_a_plan_that_needs_a_tenth_too_much(graph: Graph) -> None:
    first = forward_length(graph)
    plan = [
        value for value in range(len(graph.values)) if graph.producer[value] < first and value % 2
    ]
    needed = simulate(graph, Schedule.from_steps(graph, steps_on_demand(graph, plan))).peak_bytes

    moved = [
        steps_with_eviction(graph, needed * 9 // 10, rule, kept={first: plan}) for rule in Rule
    ]
    fitting = [
        simulate(graph, Schedule.from_steps(graph, steps.tolist()))
        for steps in moved
        if steps is not None
    ]

    assert fitting
    assert all(simulation.peak_bytes <= needed * 9 // 10 for simulation in fitting)


def test_the_search_runs_in_python_if_compiling_would_take_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled, "is_ready", lambda function: False)
    graph = random_layered(40, seed=1)
    budget = int(0.8 * keep_all_bytes(graph))

    for rule in Rule:
        plain, fast = (
            steps_with_eviction(graph, budget, rule, left_s=left_s) for left_s in (1.0, math.inf)
        )
        assert plain is not None
        assert fast is not None
        assert np.array_equal(plain, fast)

    assert steps_with_eviction(chain(3_000), 100, left_s=1.0) is None
    solution = Auto(time_limit_s=2.0).solve(graph, budget_bytes=budget)
    assert solution.schedule is not None
