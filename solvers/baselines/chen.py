"""Segments of a sequential network: sublinear memory cost.

Other names: Chen et al.'s sqrt(n) and greedy, gradient checkpointing, `checkpoint_sequential`.
Papers: T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training deep nets with sublinear memory cost",
2016, arXiv:1604.06174, section 4 and algorithm 3.
Optimal: never proved for this model; on a uniform chain sqrt(n) segments give a peak of O(sqrt n)
for at most one extra forward.
Complexity: O(E) per schedule; greedy simulates about a hundred of them.
Imperfections: needs a forward that is a sequence of stages, each ending in one operator on whose
output alone the rest depends; ignores costs; sqrt(n) also ignores sizes and the budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np

from remat.core.errors import SolverError
from remat.core.graph import Graph
from remat.solvers.baselines.segment_family import (
    Family,
    forward_operators,
    greedy_members,
    sqrt_members,
)
from remat.solvers.core.on_demand import forward_length, values_always_kept


@final
@dataclass(frozen=True)
class ChenSqrt(Family):
    """About sqrt(n) segments with equally many of the n possible borders in each."""

    def members(self, graph: Graph) -> Iterator[list[int]]:
        """Yields the segmentation's schedules.

        Raises:
            SolverError: the forward is not a sequence of stages.
        """
        return sqrt_members(graph, stage_ends(graph))


@final
@dataclass(frozen=True)
class ChenGreedy(Family):
    """Segments of limited bytes; of all the limits tried, the cheapest schedule that fits."""

    def members(self, graph: Graph) -> Iterator[list[int]]:
        """Yields the schedules for each segment size.

        Raises:
            SolverError: the forward is not a sequence of stages.
        """
        return greedy_members(graph, stage_ends(graph))


def stage_ends(graph: Graph) -> list[int]:
    """Returns the operators that end a stage.

    After such an operator, the forward reads none of the droppable values written so far, except
    those that the operator itself wrote.
    """
    boundary = forward_length(graph)
    always_kept = values_always_kept(graph)

    # droppable values alive after each forward operator
    num_crossing = np.zeros(boundary + 1, np.int64)
    num_own = np.zeros(boundary, np.int64)  # of these, the ones that the operator itself wrote

    for value, (producer, users) in enumerate(zip(graph.producer, graph.users_of, strict=True)):
        last_use = max((u for u in users if u < boundary), default=-1)
        if value not in always_kept and last_use > producer:
            num_crossing[producer] += 1
            num_crossing[last_use] -= 1
            num_own[producer] += 1

    is_end = (num_own > 0) & (num_own == np.cumsum(num_crossing)[:-1])
    ends = [i for i in forward_operators(graph) if is_end[i]]
    if not ends:
        raise SolverError(
            "Chen's segments need a forward that is a sequence of stages, but this graph has no "
            "operator whose output alone feeds the rest of the forward. "
            'Use "linear-sqrt" or "linear-greedy", which cut any order, or "auto"'
        )

    return ends
