"""Graphs for the tests of several solvers; `tracers.synthetic` has the other kinds."""

from __future__ import annotations

import random
from dataclasses import replace

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution, Status
from remat.solvers.auto.minimum import minimum
from remat.solvers.checkmate.milp import MILP


def keep_all_bytes(graph: Graph) -> int:
    """The peak of keeping everything."""
    return simulate(graph, Schedule.keep_all(graph)).peak_bytes


def budget_between(graph: Graph, share: float) -> int:
    """The budget at `share` of the way from the least to the peak of keeping everything."""
    floor = minimum(graph).peak_bytes
    return int(floor + share * (keep_all_bytes(graph) - floor))


def optimum(graph: Graph, budget_bytes: int) -> Solution:
    """The optimum of a small graph, proved by the MILP."""
    best = MILP(time_limit_s=20).solve(graph, budget_bytes=budget_bytes)
    assert best.status is Status.OPTIMAL
    return best


def random_training_graph(seed: int, least: int = 4, most: int = 9) -> Graph:
    """A chain forward and back with random skips, sizes and costs: 8 to 18 operators."""
    rng = random.Random(seed)
    length = rng.randint(least, most)
    count = 2 * length

    edges = {(i - 1, i) for i in range(1, count)} | {(i, count - 1 - i) for i in range(length - 1)}
    edges |= {(i - 1, count - 1 - i) for i in range(1, length - 1) if rng.random() < 0.5}
    for _ in range(rng.randint(0, 4)):
        a = rng.randrange(count - 1)
        edges.add((a, rng.randrange(a + 1, count)))

    size = [rng.choice([1, 2, 3, 5, 8, 13]) for _ in range(count)]
    cost = [rng.choice([1, 2, 5, 9, 20]) for _ in range(count)]
    return Graph.from_arrays(cost, size, sorted(edges), first_backward=length)


def with_a_crowded_loss(graph: Graph) -> Graph:
    """Gives the first operator of the backward a workspace of half of what the forward writes."""
    boundary = graph.num_forward
    written = sum(
        graph.values[v].size_bytes for op in graph.operators[:boundary] for v in op.writes
    )
    loss = replace(graph.operators[boundary], workspace_bytes=written // 2)
    return replace(
        graph, operators=(*graph.operators[:boundary], loss, *graph.operators[boundary + 1 :])
    )
