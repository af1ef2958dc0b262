"""Common code of the heuristics: cut the forward into segments, choose the cheapest that fits.

A *segment* is a run of forward operators between two *borders*. The values that border operators
write are kept over the forward's end; the inside of a segment is recomputed when the backward
reaches it.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.solution import SearchRecord, Solution, Status
from remat.solvers.core.base import Solver
from remat.solvers.core.on_demand import forward_length, steps_on_demand

# segment sizes that the greedy methods try; with more, the schedules hardly differ; by how much,
# and on which graphs, is not on record
_NUM_LIMITS = 48


@dataclass(frozen=True)
class Family(Solver):
    """A method with a few schedules per graph, the same for every budget.

    Its answer is the cheapest that fits.
    """

    @abstractmethod
    def members(self, graph: Graph) -> Iterable[Sequence[int]]:
        """Returns the steps of each schedule.

        Raises:
            SolverError: the method does not apply to graphs of this kind.
        """

    def solve(self, graph: Graph, *, budget_bytes: int) -> Solution:
        """Returns the cheapest schedule of the family that fits, `NO_SOLUTION` where none does.

        Raises:
            SolverError: the method does not apply to graphs of this kind.
        """
        return cheapest_that_fits(graph, budget_bytes, self.members(graph), solver=repr(self))


def cheapest_that_fits(
    graph: Graph, budget_bytes: int, members: Iterable[Sequence[int]], *, solver: str
) -> Solution:
    """Returns the cheapest of some schedules within the budget; on ties, the lowest peak wins.

    Args:
        graph: the graph the schedules belong to.
        budget_bytes: resident bytes included.
        members: steps of valid schedules; the time to generate them is counted.
        solver: the configuration to report.

    Where none fits the status is `NO_SOLUTION`; either way `minimum_bytes` is the lowest peak. The
    bound is the trivial one: the cost of computing everything once.
    """
    started = time.perf_counter()
    best: tuple[float, int, Sequence[int]] | None = None
    lowest: int | None = None

    for steps in members:
        simulation = simulate(graph, Schedule.from_steps(graph, list(steps)))
        lowest = simulation.peak_bytes if lowest is None else min(lowest, simulation.peak_bytes)
        if simulation.peak_bytes <= budget_bytes and (
            best is None or (simulation.cost_s, simulation.peak_bytes) < best[:2]
        ):
            best = (simulation.cost_s, simulation.peak_bytes, steps)

    wall_s = time.perf_counter() - started
    record = SearchRecord(minimum_bytes=lowest or 0)

    if best is None:
        return Solution.without_schedule(
            graph,
            budget_bytes,
            Status.NO_SOLUTION,
            solver=solver,
            wall_s=wall_s,
            lower_bound_s=graph.cost_s,
            record=record,
        )

    return Solution.of_steps(
        graph,
        budget_bytes,
        best[2],
        lower_bound_s=graph.cost_s,
        solver=solver,
        wall_s=wall_s,
        record=record,
    )


def forward_operators(graph: Graph) -> list[int]:
    """Returns the forward operators whose values can be dropped, in order: border candidates."""
    return [
        i
        for i, op in enumerate(graph.operators[: forward_length(graph)])
        if op.is_recomputable and not op.is_snapshot and op.writes
    ]


def sqrt_borders(candidates: Sequence[int]) -> list[int]:
    """Returns borders that cut the n `candidates` into about sqrt(n) equal segments.

    >>> sqrt_borders(range(9))
    [2, 5]
    """
    count = len(candidates)
    num_segments = max(1, round(math.sqrt(count)))
    return [candidates[j * count // num_segments - 1] for j in range(1, num_segments)]


def greedy_borders(graph: Graph, candidates: Sequence[int], limit_bytes: int) -> list[int]:
    """Returns borders, each at the first candidate where a segment exceeds `limit_bytes`.

    Algorithm 3 of Chen et al. 2016; bytes are those that the segment's operators write.
    """
    is_candidate = set(candidates)
    borders: list[int] = []
    held_bytes = 0

    for index, op in enumerate(graph.operators[: forward_length(graph)]):
        held_bytes += sum(graph.values[v].size_bytes for v in op.writes)
        if index in is_candidate and held_bytes > limit_bytes:
            borders.append(index)
            held_bytes = 0
    return borders


def sqrt_members(graph: Graph, candidates: Sequence[int]) -> Iterator[list[int]]:
    """Yields the schedules of about sqrt(n) segments."""
    yield from steps_of_segments(graph, sqrt_borders(candidates))


def greedy_members(graph: Graph, candidates: Sequence[int]) -> Iterator[list[int]]:
    """Yields the schedules of greedy segments, for segment sizes from everything to nothing."""
    for borders in borders_by_size(
        graph, candidates, [*np.geomspace(1, max(2, len(candidates)), _NUM_LIMITS), math.inf]
    ):
        yield from steps_of_segments(graph, borders)


def borders_by_size(
    graph: Graph, candidates: Sequence[int], divisors: Iterable[float]
) -> Iterator[list[int]]:
    """Yields greedy borders for segments of the forward's bytes / divisor, for each divisor.

    No borders are yielded twice.
    """
    forward = graph.operators[: forward_length(graph)]
    total_bytes = sum(graph.values[v].size_bytes for op in forward for v in op.writes)
    seen: set[tuple[int, ...]] = set()
    for divisor in divisors:
        borders = greedy_borders(graph, candidates, int(total_bytes / divisor))
        if tuple(borders) not in seen:
            seen.add(tuple(borders))
            yield borders


def steps_of_segments(graph: Graph, borders: Sequence[int]) -> Iterator[list[int]]:
    """Yields two schedules of one segmentation: one keeps the last segment, one drops it.

    The backward begins with the last segment. Keeping it saves its recomputation, and costs memory
    only where the loss needs much memory.
    """
    kept = {v for border in borders for v in graph.operators[border].writes}
    last_segment = graph.operators[borders[-1] + 1 if borders else 0 : forward_length(graph)]
    yield steps_on_demand(graph, kept.union(v for op in last_segment for v in op.writes))
    yield steps_on_demand(graph, kept)
