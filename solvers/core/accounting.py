"""A graph as bounds see it.

The bytes that count, and where values are read in the plain order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from remat.core.graph import Graph

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Accounting:
    """The bytes of a graph that count, and where its values are read in the plain order."""

    graph: Graph

    @cached_property
    def size(self) -> Floats:
        """Bytes of each value; 0 for resident values and for values that snapshots write."""
        arrays = self.graph.arrays
        counts = (arrays.producer >= 0) & ~arrays.is_snapshot[np.maximum(arrays.producer, 0)]
        return np.where(counts, arrays.size_bytes, 0).astype(np.float64)

    @cached_property
    def size_if_repeated(self) -> Floats:
        """As `size`, but with the bytes of snapshots.

        A snapshot takes memory where one of its readers is recomputed.
        """
        return np.where(self.graph.arrays.producer >= 0, self.graph.arrays.size_bytes, 0).astype(
            np.float64
        )

    @cached_property
    def reader(self) -> Ints:
        """For each entry of `arrays.read`, the operator that reads."""
        return np.repeat(np.arange(self.graph.num_operators), np.diff(self.graph.arrays.read_start))

    @cached_property
    def own(self) -> Floats:
        """Bytes of each operator's reads, writes and workspace, before anything is reused."""
        arrays, count = self.graph.arrays, self.graph.num_operators
        reads = np.bincount(self.reader, self.size[arrays.read], count)
        writes = np.bincount(arrays.producer[arrays.write], self.size[arrays.write], count)
        return np.asarray(reads + writes + arrays.workspace_bytes, np.float64)

    def last_read(self, end: int) -> Ints:
        """Returns each value's last reader before operator `end`, -1 if it has none.

        Outputs are read at the graph's end.
        """
        arrays, count = self.graph.arrays, self.graph.num_operators
        last = np.full(len(arrays.size_bytes), -1)
        inside = self.reader < end
        np.maximum.at(last, arrays.read[inside], self.reader[inside])
        if end >= count:
            last[arrays.output] = count
        return last

    def relevant(self, boundary: int) -> tuple[Bools, Bools]:
        """Returns which values may be worth holding at `boundary`, as a mask.

        The second mask is of the operators before it that may be recomputed after it.
        """
        arrays = self.graph.arrays
        is_useful = (
            (self.last_read(self.graph.num_operators) >= boundary)
            & (arrays.producer >= 0)
            & (arrays.producer < boundary)
        )

        is_again = np.zeros(self.graph.num_operators, np.bool_)
        write_start, read_start = arrays.write_start, arrays.read_start
        for j in range(boundary - 1, -1, -1):
            if (
                not arrays.is_pinned[j]
                and is_useful[arrays.write[write_start[j] : write_start[j + 1]]].any()
            ):
                is_again[j] = True
                is_useful[arrays.read[read_start[j] : read_start[j + 1]]] = True

        return is_useful, is_again


def working_set_bytes(graph: Graph) -> int:
    """Returns the largest working set in bytes; O(E).

    It is the most that one operator needs for its reads, writes and workspace, or all results if
    these are larger, plus the resident values.
    """
    accounting, arrays = Accounting(graph), graph.arrays
    taken = np.zeros(graph.num_operators)
    np.maximum.at(
        taken,
        np.repeat(np.arange(graph.num_operators), np.diff(arrays.reuse_start)),
        accounting.size[arrays.reuse],
    )

    own = accounting.own - taken
    results = accounting.size[np.unique(arrays.output)].sum()
    return graph.resident_bytes + int(max(own.max(initial=0.0), results))
