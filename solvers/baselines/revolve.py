"""Binomial checkpointing of a chain.

Other names: revolve, treeverse, Griewank's log n.
Papers: A. Griewank, A. Walther, "Algorithm 799: revolve", ACM TOMS 26(1), 2000, proposition 1;
A. Griewank, "Achieving logarithmic growth of temporal and spatial complexity in reverse automatic
differentiation", 1992.
Optimal: on a chain of equal costs and sizes, it yields the values in reverse order with the fewest
recomputed forward operators that a given number of slots allows. The theory leaves out the memory
of gradients, and of a backward operator that also reads its layer's output.
Complexity: r l steps; about forty numbers of slots are tried, small ones only while r l stays below
two million.
Imperfections: chains only; all operators count the same, whatever their cost and size; pinned
operators are borders that take no slot, and each run between two of them, or within one region, has
all slots to itself.

Notation of the paper: s slots, l values in reverse, r repetitions, beta(s, r) = (s + r choose s).
A slot holds one value; the first slot holds the chain's start, which is never computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np

from remat.core.errors import SolverError
from remat.core.graph import Graph
from remat.solvers.baselines.segment_family import Family
from remat.solvers.core.on_demand import forward_length, values_always_kept

# forward operators of a schedule; longer ones take seconds to simulate, and recompute so much that
# they are useless; a round number, no measurement is on record
_MAX_ADVANCES = 2_000_000


@final
@dataclass(frozen=True)
class Revolve(Family):
    """Binomial schedules for numbers of slots from one to all; the cheapest that fits.

    Attributes:
        num_slots: tries this number of slots only.
    """

    num_slots: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_slots is not None and self.num_slots < 1:
            raise ValueError(f"num_slots={self.num_slots} was given; give at least 1")

    def members(self, graph: Graph) -> Iterator[list[int]]:
        """Yields one schedule per number of slots.

        Raises:
            SolverError: the forward is not a chain.
        """
        _check_chain(graph)
        slots = (
            _slot_counts(forward_length(graph) + 1) if self.num_slots is None else [self.num_slots]
        )
        return (_steps(graph, s) for s in slots)


def advances(num_values: int, num_slots: int) -> int:
    """Returns t(l, s) = r l - beta(s + 1, r - 1), the fewest advances that reverse l values.

    r is the number with beta(s, r - 1) < l <= beta(s, r).

    >>> advances(10, 1), advances(10, 3), advances(10, 10)
    (45, 15, 9)
    """
    r = _repetitions(num_values, num_slots)
    return r * num_values - _beta(num_slots + 1, r - 1)


def first_split(num_values: int, num_slots: int) -> int:
    """Returns how far to advance before the next value is stored, one of the optimal distances.

    Both parts then stay within the repetitions that the binomials allow them (Griewank and
    Walther, proposition 1).
    """
    r = _repetitions(num_values, num_slots)
    return max(1, _beta(num_slots, r - 2), num_values - _beta(num_slots - 1, r))


def _beta(s: int, r: int) -> int:
    return math.comb(s + r, s) if s >= 0 and r >= 0 else 0


def _repetitions(num_values: int, num_slots: int) -> int:
    r = 0
    while _beta(num_slots, r) < num_values:
        r += 1
    return r


def _slot_counts(num_values: int) -> list[int]:
    """Returns the numbers of slots to try: all small ones, then ever fewer of the larger ones."""
    counts = {
        *range(1, min(num_values, 16) + 1),
        *(round(x) for x in np.geomspace(1, num_values, 32)),
    }
    return sorted(s for s in counts if s == num_values or advances(num_values, s) <= _MAX_ADVANCES)


def _check_chain(graph: Graph) -> None:
    always_kept = values_always_kept(graph)
    previous = -1
    for index, op in enumerate(graph.operators[: forward_length(graph)]):
        if not op.is_recomputable or op.is_snapshot:
            continue

        strange = next(
            (v for v in op.reads if v not in always_kept and graph.producer[v] != previous), None
        )
        if strange is not None:
            raise SolverError(
                f"revolve needs a forward that is a chain; {op.name!r} reads "
                f"{graph.values[strange].name!r}, which the operator before it "
                'does not write. Use "chen-greedy", "linear-greedy" or "auto"'
            )

        previous = index


def _steps(graph: Graph, num_slots: int) -> list[int]:
    """Returns the schedule with `num_slots` slots in each run of the chain."""
    boundary = forward_length(graph)
    always_kept = values_always_kept(graph)
    runs = [_Run(ops, num_slots) for ops in _runs(graph, boundary)]
    place = {op: (run, position) for run in runs for position, op in enumerate(run.operators)}

    steps = list(range(boundary))
    for index in range(boundary, graph.num_operators):
        wanted = {graph.producer[v] for v in graph.operators[index].reads if v not in always_kept}
        for op in sorted(wanted & place.keys(), reverse=True):
            run, position = place[op]
            steps += run.bring_back(position)
        steps.append(index)
    return steps


def _runs(graph: Graph, boundary: int) -> list[list[int]]:
    """Returns the chain's operators, cut at pinned operators and between regions."""
    runs: list[list[int]] = [[]]
    for index, op in enumerate(graph.operators[:boundary]):
        if op.is_snapshot:
            continue

        if runs[-1] and (
            not op.is_recomputable or graph.operators[runs[-1][-1]].region != op.region
        ):
            runs.append([])
        if op.is_recomputable:
            runs[-1].append(index)
    return runs


class _Run:
    """A part of the chain in reverse: which values are stored, and how to recompute the others."""

    def __init__(self, operators: list[int], num_slots: int) -> None:
        self.operators = operators
        self._num_slots = num_slots
        self._stored = [-1]  # positions in ascending order; the start is always there
        self._store_on_the_way_to(len(operators) - 1)
        self._given = {len(operators) - 1}  # the last value has only just been computed

    def bring_back(self, position: int) -> list[int]:
        """Returns what to recompute to get the value at `position`; stores values on the way."""
        if position in self._given:
            return []

        self._given.add(position)
        while self._stored[-1] > position:
            self._stored.pop()
        if self._stored[-1] == position:
            return []

        first = self._stored[-1] + 1
        self._store_on_the_way_to(position)
        return self.operators[first : position + 1]

    def _store_on_the_way_to(self, position: int) -> None:
        while len(self._stored) < self._num_slots:
            num_values = position - self._stored[-1] + 1
            split = first_split(num_values, self._num_slots - len(self._stored) + 1)
            if self._stored[-1] + split >= position:
                return
            self._stored.append(self._stored[-1] + split)
