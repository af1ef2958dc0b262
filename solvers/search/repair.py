"""Repair: a schedule over the budget, made to fit by greedy eviction along its own steps.

The greedy of `greedy_eviction` runs every operator once and computes again what it had to forget:
near the least budget it forgets what a plan for segments would hold. Here it runs the steps of a
schedule, recomputations and all, and forgets only where these do not fit: the schedule is
*unrolled*, each of its steps an operator of its own that writes values of its own, and the greedy's
schedule of that graph is one of the graph itself. That needs no more memory there, where two
computations of a value are one.

Complexity: that of `greedy_eviction` on as many operators as the schedule has steps. Source: this
package's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from remat.core.graph import Graph, Operator, Value
from remat.solvers.search.greedy_eviction import Rule, steps_with_eviction

_MOST_STEPS = 3.0  # times those given


def repaired(
    graph: Graph,
    steps: Sequence[int],
    *,
    budget_bytes: int,
    rule: Rule = Rule.LARGE,
    left_s: float = math.inf,
) -> list[int] | None:
    """Returns steps that fit `budget_bytes`, or None where the greedy gets stuck.

    Args:
        graph: any graph.
        steps: a valid schedule, within the budget or not.
        budget_bytes: resident bytes included.
        rule: which value goes first.
        left_s: see `steps_with_eviction`.
    """
    found = steps_with_eviction(
        unrolled(graph, steps), budget_bytes, rule, max_factor=_MOST_STEPS, left_s=left_s
    )
    return None if found is None else [steps[step] for step in found.tolist()]


def unrolled(graph: Graph, steps: Sequence[int]) -> Graph:
    """Returns the graph that has each step as an operator, which reads what was computed last of
    each value; O(E of the steps).
    """
    values: list[Value] = [value for value in graph.values if value.is_resident]
    latest = [-1] * len(graph.values)
    for index, value in enumerate(i for i, value in enumerate(graph.values) if value.is_resident):
        latest[value] = index
    operators = []
    for position, step in enumerate(steps):
        op = graph.operators[step]
        reads, reuses = tuple(latest[v] for v in op.reads), tuple(latest[v] for v in op.reuses)
        for value in op.writes:
            latest[value] = len(values)
            values.append(graph.values[value])
        writes = tuple(latest[v] for v in op.writes)
        operators.append(
            Operator(
                name=str(position),
                cost_s=op.cost_s,
                reads=reads,
                writes=writes,
                workspace_bytes=op.workspace_bytes,
                phase=op.phase,
                pinned=op.pinned,
                reuses=reuses,
                is_snapshot=op.is_snapshot,
            )
        )
    return Graph(tuple(values), tuple(operators), tuple(latest[v] for v in graph.outputs))
