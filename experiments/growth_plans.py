"""The plans that `depth_growth` compares: cheap operators, Chen's segments, the least budget."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import remat
from experiments.figures import leanest
from remat.core.graph import Graph
from remat.core.operators import Phase
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution
from remat.solvers.auto.minimum import minimum
from remat.solvers.core.on_demand import steps_on_demand

PLANNED = ("drop cheap", "sublinear", "ours, same price", "ours, least")
HALVINGS, LIMIT_S = 5, 10.0  # of the range of budgets, and for each search in it


def crossing_bytes(graph: Graph) -> Any:
    """Returns the bytes that cross each place between two forward operators.

    These are the bytes that later forward operators read from earlier ones.
    """
    change = np.zeros(graph.num_forward + 1, np.int64)
    for value, users in enumerate(graph.users_of):
        last = max(
            (user for user in users if graph.operators[user].phase is Phase.FORWARD), default=-1
        )
        if 0 <= graph.producer[value] < last:
            change[graph.producer[value] + 1] += graph.values[value].size_bytes
            change[last + 1] -= graph.values[value].size_bytes

    return np.cumsum(change)[: graph.num_forward]


def segments(graph: Graph, count: int) -> Solution:
    """Returns Chen's plan with `count` segments.

    When the backward reaches a segment, it recomputes the segment from the values that cross
    the segment's start.
    """
    crossing, length = crossing_bytes(graph), graph.num_forward / count
    kept: set[int] = set()

    for i in range(1, count):
        low, high = (
            int((i - 0.5) * length),
            max(int((i + 0.5) * length), int((i - 0.5) * length) + 1),
        )

        cut = low + int(np.argmin(crossing[low:high]))
        for value, users in enumerate(graph.users_of):
            if graph.producer[value] < cut and any(
                cut <= user < graph.num_forward for user in users
            ):
                kept.add(value)

    schedule = Schedule.from_steps(graph, steps_on_demand(graph, kept))
    return _solution(graph, schedule, f"{count} segments")


def _solution(graph: Graph, schedule: Schedule, name: str) -> Solution:
    peak = simulate(graph, schedule).peak_bytes
    return Solution.of_steps(
        graph, peak, schedule.steps, lower_bound_s=graph.cost_s, solver=name, wall_s=0.0
    )


def sublinear(graph: Graph) -> Solution:
    """Returns the plan with the lowest peak of the three sublinear heuristics."""
    counts = sorted({round(2 ** (i / 2)) for i in range(2, 2 * int(math.log2(graph.num_forward)))})
    answers = [
        *(leanest(method, graph) for method in ("chen-sqrt", "linear-sqrt")),
        *(segments(graph, count) for count in counts),
    ]
    return min(
        (answer for answer in answers if answer.is_solved), key=lambda answer: answer.peak_bytes
    )


def at_the_price_of(other: Solution, graph: Graph, least_bytes: int) -> Solution:
    """Returns the plan of the smallest peak found that costs no more than another plan."""
    found, low, high = other, least_bytes, other.peak_bytes
    for _ in range(HALVINGS):
        budget = (low + high) // 2
        plan = remat.solve(graph, budget, time_limit_s=LIMIT_S)
        if plan.is_solved and plan.overhead <= other.overhead:
            found, high = plan, min(budget, plan.peak_bytes)
        else:
            low = budget
    return found


def plans(graph: Graph) -> dict[str, Solution]:
    """Returns the plan of each way that recomputes."""
    least = _solution(graph, Schedule.from_steps(graph, minimum(graph).steps), "minimum")
    theirs = sublinear(graph)
    ways = (
        leanest("recompute-cheap", graph),
        theirs,
        at_the_price_of(theirs, graph, least.peak_bytes),
        least,
    )
    return dict(zip(PLANNED, ways, strict=True))
