"""A schedule's steps with optional ones among them, and where they write and read values.

The optional computations of a stage come in the graph's order (as in Checkmate's MILP; Jain et al.,
MLSys 2020), `passes` times over; the schedule's own recomputations keep their places.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from remat.core.arrays import Arrays
from remat.core.graph import Graph
from remat.solvers.core.accounting import Bools, Ints


@dataclass(frozen=True)
class Slots:
    """Steps and optional steps in one sequence.

    The last slot is the graph's end, which reads the outputs.

    Attributes:
        operator: of each slot; the number of operators for the end.
        is_free: the slot is optional.
        is_computed: the schedule computes the slot's operator there.
    """

    operator: Ints
    is_free: Bools
    is_computed: Bools


def stages_of(steps: Ints) -> Ints:
    """Returns each step's stage: the operator first computed at or next after it; O(S log S)."""
    first = np.unique(steps, return_index=True)[1]
    return np.asarray(np.searchsorted(first, np.arange(len(steps))), np.int64)


def slots_around(steps: Ints, num_operators: int, free: Ints, *, passes: int = 1) -> Slots:
    """Returns `steps` with an optional slot for each pair (operator, stage) of `free`.

    `free` has shape (pairs, 2). A pair that the steps recompute already becomes optional in its
    place. A stage is named by the operator whose first computation ends it.
    """
    steps = np.append(steps, num_operators)
    stage = stages_of(steps)
    is_first = np.zeros(len(steps), np.bool_)
    is_first[np.unique(steps, return_index=True)[1]] = True

    pairs, wanted = (
        steps * (num_operators + 1) + stage,
        free[:, 0] * (num_operators + 1) + free[:, 1],
    )
    is_free = ~is_first & np.isin(pairs, wanted)

    before, extra = _places(steps, stage, free, np.isin(wanted, pairs[is_free]), passes)
    # optional slots come before their step
    order = np.argsort(np.concatenate([before, np.arange(len(steps))]), kind="stable")
    is_there = np.arange(len(order)) >= len(extra)

    return Slots(
        np.concatenate([extra, steps])[order],
        np.concatenate([~is_there[: len(extra)], is_free])[order],
        is_there[order],
    )


def _places(
    steps: Ints, stage: Ints, free: Ints, is_there: Bools, passes: int
) -> tuple[Ints, Ints]:
    """Returns, for each optional slot in order, the step that follows it, and its operator."""
    before: list[int] = []
    operator: list[int] = []
    start, end = (
        np.searchsorted(stage, np.arange(int(stage[-1]) + 1), side) for side in ("left", "right")
    )
    order = np.lexsort((free[:, 0], free[:, 1]))
    bounds = np.flatnonzero(np.diff(free[order, 1], prepend=-1, append=-1))

    for low, high in itertools.pairwise(bounds):
        chosen = order[low:high]
        ops, t = free[chosen, 0], int(free[chosen[0], 1])
        run = steps[start[t] : end[t]]

        # before the first larger one
        after_larger = np.searchsorted(np.maximum.accumulate(run), ops, "right")
        # after the last smaller one
        after_smaller = np.searchsorted(np.minimum.accumulate(run[::-1])[::-1], ops, "left")

        is_new = ~is_there[chosen]
        is_torn = after_larger != after_smaller
        last = len(run) - 1
        places = [(after_larger, is_new), (np.minimum(after_smaller, last), is_new & is_torn)]
        places += [(np.full(len(ops), last), np.ones(len(ops), np.bool_))] * (passes - 1)

        for place, is_used in places:
            before += (start[t] + place[is_used]).tolist()
            operator += ops[is_used].tolist()
    return np.array(before, np.int64), np.array(operator, np.int64)


_Csr = tuple[Ints, Ints]


def _with_end(arrays: Arrays, num_operators: int) -> tuple[_Csr, _Csr]:
    """Returns the values that operators write and read, in CSR form; the end reads the outputs."""
    write_start = np.append(arrays.write_start, arrays.write_start[-1])
    read_start = np.append(arrays.read_start, len(arrays.read) + len(arrays.output))
    return (write_start, arrays.write), (read_start, np.concatenate([arrays.read, arrays.output]))


def gather(start: Ints, items: Ints, operator: Ints) -> tuple[Ints, Ints]:
    """Returns the items of each slot's operator in turn, and the slot of each."""
    counts = start[operator + 1] - start[operator]
    slot = np.repeat(np.arange(len(operator)), counts)
    return items[ranges(start[operator], start[operator + 1])], slot


def ranges(low: Ints, high: Ints) -> Ints:
    """Returns low[0], low[0] + 1, ..., high[0] - 1, low[1], ... and so on."""
    lengths = high - low
    offset = np.cumsum(lengths) - lengths
    return np.asarray(np.arange(int(lengths.sum())) - np.repeat(offset - low, lengths), np.int64)


def events_of(graph: Graph, operator: Ints) -> tuple[Ints, Ints, Bools]:
    """Returns value, slot and whether it is a write for each event, sorted by value and slot."""
    (written, at), (read, when) = (
        gather(start, items, operator)
        for start, items in _with_end(graph.arrays, graph.num_operators)
    )
    value, slot = np.concatenate([written, read]), np.concatenate([at, when])
    order = np.lexsort((slot, value))
    return value[order], slot[order], (np.arange(len(value)) < len(written))[order]
