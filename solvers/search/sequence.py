"""A schedule as a sequence in slots, packed into a few arrays for compiled functions.

Compiled functions are quick to call with few arrays. Two of three slots are empty, so most
insertions move nothing; `timeline.lay_out` spreads the sequence out again. Each operator has a list
of the slots that compute it, in order (`MAX_TIMES` at most). An empty slot holds the bytes that are
alive across it. The last step is not an operator of the graph: it reads the outputs, costs nothing
and occurs once. The columns and rows of the arrays are named below.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from remat.core.graph import Graph
from remat.core.operators import Phase
from remat.solvers.core.accounting import Floats, Ints

# an operator is computed at most so often; with 12, the least schedules of DenseNet and BERT lost
# steps (traced steps)
MAX_TIMES = 30
SPACING = 3  # slots per step, all but one of them empty at first; not measured

# columns of `values`; NOW is the size, 0 for a snapshot that no recomputation reads; REPEATED
# counts recomputed readers
SIZE, PRODUCER, SNAPSHOT, NOW, REPEATED, USER_FROM, USER_TO = range(7)
# columns of `operators`; from SPAN on: two pairs of operators, between whose first computations it
# may be recomputed; from WHERE on: the slots that compute it, TIMES in number
WORKSPACE, PINNED, READ_FROM, READ_TO, WRITE_FROM, WRITE_TO, REUSE_FROM, REUSE_TO, SPAN = range(9)
TIMES = SPAN + 4
WHERE = TIMES + 1
# rows of `slots`: the operator or -1, the bytes held less those added to the whole block, the bytes
# saved by working in place; in the first columns, for each block of `BLOCK` slots: bytes added to
# all of it, and an upper and a lower bound on its HELD
SLOT, HELD, SAVED, ADDED, MOST, LEAST = range(6)
# slots; blocks made moves two to three times as fast (random graphs), but their size was not varied
BLOCK = 64
# `sums`: bytes over the budget, summed over slots; the budget less the resident bytes; 1 where
# operators work in place
OVER, ROOM, IN_PLACE = range(3)
FAR = 1 << 40  # a slot after all others


class State(NamedTuple):
    """The graph and a sequence.

    Attributes:
        values: (values, 7).
        operators: (operators + 1, WHERE + MAX_TIMES).
        links: the values that operators read, write and may reuse, and the readers of each value;
            `*_FROM` and `*_TO` point into it.
        slots: (6, slots).
        sums: (3,).
        costs: of each operator, and of the sequence, in seconds; (operators + 2,).
    """

    values: Ints
    operators: Ints
    links: Ints
    slots: Ints
    sums: Ints
    costs: Floats


def pack(graph: Graph, *, room: int) -> State:
    """Returns the graph with an empty sequence.

    `room` is the budget less the resident bytes. O(V + E).
    """
    arrays, count = graph.arrays, graph.num_operators
    values, operators = _values_without_users(graph), _operators_without_links(graph)

    none = np.zeros(0, np.int64)
    reads = (arrays.read_start, arrays.read, arrays.output)
    lists = (
        reads,
        (arrays.write_start, arrays.write, none),
        (arrays.reuse_start, arrays.reuse, none),
    )

    offset = 0
    for column, (start, items, at_end) in zip(
        (READ_FROM, WRITE_FROM, REUSE_FROM), lists, strict=True
    ):
        operators[:count, column], operators[:count, column + 1] = (
            start[:-1] + offset,
            start[1:] + offset,
        )
        operators[count, column] = offset + len(items)
        offset += len(items) + len(at_end)
        operators[count, column + 1] = offset

    user_start, user = users(graph)
    values[:, USER_FROM], values[:, USER_TO] = user_start[:-1] + offset, user_start[1:] + offset
    links = np.concatenate([part for _, *parts in lists for part in parts] + [user])
    sums = np.array([0, room, len(arrays.reuse) > 0], np.int64)

    return State(
        values,
        operators,
        links,
        np.zeros((6, 0), np.int64),
        sums,
        np.append(arrays.cost_s, (0.0, 0.0)),
    )


def _values_without_users(graph: Graph) -> Ints:
    arrays = graph.arrays
    values = np.zeros((len(graph.values), 7), np.int64)
    values[:, PRODUCER] = arrays.producer
    values[:, SIZE] = values[:, NOW] = np.where(arrays.producer >= 0, arrays.size_bytes, 0)
    values[:, SNAPSHOT] = (arrays.producer >= 0) & arrays.is_snapshot[
        np.maximum(arrays.producer, 0)
    ]
    return values


def _operators_without_links(graph: Graph) -> Ints:
    arrays, count = graph.arrays, graph.num_operators
    operators = np.zeros((count + 1, WHERE + MAX_TIMES), np.int64)
    operators[:count, WORKSPACE], operators[:count, PINNED] = (
        arrays.workspace_bytes,
        arrays.is_pinned,
    )
    operators[count, PINNED] = 1
    operators[:count, SPAN : SPAN + 4] = region_spans(graph)
    return operators


def with_empty_slots(state: State, num_steps: int) -> State:
    """Returns a copy with an empty sequence, and three slots for each of `num_steps`."""
    slots = np.zeros((6, SPACING * num_steps + SPACING), np.int64)
    slots[SLOT] = -1
    operators = state.operators.copy()
    operators[:, TIMES] = 0

    return state._replace(
        values=state.values.copy(),
        operators=operators,
        slots=slots,
        sums=state.sums.copy(),
        costs=state.costs.copy(),
    )


def steps_of(slot: Ints, end: int) -> Ints:
    """Returns the sequence without empty slots and without the last step, `end`."""
    return np.asarray(slot[(slot >= 0) & (slot != end)], np.int64)


def bytes_held(slots: Ints) -> Ints:
    """Returns the bytes held at each slot."""
    return np.asarray(slots[HELD] + slots[ADDED, np.arange(slots.shape[1]) // BLOCK])


def users(graph: Graph) -> tuple[Ints, Ints]:
    """Returns the operators that read each value, in order, in CSR form; the end reads outputs."""
    rows = [list(row) for row in graph.users_of]
    for value in graph.arrays.output:
        rows[value].append(graph.num_operators)
    start = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=start[1:])
    return start, np.array([u for row in rows for u in row], np.int64)


def region_spans(graph: Graph) -> Ints:
    """Returns, for each operator, where its region runs: the forward and the backward half.

    Each half is a pair of operators, between whose first computations it may be recomputed.
    """
    half: dict[tuple[int, bool], list[int]] = {}
    for index, op in enumerate(graph.operators):
        half.setdefault((op.region, op.phase is Phase.BACKWARD), []).append(index)
    if len({region for region, _ in half}) <= 1:
        return np.tile(np.array([0, graph.num_operators] * 2), (graph.num_operators, 1))

    spans = np.zeros((graph.num_operators, 4), np.int64)
    for (region, is_backward), members in half.items():
        other = half.get((region, not is_backward), members)
        spans[members] = (members[0], members[-1], other[0], other[-1])
    return spans
