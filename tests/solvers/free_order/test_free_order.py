"""Free order: exact oracles on tiny graphs, its rules, published numbers on large graphs."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.core.graph import Graph
from remat.core.operators import Operator, Phase, Value, ValueKind
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Status
from remat.core.validate import validate
from remat.solvers.auto.minimum import minimum
from remat.solvers.auto.solver import Auto
from remat.solvers.free_order.bound import order_bound_s
from remat.solvers.free_order.rules import order_rules
from remat.solvers.free_order.solver import FreeOrder, FreeSearch, OrderSearch
from remat.solvers.search.annealing import Round
from remat.solvers.search.sequence import SLOT, bytes_held
from remat.solvers.search.timeline import lay_out
from remat.tracers.synthetic import (
    FAMILIES,
    chain,
    random_layered,
    random_step,
    transformer,
    two_regions,
)
from tests.support.checkout import SHARED
from tests.support.graphs import keep_all_bytes
from tests.support.oracles import least_cost

INSTANCES = SHARED / "instances"
QUICK = FreeOrder(gap=0.0, rounds=1)


def firsts(steps: Sequence[int]) -> list[int]:
    return list(dict.fromkeys(steps))


def tiny_graph(seed: int) -> Graph:
    """At most seven operators; with phases, pinned operators and outputs every now and then."""
    random = np.random.default_rng(seed)
    graph = (
        random_layered(3, seed=seed, width=2)
        if seed % 2
        else random_layered(6, seed=seed, width=3, is_training=False)
    )

    operators = tuple(
        replace(op, pinned="at random" if random.random() < 0.2 else "") for op in graph.operators
    )
    outputs = tuple(v for v in range(len(graph.values)) if random.random() < 0.2)
    return replace(graph, operators=operators, outputs=outputs)


def best_in_any_order(graph: Graph, budget_bytes: int) -> float | None:
    """Returns the least cost of any schedule within the budget.

    Searches all states: what was computed, and what is in memory.
    """
    forward = frozenset(i for i, op in enumerate(graph.operators) if op.phase is Phase.FORWARD)
    return least_cost(
        (frozenset[int](), frozenset[int]()),
        lambda state: _moves(graph, budget_bytes, forward, *state),
        lambda state: len(state[0]) == graph.num_operators and set(graph.outputs) <= state[1],
    )


def _moves(
    graph: Graph,
    budget_bytes: int,
    forward: frozenset[int],
    done: frozenset[int],
    memory: frozenset[int],
) -> Iterator[tuple[tuple[frozenset[int], frozenset[int]], float]]:
    for value in memory:
        yield (done, memory - {value}), 0.0

    for index, op in enumerate(graph.operators):
        if (
            (index in done and op.pinned)
            or not set(op.reads) <= memory
            or (op.phase is Phase.BACKWARD and not forward <= done)
        ):
            continue

        after = memory | set(op.writes)
        if op.workspace_bytes + sum(graph.values[v].size_bytes for v in after) <= budget_bytes:
            yield (done | {index}, after), op.cost_s


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), share=st.floats(0.3, 1.0))
def test_bound_optimum_and_answer_are_in_order(seed: int, share: float) -> None:
    graph = tiny_graph(seed)
    budget = int(share * keep_all_bytes(graph))
    best, bound_s = best_in_any_order(graph, budget), order_bound_s(graph, budget, time_limit_s=5.0)
    assert bound_s <= (math.inf if best is None else best * (1 + 1e-9))

    solution = QUICK.solve(graph, budget_bytes=budget)
    if best is None:
        assert not solution.is_solved
    else:
        assert solution.status is not Status.INFEASIBLE
        assert not solution.is_solved or solution.cost_s >= best * (1 - 1e-9)
        assert solution.status is not Status.OPTIMAL or solution.cost_s == pytest.approx(best)


def test_the_optimum_is_found_on_tiny_graphs() -> None:
    found = asked = 0
    for seed in range(60):
        graph = replace(
            tiny_graph(seed),
            operators=tuple(replace(op, pinned="") for op in tiny_graph(seed).operators),
        )

        for share in (0.6, 0.75, 0.9):
            budget = int(share * keep_all_bytes(graph))
            best, solution = (
                best_in_any_order(graph, budget),
                QUICK.solve(graph, budget_bytes=budget),
            )
            asked += best is not None
            found += (
                best is not None and solution.is_solved and solution.cost_s <= best * (1 + 1e-9)
            )

    assert asked > 30
    assert found == asked


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    num_operators=st.integers(2, 16),
    order_chance=st.sampled_from([0.3, 1.0]),
)
def test_the_sequence_agrees_with_simulator_and_rules_after_any_walk(
    seed: int, num_operators: int, order_chance: float
) -> None:
    graph = (
        random_step(num_operators, seed=seed) if seed % 3 else two_regions(1 + num_operators // 6)
    )
    budget = int(0.7 * keep_all_bytes(graph))

    order = OrderSearch(graph, budget_bytes=budget, seed=seed, order_chance=order_chance)
    search = FreeSearch(graph, budget_bytes=budget, gap=0.0, time_limit_s=60.0)
    search.raise_bound(-1.0)
    steps = order.run(np.arange(graph.num_operators), Round(300, 1e-1, 1e-2), search)

    schedule = Schedule.from_steps(graph, steps.tolist())
    assert validate(graph, schedule, is_free_order=True) == []
    assert_keeps_rules(graph, steps.tolist())

    state = lay_out(order.local.state, steps)
    held = bytes_held(state.slots)[
        (state.slots[SLOT] >= 0) & (state.slots[SLOT] < graph.num_operators)
    ]
    assert (held + graph.resident_bytes == simulate(graph, schedule).bytes_at).all()


def assert_keeps_rules(graph: Graph, steps: Sequence[int]) -> None:
    rules, place = order_rules(graph), {op: float(i) for i, op in enumerate(firsts(steps))}
    place[graph.num_operators] = max(
        (place[i] + 0.5 for i, op in enumerate(graph.operators) if op.phase is Phase.FORWARD),
        default=-1.0,
    )

    for op in range(graph.num_operators):
        for other in rules.earlier[rules.earlier_start[op] : rules.earlier_start[op + 1]]:
            assert place[int(other)] < place[op]


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"transformer_without_names"}))
def test_every_family_is_answered_within_the_rules(family: str) -> None:
    graph = FAMILIES[family]()
    budget = int(0.75 * keep_all_bytes(graph))
    solution = FreeOrder(rounds=2, time_limit_s=10.0).solve(graph, budget_bytes=budget)
    if minimum(graph).peak_bytes <= budget:  # the graph's own order fits
        assert solution.is_solved
    if solution.schedule is not None:
        assert validate(graph, solution.schedule, budget_bytes=budget, is_free_order=True) == []
        assert_keeps_rules(graph, solution.schedule.steps)
        assert solution.is_free_order


def test_rules_hold_for_the_graphs_own_order_and_agree_both_ways() -> None:
    for graph in (transformer(2), two_regions(4), random_step(30, seed=1)):
        rules = order_rules(graph)
        of = np.repeat(np.arange(len(rules.is_fixed)), np.diff(rules.earlier_start))
        back = np.repeat(np.arange(len(rules.is_fixed)), np.diff(rules.later_start))

        assert (rules.earlier < of)[rules.earlier < graph.num_operators].all()
        assert set(zip(rules.earlier.tolist(), of.tolist(), strict=True)) == set(
            zip(back.tolist(), rules.later.tolist(), strict=True)
        )


def effects_graph() -> Graph:
    """A buffer that is read, copied and then changed.

    Two random operators, each with its generator's state.
    """
    values = (
        Value("buffer", 8, ValueKind.BUFFER),
        *(
            Value(name, 8)
            for name in ("copy", "read", "state_0", "drop_0", "state_1", "drop_1", "sum")
        ),
    )

    pinned = "for the test"
    operators = (
        Operator("copy", 0.0, (0,), (1,), pinned=pinned, is_snapshot=True),
        Operator("read", 1.0, (1,), (2,)),
        Operator("state_0", 0.0, (), (3,), pinned=pinned, is_snapshot=True),
        Operator("drop_0", 1.0, (2, 3), (4,)),
        Operator("state_1", 0.0, (), (5,), pinned=pinned, is_snapshot=True),
        Operator("drop_1", 1.0, (5,), (6,)),
        Operator("change", 1.0, (0, 4), (), pinned=pinned),
        Operator("sum", 1.0, (4, 6), (7,)),
    )
    return Graph(values, operators, outputs=(7,))


def test_effects_keep_their_order_and_readers_stay_before_a_change() -> None:
    graph = effects_graph()
    rules = order_rules(graph)

    def before(name: str) -> set[str]:
        index = [op.name for op in graph.operators].index(name)
        return {
            graph.operators[i].name
            for i in rules.earlier[rules.earlier_start[index] : rules.earlier_start[index + 1]]
        }

    assert "drop_0" in before("state_1")
    assert "state_1" in before("drop_1")
    assert {"copy", "read", "drop_0"} <= before("change")
    assert before("sum") == {"drop_0", "drop_1"}


def test_the_parts_of_a_step_stay_in_order() -> None:
    graph = two_regions(4)
    budget = int(0.6 * keep_all_bytes(graph))
    solution = QUICK.solve(graph, budget_bytes=budget)
    assert solution.schedule is not None

    parts = [
        (graph.operators[i].region, graph.operators[i].phase)
        for i in firsts(solution.schedule.steps)
    ]
    assert len(list(itertools.groupby(parts))) == len(
        list(itertools.groupby((op.region, op.phase) for op in graph.operators))
    )


@pytest.mark.parametrize(
    ("name", "label", "percent", "seconds"),
    [  # FastSA's published overhead and time
        ("random_layered_100", "90%", 0.0, 11.7),
        ("random_layered_100", "80%", 0.3, 11.5),
        ("random_layered_500", "90%", 0.03, 21.0),
        ("random_layered_500", "80%", 2.3, 20.9),
    ],
)
def test_published_costs_are_reached_in_the_published_time(
    name: str, label: str, percent: float, seconds: float
) -> None:
    path = INSTANCES / f"{name}.json"
    if not path.exists():
        pytest.skip(f"the published instance {path} is missing")

    data = json.loads(path.read_text())
    graph = Graph.from_arrays(data["cost"], data["size"], data["edges"])

    # compiles once per machine, before time is measured
    FreeOrder(gap=0.0, rounds=1).solve(random_layered(8, seed=0), budget_bytes=1)
    OrderSearch(graph, budget_bytes=1, seed=0, order_chance=1.0).run(
        np.arange(graph.num_operators),
        Round(1, 1.0, 1.0),
        FreeSearch(graph, budget_bytes=1, gap=0.0, time_limit_s=60.0),
    )

    solution = FreeOrder(gap=percent / 100, time_limit_s=seconds, rounds=1).solve(
        graph, budget_bytes=data["budgets"][label]
    )

    assert solution.schedule is not None
    assert (
        validate(graph, solution.schedule, budget_bytes=data["budgets"][label], is_free_order=True)
        == []
    )
    assert 100 * solution.overhead <= percent
    assert solution.wall_s <= seconds


def test_keeping_everything_is_optimal_and_an_impossible_budget_is_proved() -> None:
    graph = chain(8)
    assert QUICK.solve(graph, budget_bytes=keep_all_bytes(graph)).status is Status.OPTIMAL
    assert QUICK.solve(graph, budget_bytes=2).status is Status.INFEASIBLE


def test_the_graphs_order_is_never_better() -> None:
    for graph in (transformer(2), random_layered(24, seed=5)):
        budget = int(0.75 * keep_all_bytes(graph))
        fixed = Auto(gap=0.0, rounds=1, time_limit_s=1.0).solve(graph, budget_bytes=budget)
        free = FreeOrder(gap=0.0, rounds=3, time_limit_s=10.0).solve(graph, budget_bytes=budget)

        assert fixed.is_solved
        assert free.is_solved
        assert free.cost_s <= fixed.cost_s * (1 + 1e-3)
        assert free.lower_bound_s <= fixed.cost_s * (1 + 1e-9)


def test_a_seed_gives_one_answer() -> None:
    graph = random_layered(30, seed=4, is_training=False)
    budget = int(0.7 * keep_all_bytes(graph))
    one, two = (
        FreeOrder(gap=0.0, rounds=1, seed=7).solve(graph, budget_bytes=budget) for _ in range(2)
    )
    assert one.is_solved
    assert one.cost_s > graph.cost_s
    assert one.schedule == two.schedule
