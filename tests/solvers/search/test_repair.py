"""Repaired schedules.

Valid and within the budget, unchanged where they already fit, and cheaper than the greedy alone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.core.schedule import Schedule, simulate
from remat.core.validate import validate
from remat.solvers.auto.minimum import minimum
from remat.solvers.baselines.chen import ChenGreedy
from remat.solvers.core.accounting import working_set_bytes
from remat.solvers.core.on_demand import steps_on_demand
from remat.solvers.search.greedy_eviction import Rule, steps_with_eviction
from remat.solvers.search.repair import repaired, unrolled
from remat.tracers.synthetic import FAMILIES, chain, random_step, transformer
from tests.support.graphs import random_training_graph


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 100_000),
    share=st.sampled_from([0.1, 0.3, 0.6]),
    rule=st.sampled_from(list(Rule)),
)
def test_a_repaired_schedule_is_valid_and_fits(seed: int, share: float, rule: Rule) -> None:
    graph = random_training_graph(seed, 8, 20)
    floor, ceiling = working_set_bytes(graph), simulate(graph, Schedule.keep_all(graph)).peak_bytes
    budget = int(floor + share * (ceiling - floor))

    for steps in ([*range(graph.num_operators)], steps_on_demand(graph, ())):
        found = repaired(graph, steps, budget_bytes=budget, rule=rule)
        if found is None:
            continue
        schedule = Schedule.from_steps(graph, found)
        assert not validate(graph, schedule)
        assert simulate(graph, schedule).peak_bytes <= budget


@settings(max_examples=50, deadline=None, derandomize=True)
@given(seed=st.integers(0, 100_000))
def test_an_unrolled_schedule_costs_the_same_and_needs_no_less_memory(
    seed: int,
) -> None:
    graph = random_step(12, seed=seed)
    graph = replace(
        graph, operators=tuple(replace(op, is_snapshot=False) for op in graph.operators)
    )

    steps = steps_on_demand(graph, ())
    once = unrolled(graph, steps)
    simulated, plain = (
        simulate(graph, Schedule.from_steps(graph, steps)),
        simulate(once, Schedule.keep_all(once)),
    )

    assert plain.cost_s == pytest.approx(simulated.cost_s)
    assert plain.peak_bytes >= simulated.peak_bytes


def test_a_fitting_schedule_is_unchanged() -> None:
    graph = transformer(6)
    steps = steps_on_demand(graph, ())
    ample = simulate(graph, Schedule.from_steps(graph, steps)).peak_bytes * 2
    assert repaired(graph, steps, budget_bytes=ample) == steps


def test_nothing_is_found_if_one_step_alone_does_not_fit() -> None:
    graph = FAMILIES["unet"]()
    assert repaired(graph, range(graph.num_operators), budget_bytes=1) is None


def test_repaired_segments_are_cheaper_than_the_greedy_alone() -> None:
    graph = chain(60)
    budget = int(minimum(graph).peak_bytes * 1.25)
    greedy = [steps_with_eviction(graph, budget, rule) for rule in Rule]
    alone = min(float(graph.arrays.cost_s[steps].sum()) for steps in greedy if steps is not None)

    segments = [
        repaired(graph, list(steps), budget_bytes=budget) for steps in ChenGreedy().members(graph)
    ]
    assert (
        min(float(graph.arrays.cost_s[steps].sum()) for steps in segments if steps is not None)
        < 0.7 * alone
    )
