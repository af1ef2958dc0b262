"""Segments of the execution order, as if the graph were a chain.

Other names: linearized sqrt(n), linearized greedy.
Papers: P. Jain et al., "Checkmate", MLSys 2020, arXiv:1910.02653, section 5 and appendix B.2.
Optimal: never proved; on a chain it is Chen's method.
Complexity: O(E) per schedule; greedy simulates about a hundred.
Imperfections: a border keeps what its own operator writes and nothing that skips over it, so a
value carried by a long skip connection needs its ancestors recomputed; ignores costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from remat.core.graph import Graph
from remat.solvers.baselines.segment_family import (
    Family,
    forward_operators,
    greedy_members,
    sqrt_members,
)


@final
@dataclass(frozen=True)
class LinearizedSqrt(Family):
    """About sqrt(n) segments of equally many of the n forward operators."""

    def members(self, graph: Graph) -> Iterator[list[int]]:
        """Yields the segmentation's schedules."""
        return sqrt_members(graph, forward_operators(graph))


@final
@dataclass(frozen=True)
class LinearizedGreedy(Family):
    """Segments of the execution order with limited bytes; the cheapest limit that fits."""

    def members(self, graph: Graph) -> Iterator[list[int]]:
        """Yields the schedules for each segment size."""
        return greedy_members(graph, forward_operators(graph))
