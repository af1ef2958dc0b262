"""The simulator against two other implementations of its rules; its laws; broken rules."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.core.errors import ScheduleError
from remat.core.graph import Graph
from remat.core.operators import Operator
from remat.core.schedule import Schedule, simulate
from remat.core.validate import Rule, validate
from remat.tracers.synthetic import FAMILIES, all_pinned, chain, random_step, two_regions
from tests.support.oracles import brute_force, minimum_bytes, naive_bytes_at

seeds = st.integers(0, 2**32 - 1)
small_graphs = st.builds(random_step, st.integers(0, 12), seed=seeds)
tiny_graphs = st.builds(random_step, st.integers(1, 6), seed=seeds)


def with_recomputations(graph: Graph, seed: int, count: int) -> list[int]:
    """Keep-all with `count` operators computed again somewhere after their first time."""
    random = np.random.default_rng(seed)
    steps = list(range(graph.num_operators))
    repeatable = [i for i, op in enumerate(graph.operators) if op.is_recomputable]
    for _ in range(count if repeatable else 0):
        index = int(random.choice(repeatable))
        steps.insert(int(random.integers(steps.index(index) + 1, len(steps) + 1)), index)
    return steps


def rules(graph: Graph, schedule: Schedule, **options: int | bool) -> set[Rule]:
    return {violation.rule for violation in validate(graph, schedule, **options)}  # type: ignore[arg-type]


@settings(deadline=None, max_examples=150)
@given(graph=small_graphs, seed=seeds, count=st.integers(0, 8))
def test_simulator_oracle_and_validator_agree_to_the_byte(
    graph: Graph, seed: int, count: int
) -> None:
    steps = with_recomputations(graph, seed, count)
    schedule = Schedule.from_steps(graph, steps)
    simulation = simulate(graph, schedule)

    assert simulation.bytes_at.tolist() == naive_bytes_at(graph, steps)
    assert simulation.peak_bytes == max(simulation.bytes_at.tolist(), default=graph.resident_bytes)
    assert simulation.cost_s == pytest.approx(sum(graph.operators[i].cost_s for i in steps))
    assert validate(graph, schedule, budget_bytes=simulation.peak_bytes) == []

    if steps:
        assert simulation.bytes_at[simulation.peak_step] == simulation.peak_bytes
        assert rules(graph, schedule, budget_bytes=simulation.peak_bytes - 1) == {Rule.BUDGET}


@pytest.mark.parametrize("family", FAMILIES)
def test_all_three_agree_on_every_family(family: str) -> None:
    graph = FAMILIES[family]()
    for count in (0, 1, 10):
        steps = with_recomputations(
            graph, seed=count, count=count if family != "two_regions" else 0
        )
        schedule = Schedule.from_steps(graph, steps)
        peak_bytes = simulate(graph, schedule).peak_bytes

        assert simulate(graph, schedule).bytes_at.tolist() == naive_bytes_at(graph, steps)
        assert validate(graph, schedule, budget_bytes=peak_bytes) == []


@settings(deadline=None, max_examples=60)
@given(graph=small_graphs, seed=seeds, factor=st.integers(2, 1000))
def test_scaling_sizes_scales_memory_and_scaling_costs_scales_cost(
    graph: Graph, seed: int, factor: int
) -> None:
    steps = with_recomputations(graph, seed, 5)
    scaled = replace(
        graph,
        values=tuple(replace(v, size_bytes=v.size_bytes * factor) for v in graph.values),
        operators=tuple(
            replace(op, workspace_bytes=op.workspace_bytes * factor, cost_s=op.cost_s * factor)
            for op in graph.operators
        ),
    )

    before, after = (
        simulate(graph, Schedule.from_steps(graph, steps)),
        simulate(scaled, Schedule.from_steps(scaled, steps)),
    )

    assert (before.bytes_at * factor).tolist() == after.bytes_at.tolist()
    assert after.cost_s == pytest.approx(before.cost_s * factor)


@settings(deadline=None, max_examples=60)
@given(graph=small_graphs, seed=seeds)
def test_relabelling_values_changes_nothing(graph: Graph, seed: int) -> None:
    steps = with_recomputations(graph, seed, 5)
    label = np.random.default_rng(seed).permutation(len(graph.values)).tolist()
    old = sorted(range(len(label)), key=label.__getitem__)

    def renamed(op: Operator) -> Operator:
        fields = {
            name: tuple(label[v] for v in getattr(op, name))
            for name in ("reads", "writes", "reuses")
        }
        return replace(op, name=f"other_{op.name}", **fields)  # type: ignore[arg-type]

    other = replace(
        graph,
        values=tuple(graph.values[v] for v in old),
        operators=tuple(map(renamed, graph.operators)),
        outputs=tuple(label[v] for v in graph.outputs),
    )

    before, after = (
        simulate(graph, Schedule.from_steps(graph, steps)),
        simulate(other, Schedule.from_steps(other, steps)),
    )

    assert before.bytes_at.tolist() == after.bytes_at.tolist()


@settings(deadline=None, max_examples=40)
@given(graph=tiny_graphs)
def test_more_budget_never_costs_more_and_one_byte_less_than_the_minimum_is_infeasible(
    graph: Graph,
) -> None:
    least = minimum_bytes(graph)
    assert brute_force(graph, least - 1) is None
    costs = [brute_force(graph, least + extra) for extra in (0, 1, 2, 4, 8, 1000)]
    assert None not in costs
    assert costs == sorted(costs, reverse=True)  # type: ignore[type-var]
    assert costs[-1] == graph.cost_s


@settings(deadline=None, max_examples=40)
@given(graph=tiny_graphs, seed=seeds, count=st.integers(0, 4))
def test_no_schedule_beats_brute_force(graph: Graph, seed: int, count: int) -> None:
    simulation = simulate(
        graph, Schedule.from_steps(graph, with_recomputations(graph, seed, count))
    )
    optimum = brute_force(graph, simulation.peak_bytes)
    assert optimum is not None
    assert optimum <= simulation.cost_s


@settings(deadline=None, max_examples=15)
@given(graph=st.builds(random_step, st.integers(1, 3), seed=seeds))
def test_brute_force_is_the_best_of_all_sequences(graph: Graph) -> None:
    count = graph.num_operators
    # peak -> least cost of a sequence; three operators never need more than four recomputations
    found: dict[int, float] = {}

    for length in range(count, count + 5):
        for steps in itertools.product(range(count), repeat=length):
            schedule = Schedule.from_steps(graph, steps)
            if not validate(graph, schedule):
                peak_bytes = max(naive_bytes_at(graph, steps))
                found[peak_bytes] = min(
                    found.get(peak_bytes, np.inf), sum(graph.operators[i].cost_s for i in steps)
                )

    for budget_bytes in found:
        enumerated = min(cost for peak, cost in found.items() if peak <= budget_bytes)
        assert brute_force(graph, budget_bytes) == enumerated
    assert brute_force(graph, min(found) - 1) is None


def test_brute_force_finds_the_known_costs_of_a_chain() -> None:
    graph = chain(3)  # 0 1 2 loss 4 5 6; keep-all holds 0, 1, 2, the loss and a gradient
    assert minimum_bytes(graph) == 4
    assert brute_force(graph, 5) == graph.cost_s
    assert brute_force(graph, 4) == graph.cost_s + 1  # value 0 is dropped and computed again
    assert brute_force(graph, 3) is None


def changed(schedule: Schedule, **fields: object) -> Schedule:
    return replace(schedule, **fields)  # type: ignore[arg-type]


def test_each_rule_is_named_when_broken() -> None:
    graph = chain(4)
    valid = Schedule.keep_all(graph)
    steps = valid.steps
    peak_bytes = simulate(graph, valid).peak_bytes
    assert rules(graph, valid, budget_bytes=peak_bytes) == set()

    assert rules(graph, changed(valid, steps=(*steps, 99))) == {Rule.UNKNOWN_OPERATOR}
    assert rules(graph, changed(valid, steps=steps[:-1])) == {Rule.MISSING_OPERATOR}
    assert Rule.UNCOMPUTED_READ in rules(
        graph, changed(valid, steps=(steps[1], steps[0], *steps[2:]))
    )

    assert rules(graph, changed(valid, num_forward_steps=valid.num_forward_steps - 1)) == {
        Rule.FORWARD_MARK
    }
    assert rules(graph, changed(valid, num_forward_steps=valid.num_forward_steps + 1)) == {
        Rule.FORWARD_MARK
    }

    assert rules(graph, valid, budget_bytes=peak_bytes - 1) == {Rule.BUDGET}


def test_a_broken_order_is_named_unless_the_order_is_free() -> None:
    graph = Graph.from_arrays([1, 1, 1], [1, 1, 1], [(0, 2), (1, 2)])
    swapped = Schedule.from_steps(graph, [1, 0, 2])
    assert rules(graph, swapped) == {Rule.ORDER}
    assert rules(graph, swapped, is_free_order=True) == set()


def test_a_pinned_operator_computed_again_is_named() -> None:
    graph = all_pinned(3)
    assert rules(graph, Schedule.from_steps(graph, [0, 0, *range(1, graph.num_operators)])) == {
        Rule.PINNED
    }


def test_a_recomputation_outside_its_region_is_named() -> None:
    graph = two_regions(3)  # forward 0-2 | forward 3-5, loss 6 | backward 7-10 | backward 11-14
    steps = list(range(graph.num_operators))
    assert rules(graph, Schedule.from_steps(graph, steps)) == set()

    for position, expected in (
        (2, set()),
        (5, {Rule.REGION}),
        (9, {Rule.REGION}),
        (11, {Rule.REGION}),
        (12, set()),
        (14, set()),
    ):
        assert (
            rules(graph, Schedule.from_steps(graph, [*steps[:position], 1, *steps[position:]]))
            == expected
        )


def test_the_simulator_refuses_invalid_schedules() -> None:
    graph = chain(2)
    with pytest.raises(ScheduleError, match="before it was ever computed"):
        simulate(graph, Schedule((1, 0, 2, 3, 4), 3))
    with pytest.raises(ScheduleError, match="outside"):
        simulate(graph, Schedule((0, 9), 1))
    with pytest.raises(ScheduleError, match="never computed"):
        simulate(replace(graph, outputs=(4,)), Schedule((0, 1), 2))
