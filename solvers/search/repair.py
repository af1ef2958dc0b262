"""Makes a schedule over the budget fit, by greedy eviction along its own steps.

Greedy eviction (`greedy_eviction`) starts from the plain order and recomputes what it had to evict:
near the least budget it evicts values that a plan by segments would hold. Here it runs the steps of
a schedule, recomputations included, and evicts only where these do not fit. To do so the schedule
is *unrolled*: each of its steps becomes an operator with values of its own. A schedule of the
unrolled graph is also one of the graph itself if that has one region (the copy drops regions). It
needs no more memory there, as several copies of a value become one.

Complexity: that of `greedy_eviction` on as many operators as the schedule has steps. Source: this
package's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from remat.core.graph import Graph
from remat.core.operators import Operator, Value
from remat.solvers.search.greedy_eviction import Rule, steps_with_eviction

# multiple of the given steps, and of their cost, beyond which repair gives up; round, not measured
_MOST_STEPS = 3.0


def repaired(
    graph: Graph,
    steps: Sequence[int],
    *,
    budget_bytes: int,
    rule: Rule = Rule.LARGE,
    left_s: float = math.inf,
) -> list[int] | None:
    """Returns steps that fit `budget_bytes`, or None where greedy eviction gets stuck.

    Args:
        graph: any graph.
        steps: a valid schedule, within the budget or not.
        budget_bytes: resident bytes included.
        rule: which value is evicted first.
        left_s: see `steps_with_eviction`.
    """
    found = steps_with_eviction(
        unrolled(graph, steps), budget_bytes, rule, max_factor=_MOST_STEPS, left_s=left_s
    )
    return None if found is None else [steps[step] for step in found.tolist()]


def unrolled(graph: Graph, steps: Sequence[int]) -> Graph:
    """Returns a graph with one operator per step, which reads the latest copies of its values.

    Complexity: O(E) of the result.
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
