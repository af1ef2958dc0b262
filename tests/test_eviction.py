"""Greedy eviction: what it must hold on to so that it does not get stuck, and what a plan makes it let go first."""

from __future__ import annotations

import pytest

from remat.graph import Graph, Operator, Phase, Value
from remat.schedule import Schedule, simulate
from remat.solvers.eviction import Rule, steps_with_eviction

NUM_LAYERS = 12
SIZE = 100


def _with_dropout() -> Graph:
    """A chain of layers, each followed by a dropout that reads the state of a random generator, and its backward."""
    values: list[Value] = []
    operators: list[Operator] = []

    def add(name: str, reads: tuple[int, ...], size: int = SIZE, phase: Phase = Phase.FORWARD, pinned: str = "") -> int:
        values.append(Value(name, size))
        writes = (len(values) - 1,)
        operators.append(Operator(name, 0.0 if pinned else 1.0, reads, writes, phase=phase, pinned=pinned, is_snapshot=bool(pinned)))
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
    assert simulate(graph, Schedule.from_steps(graph, steps.tolist())).peak_bytes <= budget < 2 * NUM_LAYERS * SIZE


def test_what_a_plan_drops_goes_before_what_it_keeps() -> None:
    graph = _with_dropout()
    first = next(i for i, op in enumerate(graph.operators) if op.phase is Phase.BACKWARD)
    planned = {next(v for v, value in enumerate(graph.values) if value.name == f"linear{k}") for k in (1, 4, 7)}
    steps = steps_with_eviction(graph, 14 * SIZE, Rule.CHEAP, kept={first: planned})
    assert steps is not None
    again = {graph.operators[op].writes[0] for op in steps[first:].tolist() if op < first}
    assert again
    assert not planned & again
