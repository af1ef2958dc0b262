"""Two-level checkpoints: few over the forward's end, more where the backward is running.

Other names: recursive, multi-level or divide-and-conquer checkpointing.
Papers: T. Chen et al., "Training deep nets with sublinear memory cost", 2016, arXiv:1604.06174,
section 4.3; J. M. Siskind, B. A. Pearlmutter, "Divide-and-conquer checkpointing for arbitrary
programs with no user annotation", 2018.
Optimal: never proved; on a chain of equal segments binomial checkpointing (`revolve`) is.
Complexity: O(E) per schedule; there are some 40.
Imperfections: two levels only; ignores costs. Helps where one operator, such as the loss, leaves
room for few checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from remat.core.graph import Graph
from remat.solvers.baselines.chen import stage_ends
from remat.solvers.baselines.segment_family import Family, borders_by_size
from remat.solvers.core.accounting import Ints
from remat.solvers.core.on_demand import forward_length, steps_on_demand, values_always_kept

# measured together on traced steps (BERT, ResNet-50) at their least budgets
_SIZES = 8  # segment sizes tried, from half of the forward down to single stages
_MOST_SEGMENTS = 64  # the smallest size is no less than a 64th of the forward's bytes


@final
@dataclass(frozen=True)
class Nested(Family):
    """Two-level segments that end at Chen's stages.

    Several segment sizes are tried, each with no outer borders and with 1, 2, 4, ... of them.
    """

    def members(self, graph: Graph) -> Iterator[list[int]]:
        """Yields a schedule for each segment size and number of outer borders.

        Raises:
            SolverError: the forward is not a sequence of stages.
        """
        candidates = stage_ends(graph)
        ends = _ends_in_backward(graph)
        divisors = np.geomspace(2, max(3, min(len(candidates), _MOST_SEGMENTS)), _SIZES)
        for inner in borders_by_size(graph, candidates, divisors.tolist()):
            for count in (0, *(2**k for k in range(len(inner).bit_length()) if 2**k < len(inner))):
                outer = [inner[(j + 1) * len(inner) // (count + 1)] for j in range(count)]
                yield nested_steps(graph, inner, outer, ends)


def nested_steps(graph: Graph, inner: Sequence[int], outer: Sequence[int], ends: Ints) -> list[int]:
    """Returns the steps of the schedule with these two levels of borders.

    What outer borders write is kept over the forward's end. When the backward reaches the part
    between two outer borders, what the inner borders there write is recomputed and kept.

    Args:
        graph: any graph.
        inner: forward operators, in order.
        outer: some of them.
        ends: see `_ends_in_backward`.
    """
    boundary = forward_length(graph)
    gradients = {v for v, producer in enumerate(graph.producer) if producer >= boundary}
    later: dict[int, set[int]] = {}

    # one segment at a time, each ends with a border
    for begin, end in zip([-1, *inner], [*inner, boundary - 1], strict=True):
        run = max((border for border in outer if border <= begin), default=-1)
        held = [border for border in inner if border <= end and (border > run or border in outer)]
        later[int(ends[end])] = gradients.union(
            *(graph.operators[border].writes for border in held)
        )

    kept = {v for border in outer for v in graph.operators[border].writes}
    return steps_on_demand(
        graph, kept, later={v: held for v, held in later.items() if v > boundary}
    )


def _ends_in_backward(graph: Graph) -> Ints:
    """Returns, by forward operator, where the backward stops reading the values after it.

    No forward value written after the operator is read from there on. Complexity: O(E).
    """
    boundary, always, producer = forward_length(graph), values_always_kept(graph), graph.producer
    last = np.full(boundary + 1, boundary - 1, np.int64)  # last reader of what an operator writes
    for index in range(boundary, graph.num_operators):
        for value in graph.operators[index].reads:
            if 0 <= producer[value] < boundary and value not in always:
                last[producer[value]] = index
    behind = np.maximum.accumulate(last[::-1])[::-1] + 1
    return np.asarray(behind[1:], np.int64)
