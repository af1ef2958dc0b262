"""A schedule as a sequence that can be changed in place: insert or remove one recomputation, bytes kept up to date.

The sequence lies in slots, two of three empty, so that most insertions move nothing; `lay_out` spreads it anew. Each
operator has the slots it is computed in, in order (`MAX_TIMES` at most). When a value is last read is not stored but
looked up over its readers' slots, so an insertion or a removal only touches the intervals that change: those of what
the operator writes and reads. A slot that is empty holds what is alive across it.

Any insertion after the first computation is valid, any removal but the first one's too: the graph's rules are kept by
construction, and what is judged is memory alone. Bytes agree with `simulate` to the byte, in-place operators and
snapshots included. Complexity: O(degree * times + changed slots) a change.

The functions of one underscore are compiled where numba is installed (see `compiled`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..graph import Graph, Phase
from .accounting import Floats, Ints
from .compiled import compiled
from .eviction import users

MAX_TIMES = 12
SPACING = 3


class Tables(NamedTuple):
    """The graph, as the compiled functions read it; CSR pairs as in `Arrays`."""

    cost: Floats
    size: Ints
    workspace: Ints
    producer: Ints
    read_start: Ints
    read: Ints
    write_start: Ints
    write: Ints
    user_start: Ints
    user: Ints
    reuse_start: Ints
    reuse: Ints
    is_pinned: NDArray[np.bool_]
    is_output: NDArray[np.bool_]
    is_snapshot: NDArray[np.bool_]  # of each value
    spans: Ints  # (operators, 4): it may be computed again between the first computations of the first and second operator,
    # and between those of the third and fourth: the forward and the backward of its region


class Slots(NamedTuple):
    """The sequence. `total` is (cost, bytes over the budget summed over slots)."""

    slot: Ints
    where: Ints  # (operators, MAX_TIMES)
    times: Ints
    held: Ints
    saved: Ints
    size: Ints  # of each value, 0 while no recomputation reads the snapshot
    repeated: Ints  # of each value, how many of its readers are computed more than once
    total: Floats
    room: int


def tables(graph: Graph) -> Tables:
    """Returns the graph as the compiled functions read it."""
    arrays = graph.arrays
    is_output = np.zeros(len(graph.values), np.bool_)
    is_output[arrays.output] = True
    is_snapshot = (arrays.producer >= 0) & arrays.is_snapshot[np.maximum(arrays.producer, 0)]
    return Tables(
        arrays.cost_s, np.where(arrays.producer >= 0, arrays.size_bytes, 0), arrays.workspace_bytes, arrays.producer,
        arrays.read_start, arrays.read, arrays.write_start, arrays.write, *users(graph), arrays.reuse_start, arrays.reuse,
        arrays.is_pinned, is_output, is_snapshot, _spans(graph),
    )  # fmt: skip


def _spans(graph: Graph) -> Ints:
    half: dict[tuple[int, bool], list[int]] = {}
    for index, op in enumerate(graph.operators):
        half.setdefault((op.region, op.phase is Phase.BACKWARD), []).append(index)
    if len(half) <= 2:  # one region, or a forward and a backward that nothing separates
        return np.tile(np.array([0, graph.num_operators - 1, 0, graph.num_operators - 1]), (graph.num_operators, 1))
    spans = np.zeros((graph.num_operators, 4), np.int64)
    for (region, is_backward), members in half.items():
        other = half.get((region, not is_backward), members)
        spans[members] = (members[0], members[-1], other[0], other[-1])
    return spans


def lay_out(table: Tables, steps: Ints, room: int) -> Slots:
    """Returns the sequence `steps` in slots; `room` is the budget less the resident bytes. O(E log S)."""
    count, num_values, capacity = len(table.cost), len(table.size), SPACING * len(steps) + SPACING
    slots = Slots(
        np.full(capacity, -1), np.zeros((count, MAX_TIMES), np.int64), np.zeros(count, np.int64), np.zeros(capacity, np.int64),
        np.zeros(capacity, np.int64), table.size.copy(), np.zeros(num_values, np.int64), np.zeros(2), room,
    )  # fmt: skip
    _fill(table, slots, steps)
    return slots


def steps_of(slot: Ints) -> Ints:
    """Returns the sequence without its empty slots."""
    return slot[slot >= 0]


@compiled
def _fill(table, slots, steps):  # type: ignore[no-untyped-def]
    capacity, room = len(slots.slot), slots.room
    for index in range(len(steps)):
        op, q = steps[index], SPACING * index + SPACING - 1
        if slots.times[op] < MAX_TIMES:
            slots.slot[q] = op
            slots.where[op, slots.times[op]] = q
            slots.times[op] += 1
            slots.total[0] += table.cost[op]
            slots.held[q] += table.workspace[op]
    for value in range(len(table.size)):
        if table.is_snapshot[value]:
            for k in range(table.user_start[value], table.user_start[value + 1]):
                slots.repeated[value] += slots.times[table.user[k]] > 1
            if slots.repeated[value] == 0:
                slots.size[value] = 0
    change = np.zeros(capacity + 1, np.int64)
    for op in range(len(table.cost)):
        for i in range(slots.times[op]):
            begin = slots.where[op, i]
            end = slots.where[op, i + 1] if i + 1 < slots.times[op] else capacity
            for k in range(table.write_start[op], table.write_start[op + 1]):
                change[begin] += slots.size[table.write[k]]
                change[_last_read(table, slots, table.write[k], begin, end) + 1] -= slots.size[table.write[k]]
    alive = 0
    for q in range(capacity):
        alive += change[q]
        slots.held[q] += alive
        slots.total[1] += max(slots.held[q] - room, 0)
    for q in range(capacity):
        _refresh(table, slots, q)


@compiled
def _before(slots, op, q):  # type: ignore[no-untyped-def]
    """The last slot before `q` that computes `op`, -1 if none."""
    for i in range(slots.times[op] - 1, -1, -1):
        if slots.where[op, i] < q:
            return slots.where[op, i]
    return -1


@compiled
def _after(slots, op, q):  # type: ignore[no-untyped-def]
    """The first slot after `q` that computes `op`, the number of slots if none."""
    for i in range(slots.times[op]):
        if slots.where[op, i] > q:
            return slots.where[op, i]
    return len(slots.slot)


@compiled
def _last_read(table, slots, value, begin, end):  # type: ignore[no-untyped-def]
    """The last slot inside (begin, end) that reads `value`, `begin` if none."""
    capacity = len(slots.slot)
    if end >= capacity and table.is_output[value]:
        return capacity - 1
    last = begin
    for k in range(table.user_start[value], table.user_start[value + 1]):
        u = table.user[k]
        for i in range(slots.times[u] - 1, -1, -1):
            position = slots.where[u, i]
            if position < end:
                last = max(last, position)
                break
    return last


@compiled
def _shift(slots, begin, end, change):  # type: ignore[no-untyped-def]
    """Adds `change` bytes to the slots from `begin` to before `end`."""
    over, room, held = 0, slots.room, slots.held
    for q in range(begin, end):
        old = held[q]
        new = old + change
        over += max(new - room, 0) - max(old - room, 0)
        held[q] = new
    slots.total[1] += over


@compiled
def _refresh(table, slots, q):  # type: ignore[no-untyped-def]
    """Sets what the operator at `q` saves by working in place."""
    op = slots.slot[q]
    if op < 0 or table.reuse_start[op] == table.reuse_start[op + 1]:
        return
    best = 0
    for k in range(table.reuse_start[op], table.reuse_start[op + 1]):
        value = table.reuse[k]
        p = table.producer[value]
        if slots.size[value] > best and _last_read(table, slots, value, _before(slots, p, q), _after(slots, p, q)) == q:
            best = slots.size[value]
    _shift(slots, q, q + 1, slots.saved[q] - best)
    slots.saved[q] = best


@compiled
def _refresh_around(table, slots, op, q):  # type: ignore[no-untyped-def]
    """Refreshes the slots whose reads became or ceased to be last ones by a change of `op` at `q`."""
    if len(table.reuse) == 0:
        return
    before = _before(slots, op, q)
    for k in range(table.write_start[op], table.write_start[op + 1]):
        _refresh(table, slots, _last_read(table, slots, table.write[k], before, q))
    for k in range(table.read_start[op], table.read_start[op + 1]):
        value = table.read[k]
        _refresh(table, slots, _last_read(table, slots, value, _before(slots, table.producer[value], q), q))
    _refresh(table, slots, q)


@compiled
def _toggle(table, slots, op, sign):  # type: ignore[no-untyped-def]
    """Lets the snapshots that `op` reads take memory (+1) or not (-1) as `op` starts or ceases to be repeated."""
    for k in range(table.read_start[op], table.read_start[op + 1]):
        value = table.read[k]
        if not table.is_snapshot[value]:
            continue
        slots.repeated[value] += sign
        if slots.repeated[value] == (1 if sign > 0 else 0):
            p, capacity = table.producer[value], len(slots.slot)
            for i in range(slots.times[p]):
                begin = slots.where[p, i]
                end = slots.where[p, i + 1] if i + 1 < slots.times[p] else capacity
                _shift(slots, begin, _last_read(table, slots, value, begin, end) + 1, sign * table.size[value])
            slots.size[value] = table.size[value] if sign > 0 else 0


@compiled
def _may_be_at(table, slots, op, q):  # type: ignore[no-untyped-def]
    """True where `op` may be computed again in slot `q`."""
    if table.is_pinned[op] or slots.times[op] >= MAX_TIMES or slots.where[op, 0] > q:
        return False
    span, where = table.spans[op], slots.where
    return (where[span[0], 0] < q < where[span[1], 0]) or (where[span[2], 0] < q < where[span[3], 0])


@compiled
def _insert(table, slots, op, q):  # type: ignore[no-untyped-def]
    """Computes `op` again in the empty slot `q`, which lies after its first computation."""
    before, after = _before(slots, op, q), _after(slots, op, q)
    for k in range(table.write_start[op], table.write_start[op + 1]):
        value = table.write[k]
        if _last_read(table, slots, value, before, after) > q:
            _shift(slots, _last_read(table, slots, value, before, q) + 1, q, -slots.size[value])
        else:
            _shift(slots, q, q + 1, slots.size[value])
    for k in range(table.read_start[op], table.read_start[op + 1]):
        value = table.read[k]
        p = table.producer[value]
        _shift(slots, _last_read(table, slots, value, _before(slots, p, q), _after(slots, p, q)) + 1, q + 1, slots.size[value])
    _shift(slots, q, q + 1, table.workspace[op])
    i = slots.times[op]
    while slots.where[op, i - 1] > q:
        slots.where[op, i] = slots.where[op, i - 1]
        i -= 1
    slots.where[op, i] = q
    slots.times[op] += 1
    slots.slot[q] = op
    slots.total[0] += table.cost[op]
    _refresh_around(table, slots, op, q)
    if slots.times[op] == 2:
        _toggle(table, slots, op, 1)


@compiled
def _remove(table, slots, op, q):  # type: ignore[no-untyped-def]
    """Takes the computation of `op` out of slot `q`; it is not the first one."""
    if slots.times[op] == 2:
        _toggle(table, slots, op, -1)
    _shift(slots, q, q + 1, slots.saved[q] - table.workspace[op])
    slots.saved[q] = 0
    i = 0
    while slots.where[op, i] != q:
        i += 1
    slots.times[op] -= 1
    for m in range(i, slots.times[op]):
        slots.where[op, m] = slots.where[op, m + 1]
    slots.slot[q] = -1
    slots.total[0] -= table.cost[op]
    before, after = _before(slots, op, q), _after(slots, op, q)
    for k in range(table.write_start[op], table.write_start[op + 1]):
        value = table.write[k]
        if _last_read(table, slots, value, before, after) > q:
            _shift(slots, _last_read(table, slots, value, before, q) + 1, q, slots.size[value])
        else:
            _shift(slots, q, q + 1, -slots.size[value])
    for k in range(table.read_start[op], table.read_start[op + 1]):
        value = table.read[k]
        p = table.producer[value]
        _shift(slots, _last_read(table, slots, value, _before(slots, p, q), _after(slots, p, q)) + 1, q + 1, -slots.size[value])
    _refresh_around(table, slots, op, q)
