"""Segments that end at articulation points: Chen's methods for graphs with residual branches.

Other names: AP sqrt(n), AP greedy.
Papers: P. Jain et al., "Checkmate: breaking the memory wall with optimal tensor rematerialization",
MLSys 2020, arXiv:1910.02653, section 5 and appendix B.2; articulation points by R. Tarjan, 1972.
Optimal: never proved; on a chain it is Chen's method.
Complexity: O(E) for the points and for each schedule; greedy simulates about a hundred.
Imperfections: a graph without articulation points (one long skip connection is enough) is one
segment, kept or recomputed as a whole; ignores costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from remat.core.graph import Graph
from remat.solvers.baselines.segment_family import (
    Family,
    forward_operators,
    greedy_members,
    sqrt_members,
)
from remat.solvers.core.on_demand import forward_length


@final
@dataclass(frozen=True)
class ArticulationSqrt(Family):
    """About sqrt(n) segments with equally many of the n articulation points in each."""

    def members(self, graph: Graph) -> Iterator[list[int]]:
        """Yields the segmentation's schedules."""
        return sqrt_members(graph, _candidates(graph))


@final
@dataclass(frozen=True)
class ArticulationGreedy(Family):
    """Segments of limited bytes that end at articulation points; the cheapest limit that fits."""

    def members(self, graph: Graph) -> Iterator[list[int]]:
        """Yields the schedules for each segment size."""
        return greedy_members(graph, _candidates(graph))


def _candidates(graph: Graph) -> list[int]:
    points = articulation_points(_forward_neighbours(graph))
    return [i for i in forward_operators(graph) if i in points]


def _forward_neighbours(graph: Graph) -> list[list[int]]:
    boundary = forward_length(graph)
    neighbours: list[list[int]] = [[] for _ in range(boundary)]
    for index in range(boundary):
        for parent in graph.parents_of[index]:
            neighbours[index].append(parent)
            neighbours[parent].append(index)
    return neighbours


def articulation_points(neighbours: Sequence[Sequence[int]]) -> set[int]:
    """Returns the articulation points of an undirected graph: nodes whose removal disconnects it.

    Tarjan's depth-first search without recursion; O(nodes + edges).

    >>> articulation_points([[1], [0, 2], [1]])
    {1}
    """
    order = [-1] * len(neighbours)  # when a node was discovered
    low = [0] * len(neighbours)  # the earliest node that its subtree reaches by one back edge
    points: set[int] = set()
    clock = 0

    for root in range(len(neighbours)):
        if order[root] >= 0:
            continue

        order[root] = low[root] = clock
        clock += 1
        num_subtrees = 0
        stack: list[tuple[int, int, Iterator[int]]] = [(root, -1, iter(neighbours[root]))]

        while stack:
            node, parent, rest = stack[-1]
            following = next(rest, None)

            if following is None:
                stack.pop()
                if parent >= 0:
                    low[parent] = min(low[parent], low[node])
                    if parent != root and low[node] >= order[parent]:
                        points.add(parent)
            elif order[following] < 0:
                num_subtrees += node == root
                order[following] = low[following] = clock
                clock += 1
                stack.append((following, node, iter(neighbours[following])))
            elif following != parent:
                low[node] = min(low[node], order[following])

        if num_subtrees > 1:
            points.add(root)

    return points
