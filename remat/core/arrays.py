"""A graph as arrays, for hot loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remat.core.operators import Operator, Value


@dataclass(frozen=True)
class Arrays:
    """A graph as arrays; lists of lists are in CSR form, as `*_start` and `*`.

    Resident values do not occur in `read`, `reuse` and `output`.
    """

    cost_s: NDArray[np.float64]
    size_bytes: NDArray[np.int64]
    workspace_bytes: NDArray[np.int64]
    producer: NDArray[np.int64]  # value -> operator, -1 if resident
    write_rank: NDArray[np.int64]  # value -> its place among its operator's writes
    read_start: NDArray[np.int64]
    read: NDArray[np.int64]
    write_start: NDArray[np.int64]
    write: NDArray[np.int64]
    reuse_start: NDArray[np.int64]
    reuse: NDArray[np.int64]
    is_pinned: NDArray[np.bool_]
    is_backward: NDArray[np.bool_]
    is_snapshot: NDArray[np.bool_]
    output: NDArray[np.int64]  # values that stay until the step ends

    @classmethod
    def of(
        cls,
        operators: Sequence[Operator],
        values: Sequence[Value],
        producer: Sequence[int],
        outputs: Sequence[int],
    ) -> Arrays:
        """Returns the arrays of a graph, in O(V + E); `producer` has -1 for resident values."""
        read_start, read = _csr(
            [[v for v in op.reads if not values[v].is_resident] for op in operators]
        )
        write_start, write = _csr([list(op.writes) for op in operators])
        reuse_start, reuse = _csr(
            [[v for v in op.reuses if not values[v].is_resident] for op in operators]
        )

        write_rank = np.zeros(len(values), np.int64)
        write_rank[write] = np.arange(len(write)) - np.repeat(
            write_start[:-1], np.diff(write_start)
        )

        return cls(
            cost_s=np.array([op.cost_s for op in operators], np.float64),
            size_bytes=np.array([value.size_bytes for value in values], np.int64),
            workspace_bytes=np.array([op.workspace_bytes for op in operators], np.int64),
            producer=np.array(producer, np.int64),
            write_rank=write_rank,
            read_start=read_start,
            read=read,
            write_start=write_start,
            write=write,
            reuse_start=reuse_start,
            reuse=reuse,
            is_pinned=np.array([not op.is_recomputable for op in operators], np.bool_),
            is_backward=np.array([op.is_backward for op in operators], np.bool_),
            is_snapshot=np.array([op.is_snapshot for op in operators], np.bool_),
            output=np.array([v for v in outputs if not values[v].is_resident], np.int64),
        )


def _csr(rows: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns lists in CSR form: where each starts (and the last ends), and all items."""
    start = np.zeros(len(rows) + 1, np.int64)
    start[1:] = np.cumsum([len(row) for row in rows])
    flat: list[Any] = [item for row in rows for item in row]
    return start, np.array(flat, np.int64)
