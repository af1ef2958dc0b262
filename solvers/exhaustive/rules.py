"""A graph as the exhaustive search sees it: sets of values as bits of one integer.

A *state* is the number of operators computed at least once, and the set of values in memory. The
bytes of snapshots depend on whether an operator that reads them is ever recomputed. That is decided
before the first step: each `Ledger` is one such decision.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from remat.core.graph import Graph
from remat.core.operators import Phase
from remat.solvers.core.accounting import Accounting

_CHUNK_BITS = 8
_CHUNK = (1 << _CHUNK_BITS) - 1


@dataclass(frozen=True, slots=True)
class Computation:
    """An operator by its sets of values.

    Attributes:
        index: the operator's index in its graph.
        cost_s: cost of computing it once.
        base_bytes: resident values and its workspace.
        reads: values that it reads and that are not resident, as bits.
        writes: values that it writes, as bits.
        reuses: values that it may reuse in place, one bit each.
    """

    index: int
    cost_s: float
    base_bytes: int
    reads: int
    writes: int
    reuses: tuple[int, ...]


class Ledger:
    """One decision about snapshots: the bytes of values, and which operators may run again.

    The snapshots written by `unpaid` take no memory, so their readers are not recomputed.
    """

    def __init__(self, graph: Graph, unpaid: Iterable[int]) -> None:
        """Builds the tables; `unpaid` are the operators whose snapshots take no memory."""
        free = {value for index in unpaid for value in graph.operators[index].writes}
        self._barred = {user for value in free for user in graph.users_of[value]}

        sizes = [
            0 if value.is_resident or v in free else value.size_bytes
            for v, value in enumerate(graph.values)
        ]
        self.weighs = bits(v for v, size in enumerate(sizes) if size)
        self._tables = [
            _sums(sizes[start : start + _CHUNK_BITS]) for start in range(0, len(sizes), _CHUNK_BITS)
        ]

    def bytes_of(self, values: int) -> int:
        """Returns the bytes of a set of values."""
        total, chunk = 0, 0
        while values:
            total += self._tables[chunk][values & _CHUNK]
            values >>= _CHUNK_BITS
            chunk += 1

        return total

    def allows_again(self, index: int) -> bool:
        """True where an operator may be recomputed."""
        return index not in self._barred


class Rules:
    """The computations that may follow a state.

    Attributes:
        ledgers: one per decision about snapshots; graphs without them have one.
        computations: one per operator.
        outputs: values that must be in memory at the end, as bits.
    """

    def __init__(self, graph: Graph) -> None:
        """Converts the graph to bit sets."""
        self.graph = graph
        self.computations = [self._computation(index) for index in range(graph.num_operators)]
        self.outputs = bits(v for v in graph.outputs if not graph.values[v].is_resident)

        snapshots = [i for i, op in enumerate(graph.operators) if op.is_snapshot]
        self.ledgers = [
            Ledger(graph, unpaid)
            for count in range(len(snapshots), -1, -1)
            for unpaid in itertools.combinations(snapshots, count)
        ]

    def _computation(self, index: int) -> Computation:
        op, values = self.graph.operators[index], self.graph.values
        return Computation(
            index,
            op.cost_s,
            self.graph.resident_bytes + op.workspace_bytes,
            bits(v for v in op.reads if not values[v].is_resident),
            bits(op.writes),
            tuple(1 << v for v in op.reuses if not values[v].is_resident),
        )

    @cached_property
    def useful(self) -> list[int]:
        """For each number of operators done, the values that may still be useful, as bits."""
        accounting = Accounting(self.graph)
        return [
            bits(accounting.relevant(done)[0].nonzero()[0].tolist())
            for done in range(self.graph.num_operators + 1)
        ]

    @cached_property
    def again(self) -> list[list[Computation]]:
        """For each number of operators done, the computations that may be repeated."""
        return [
            [
                self.computations[index]
                for index in range(done)
                if self.graph.operators[index].is_recomputable and self._is_open(index, done)
            ]
            for done in range(self.graph.num_operators + 1)
        ]

    @cached_property
    def _spans(self) -> dict[tuple[int, Phase], tuple[int, int]]:
        """For each region and phase, its first and last operator."""
        spans: dict[tuple[int, Phase], tuple[int, int]] = {}
        for index, op in enumerate(self.graph.operators):
            key = op.region, op.phase
            spans[key] = spans.get(key, (index, index))[0], index

        return spans

    def _is_open(self, index: int, done: int) -> bool:
        """True where the operator's region is active once `done` operators were computed."""
        if len({region for region, _ in self._spans}) == 1:
            return True

        region = self.graph.operators[index].region
        return any(
            first < done <= last for (own, _), (first, last) in self._spans.items() if own == region
        )


def bits(values: Iterable[int]) -> int:
    """Returns a set of values as bits.

    >>> bits([0, 3])
    9
    """
    return sum(1 << value for value in values)


def each_bit(values: int) -> Iterator[int]:
    """Yields the bits of a set, one by one.

    >>> list(each_bit(9))
    [1, 8]
    """
    while values:
        bit = values & -values
        yield bit
        values ^= bit


def _sums(sizes: list[int]) -> list[int]:
    """Returns the sum of each subset of a few sizes.

    >>> _sums([5, 2])
    [0, 5, 2, 7]
    """
    sums = [0]
    for size in sizes:
        sums += [size + other for other in sums]

    return sums
