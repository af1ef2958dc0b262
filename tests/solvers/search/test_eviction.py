"""Greedy eviction.

What it must keep so that it does not get stuck, and what it evicts first under a plan.
"""

from __future__ import annotations

import pytest

from remat.core.graph import Graph
from remat.core.operators import Operator, Phase, Value
from remat.core.schedule import Schedule, simulate
from remat.solvers.search.greedy_eviction import Rule, steps_with_eviction

NUM_LAYERS = 12
SIZE = 100


def _with_dropout() -> Graph:
    """Layers, each followed by a dropout that reads a generator's state, and their backward."""
    values: list[Value] = []
    operators: list[Operator] = []

    def add(
        name: str,
        reads: tuple[int, ...],
        size: int = SIZE,
        phase: Phase = Phase.FORWARD,
        pinned: str = "",
    ) -> int:
        values.append(Value(name, size))
        writes = (len(values) - 1,)

        operators.append(
            Operator(
                name,
                0.0 if pinned else 1.0,
                reads,
                writes,
                phase=phase,
                pinned=pinned,
                is_snapshot=bool(pinned),
            )
        )
        return writes[0]

    layers, last = [], add("input", ())
    for k in range(NUM_LAYERS):
        linear = add(f"linear{k}", (last,))
        state = add(f"state{k}", (), 1, pinned="it takes the state of the random generator")
        layers.append((last, linear, last := add(f"dropout{k}", (linear, state))))

    gradient = add("loss", (last,), phase=Phase.BACKWARD)
    for k, (before, linear, after) in reversed(list(enumerate(layers))):
        gradient = add(f"backward{k}", (gradient, before, linear, after), phase=Phase.BACKWARD)
    return Graph(tuple(values), tuple(operators), (gradient,))


@pytest.mark.parametrize("rule", [rule for rule in Rule if rule is not Rule.LOOSE])
def test_a_generators_state_stays_while_its_dropout_may_be_computed_again(rule: Rule) -> None:
    graph = _with_dropout()
    budget = 8 * SIZE + NUM_LAYERS
    steps = steps_with_eviction(graph, budget, rule)

    assert steps is not None
    assert (
        simulate(graph, Schedule.from_steps(graph, steps.tolist())).peak_bytes
        <= budget
        < 2 * NUM_LAYERS * SIZE
    )


def test_values_that_a_plan_drops_are_evicted_first() -> None:
    graph = _with_dropout()
    first = next(i for i, op in enumerate(graph.operators) if op.phase is Phase.BACKWARD)
    planned = {
        next(v for v, value in enumerate(graph.values) if value.name == f"linear{k}")
        for k in (1, 4, 7)
    }

    steps = steps_with_eviction(graph, 14 * SIZE, Rule.CHEAP, kept={first: planned})
    assert steps is not None
    again = {graph.operators[op].writes[0] for op in steps[first:].tolist() if op < first}
    assert again
    assert not planned & again


def test_a_generators_state_is_evicted_after_its_last_use() -> None:
    """What the backward wrote stays, so that nothing before it is computed again."""
    graph = _with_dropout()
    last = len(graph.values) - 1
    values = (*graph.values, Value("last", 1))
    room = 8 * SIZE + NUM_LAYERS

    operators = (
        *graph.operators,
        Operator(
            "large",
            1.0,
            (last,),
            (last + 1,),
            workspace_bytes=room - SIZE - 1,
            phase=Phase.BACKWARD,
        ),
    )
    graph = Graph(values, operators, (last + 1,))

    for rule in (Rule.CHEAP, Rule.FAR, Rule.LARGE, Rule.ENOUGH):
        steps = steps_with_eviction(graph, room, rule)
        assert steps is not None
        assert simulate(graph, Schedule.from_steps(graph, steps.tolist())).peak_bytes <= room


def test_a_large_expensive_value_stays_where_a_small_cheap_one_is_enough() -> None:
    """By bytes per cost the large one would be evicted: 100 bytes for 10 s against 2 for 1 s."""
    large, small, used, peak = range(4)
    values = (Value("large", 100), Value("small", 2), Value("used", 1), Value("peak", 1))
    operators = (
        Operator("large", 10.0, (), (large,)),
        Operator("small", 1.0, (), (small,)),
        Operator("peak", 1.0, (), (peak,), workspace_bytes=10),
        Operator("use", 1.0, (large, small, peak), (used,), phase=Phase.BACKWARD),
    )
    graph = Graph(values, operators, (used,))

    budget = 112  # one byte less than all of them
    costs = {}
    for rule in (Rule.LARGE, Rule.ENOUGH):
        steps = steps_with_eviction(graph, budget, rule)
        assert steps is not None
        costs[rule] = simulate(graph, Schedule.from_steps(graph, steps.tolist())).cost_s
    assert costs == {Rule.LARGE: graph.cost_s + 10.0, Rule.ENOUGH: graph.cost_s + 1.0}
