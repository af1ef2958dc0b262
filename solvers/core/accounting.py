"""What bounds need to know of a graph.

The sizes that count, and where values are read in the plain order.
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
    """What a model needs to know of a graph.

    Sizes that count, and where values are read in the plain order.
    """

    graph: Graph

    @cached_property
    def size(self) -> Floats:
        """Bytes of each value; 0 for resident values and those of snapshots."""
        arrays = self.graph.arrays
        counts = (arrays.producer >= 0) & ~arrays.is_snapshot[np.maximum(arrays.producer, 0)]
        return np.where(counts, arrays.size_bytes, 0).astype(np.float64)

    @cached_property
    def size_if_repeated(self) -> Floats:
        """The same, with the bytes that snapshots take where an operator that reads them is
        computed again.
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
        """For each value, its last reader before operator `end`, -1 if none.

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
        """Which values may be of use at `boundary`, and which operators before it may be computed
        again after it.
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
    """The largest working set.

    What one operator reads, writes and works with, or all results, and what is resident; O(E).
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
