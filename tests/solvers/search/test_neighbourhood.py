"""Exact search around a schedule.

Brute force checks its model, the validator its answers.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.validate import validate
from remat.solvers.auto.minimum import minimum
from remat.solvers.lp.backend import Highs
from remat.solvers.search.neighbourhood import Neighbourhood
from remat.solvers.search.neighbourhood_model import SlotModel
from remat.solvers.search.restarts import Restarts
from remat.solvers.search.slots import slots_around
from remat.tracers.synthetic import random_layered, random_step, transformer, two_regions
from tests.support.graphs import keep_all_bytes
from tests.support.oracles import brute_force, minimum_bytes


def tiny_graph(seed: int) -> Graph:
    return (
        random_layered(6, seed=seed, width=2, is_training=False)
        if seed % 3 == 2
        else random_step(3 + seed % 4, seed=seed)
    )


def everything(graph: Graph) -> np.ndarray:
    count = graph.num_operators
    pairs = [
        (i, t)
        for i, t in itertools.product(range(count), range(count + 1))
        if i < t and graph.operators[i].is_recomputable
    ]
    return np.array(pairs, np.int64).reshape(-1, 2)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), share=st.floats(0, 1))
def test_with_everything_free_it_finds_the_optimum(seed: int, share: float) -> None:
    graph = tiny_graph(seed)
    # the model counts snapshots as soon as something could need them
    assume(not graph.arrays.is_snapshot.any())

    floor, ceiling = minimum_bytes(graph), keep_all_bytes(graph)
    budget = int(floor + share * (ceiling - floor))
    best, start = brute_force(graph, budget), minimum(graph).steps
    assert best is not None

    slots = slots_around(
        np.array(start, np.int64), graph.num_operators, everything(graph), passes=4
    )
    model = SlotModel(graph, slots, budget_bytes=budget)
    answer = Highs().minimise(model.arrays, gap=1e-9, time_limit_s=20)
    assert answer.is_finished

    costs = []
    for point in answer.points:
        schedule = Schedule.from_steps(graph, model.steps(point))
        assert validate(graph, schedule, budget_bytes=budget) == []
        costs.append(simulate(graph, schedule).cost_s)
    assert min(costs) == pytest.approx(best)


FAMILIES = {
    "layered": lambda seed: random_layered(8, seed=seed),
    "step": lambda seed: random_step(10, seed=seed),
    "transformer": lambda seed: transformer(1),
    "regions": lambda seed: two_regions(3 + seed % 3),
}


@settings(max_examples=5, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1_000), family=st.sampled_from(sorted(FAMILIES)), share=st.floats(0, 1))
def test_what_it_improves_is_valid_and_costs_no_more(seed: int, family: str, share: float) -> None:
    graph = FAMILIES[family](seed)
    least = minimum(graph)
    budget = int(least.peak_bytes + share * (keep_all_bytes(graph) - least.peak_bytes))

    steps = Neighbourhood(graph, budget, seed).improve(least.steps, max_rounds=5)
    schedule = Schedule.from_steps(graph, steps)
    assert validate(graph, schedule, budget_bytes=budget) == []
    assert (
        simulate(graph, schedule).cost_s
        <= simulate(graph, Schedule.from_steps(graph, least.steps)).cost_s
    )


def test_one_seed_gives_one_answer() -> None:
    graph = random_layered(8, seed=2)
    least = minimum(graph)
    budget = (least.peak_bytes + keep_all_bytes(graph)) // 2
    first, second = (
        Neighbourhood(graph, budget, 3).improve(least.steps, max_rounds=6) for _ in range(2)
    )
    assert first == second != list(least.steps)


def test_it_brings_a_wasteful_schedule_to_the_optimum() -> None:
    graph = next(
        g
        for g in map(tiny_graph, range(100))
        if not g.arrays.is_snapshot.any() and minimum_bytes(g) < keep_all_bytes(g)
    )

    budget = keep_all_bytes(graph)
    again = [i for i, op in enumerate(graph.operators) if op.is_recomputable]
    wasteful = [*range(graph.num_operators - 1), *again[: len(again) // 2], graph.num_operators - 1]

    steps = Neighbourhood(graph, 2 * budget, 0).improve(wasteful, max_rounds=30)
    assert simulate(graph, Schedule.from_steps(graph, steps)).cost_s == graph.cost_s


def test_a_schedule_above_the_budget_is_refused() -> None:
    graph = random_layered(12, seed=1)
    with pytest.raises(ValueError, match="budget"):
        Neighbourhood(graph, keep_all_bytes(graph) - 1).improve(
            range(graph.num_operators), max_rounds=1
        )


def test_threads_do_not_change_what_restarts_find() -> None:
    graph = random_layered(20, seed=4)
    budget = int(0.7 * keep_all_bytes(graph))
    found = []
    for threads in (1, 2):
        restarts = Restarts(graph, budget_bytes=budget, seed=5, moves=400)
        restarts.run([range(graph.num_operators)], threads=threads)
        found.append([(cost_s, steps.tolist()) for cost_s, steps in restarts.pool])

    assert found[0] == found[1]
    assert all(
        validate(graph, Schedule.from_steps(graph, steps), budget_bytes=budget) == []
        for _, steps in found[0]
    )
