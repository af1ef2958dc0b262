"""The memory of a schedule as blocks with lifetimes, and their placement in one arena.

Other names: static memory planning, dynamic storage allocation, offset assignment.
Papers: Y. Pisarchyk and J. Lee, 2020, "Efficient memory management for deep neural net inference",
arXiv:2001.03288 (greedy by size); M. R. Garey and D. S. Johnson, 1979, problem SR2: finding the
smallest arena is NP-hard. The most memory that is live at once is a lower bound on the size of any
arena; what an arena has beyond that is fragmentation.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from remat.core.graph import Graph
from remat.core.schedule import Schedule, effective_sizes, lifetimes

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Blocks:
    """Blocks of memory and when they are in use; arrays of shape (num_blocks,).

    Each step s consists of two half steps, 2 s and 2 s + 1. The output of an operator that works in
    place continues the block of the input whose memory it takes over.

    Attributes:
        first, last: the first and last half step of each block.
        size_bytes: the size of each block.
        value: the first value in each block; -1 for a workspace.
    """

    first: Ints
    last: Ints
    size_bytes: Ints
    value: Ints

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule, *, in_place: bool = True) -> Blocks:
        """Returns the blocks of a schedule, without resident values.

        O(E log S) for E reads and S steps.

        Args:
            graph: the step.
            schedule: the order in which it is computed.
            in_place: whether operators take over the memory of inputs as `Operator.reuses` allows.
        """
        steps = schedule.array
        value, first, last = lifetimes(graph, steps)
        size = effective_sizes(graph.arrays, steps)[value]
        first, last = 2 * first, 2 * np.minimum(last, max(0, len(steps) - 1)) + 1

        workspace = graph.arrays.workspace_bytes[steps]
        if in_place:
            first, last, size = _continued(graph, schedule, value, first, last, size)

        where = np.flatnonzero(workspace)
        columns = [
            np.append(first, 2 * where),
            np.append(last, 2 * where + 1),
            np.append(size, workspace[where]),
            np.append(value, np.full(len(where), -1)),
        ]

        return cls(*(column[columns[2] > 0] for column in columns))

    @cached_property
    def live_bytes(self) -> int:
        """The most memory in use at once, a lower bound on the size of any arena."""
        if not len(self.first):
            return 0
        end = int(self.last.max()) + 2
        size = self.size_bytes.astype(np.float64)  # exact below 2**53 bytes
        change = np.bincount(self.first, size, end) - np.bincount(self.last + 1, size, end)
        return int(np.cumsum(change).max())

    def arena_bytes(self, offset: Ints) -> int:
        """Returns the size of the arena for a placement (an offset per block)."""
        return int((offset + self.size_bytes).max(initial=0))


def _continued(
    graph: Graph, schedule: Schedule, value: Ints, first: Ints, last: Ints, size: Ints
) -> tuple[Ints, Ints, Ints]:
    """Returns first, last and size after outputs have taken over the memory of inputs.

    An output continues the block of the input, and has size 0 itself. If their sizes differ, the
    input's block ends before the step instead.
    """
    first, last, size = first.copy(), last.copy(), size.copy()
    dying = {(int(v), int(end)): i for i, (v, end) in enumerate(zip(value, last, strict=True))}
    born = {(int(v), int(begin)): i for i, (v, begin) in enumerate(zip(value, first, strict=True))}
    head = np.arange(len(value))

    for step, index in enumerate(schedule.steps):
        op = graph.operators[index]
        ends = [dying[v, 2 * step + 1] for v in op.reuses if (v, 2 * step + 1) in dying]
        if not ends:
            continue

        taken = max(ends, key=lambda i: size[i])
        begun = born[op.writes[0], 2 * step]
        block = head[taken]
        if size[block] == size[begun] and size[taken] == size[block]:
            head[begun], last[block], size[begun] = block, last[begun], 0
        else:
            last[block] = 2 * step - 1

    return first, last, size


def best_fit(blocks: Blocks, order: Ints) -> Ints:
    """Returns an offset for each block.

    In the given order, each block takes the smallest gap that is free during its whole lifetime.

    Complexity: O(n² log n) for n blocks.
    """
    offset = np.full(len(blocks.first), -1)
    for block in order.tolist():
        beside = (
            (offset >= 0)
            & (blocks.first <= blocks.last[block])
            & (blocks.last >= blocks.first[block])
        )
        offset[block] = _smallest_gap(
            offset[beside], blocks.size_bytes[beside], int(blocks.size_bytes[block])
        )

    return offset


def _smallest_gap(offset: Ints, size: Ints, needed: int) -> int:
    if not len(offset):
        return 0

    order = np.argsort(offset)
    begin = offset[order]
    covered = np.maximum.accumulate(begin + size[order])

    gap_begin = np.append(0, covered)
    gap = np.append(begin, np.iinfo(np.int64).max) - gap_begin
    fitting = np.flatnonzero(gap >= needed)
    return int(gap_begin[fitting[np.argmin(gap[fitting])]])


def in_time_order(blocks: Blocks) -> Ints:
    """Returns the placement of a best-fit allocator that gets the blocks in order of time."""
    return best_fit(blocks, np.lexsort((-blocks.size_bytes, blocks.first)))


def greedy_by_size(blocks: Blocks) -> Ints:
    """Returns the placement of large blocks first (Pisarchyk and Lee, 2020, algorithm 3).

    Blocks of equal size are placed in order of time.
    """
    return best_fit(blocks, np.lexsort((blocks.first, -blocks.size_bytes)))


def search(blocks: Blocks, *, time_limit_s: float = 10.0, seed: int = 0) -> Ints:
    """Returns the best placement that several orders and a local search on the order find.

    A move places a block that reaches the top of the arena earlier, along with up to three blocks
    that are live at the same time. It is kept if the arena does not grow. The search stops at the
    time limit, or once the arena is as small as the live bytes.
    """
    deadline, random = time.monotonic() + time_limit_s, np.random.default_rng(seed)
    size, life = (
        blocks.size_bytes.astype(np.float64),
        (blocks.last - blocks.first + 1).astype(np.float64),
    )

    starts = [
        np.argsort(-key, kind="stable") for key in (size, size * life, life, size * np.sqrt(life))
    ]
    best, best_bytes, order = np.zeros(len(size), np.int64), math.inf, starts[0]

    for start in starts:
        offset = best_fit(blocks, start)
        if blocks.arena_bytes(offset) < best_bytes:
            best, best_bytes, order = offset, blocks.arena_bytes(offset), start

    current = best
    while best_bytes > blocks.live_bytes and time.monotonic() < deadline:
        changed = _with_top_earlier(blocks, current, order, random)
        offset = best_fit(blocks, changed)
        if blocks.arena_bytes(offset) <= blocks.arena_bytes(current):
            current, order = offset, changed
            if blocks.arena_bytes(offset) < best_bytes:
                best, best_bytes = offset, blocks.arena_bytes(offset)

    return best


def _with_top_earlier(
    blocks: Blocks, offset: Ints, order: Ints, random: np.random.Generator
) -> Ints:
    top = offset + blocks.size_bytes
    highest = random.choice(np.flatnonzero(top == top.max()))

    beside = np.flatnonzero(
        (blocks.first <= blocks.last[highest]) & (blocks.last >= blocks.first[highest])
    )
    moved = {
        int(highest),
        *random.choice(
            beside, min(len(beside), int(random.integers(1, 4))), replace=False
        ).tolist(),
    }

    rank = np.empty(len(order), np.float64)
    rank[order] = np.arange(len(order))
    for block in moved:
        rank[block] = random.uniform(-1.0, rank[block])

    return np.argsort(rank, kind="stable")
