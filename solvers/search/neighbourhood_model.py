"""A MILP around one schedule: which of some optional computations to run, all else fixed.

The schedule's steps, and the optional ones among them, lie in *slots*. Legend:

    x[q]     slot q computes its operator; 1 where it is not free
    h[v, e]  value v is held from its event e (a slot that writes or reads it) to its next one

    min  sum of c x
    x[q] <= h[v, e - 1]                     q reads v at its event e, so v is in memory
    h[v, e] <= h[v, e - 1]                  after a read, v is held only if it was before
    h[v, e] <= h[v, e - 1] + x[q]           after a computation, also if q computed it
    sum of m_v x[q] + workspace x[q] + sum of m_v h[v, e] over the gaps that reach or cross q
        - m_v d[v, q] <= B                  d: one input that ends at q is reused in place,
                                            d <= x[q], d <= 1 - h[v, e]

For integral x the least h is integral; declaring it binary made HiGHS 15 times as fast (U-Net, 5
GB). The h of a gap is a constant wherever fixed slots around it determine it, and of the slots
between two events only the one with the most constant bytes needs a memory row, so the model's size
depends on the free slots, not on the graph. It is exact for the schedules that it can express, the
subsets of its slots, except that a snapshot counts as soon as something free could need it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remat.core.arrays import Arrays
from remat.core.graph import Graph
from remat.solvers.core.accounting import Bools, Floats, Ints
from remat.solvers.lp.arrays import ONE, ZERO, ModelArrays
from remat.solvers.search.slots import Slots, events_of, gather, ranges

# one unit of the objective, as a share of the cost of keeping everything: HiGHS's absolute gap of
# 1e-6 is then 1e-11 of that cost; not tuned
_UNIT = 1e-5


@dataclass(frozen=True)
class _Events:
    """Every (value, slot) at which a slot writes or reads a value, sorted by value, then slot.

    Attributes:
        is_write: the slot computes the value.
        is_free: the slot is optional.
        follows: the next event is of the same value.
        gap: whether the value is held from the event to the next: `ZERO`, `ONE` or a column.
    """

    value: Ints
    slot: Ints
    is_write: Bools
    is_free: Bools
    follows: Bools
    gap: Ints


class SlotModel:
    """The MILP of some slots.

    Attributes:
        slots: the problem.
        arrays: the model for a backend; the first columns are the free slots in order.
    """

    def __init__(self, graph: Graph, slots: Slots, *, budget_bytes: int) -> None:
        """Builds the model."""
        self.slots = slots
        self._graph = graph.arrays
        self._room = budget_bytes - graph.resident_bytes

        self._free = np.flatnonzero(slots.is_free)
        self._column = np.full(len(slots.operator), ONE)
        self._column[self._free] = np.arange(len(self._free))
        self.num_columns = len(self._free)
        self._size = _sizes(graph.arrays, slots)

        self._rows: list[tuple[list[int], list[float], float]] = []
        self._events = self._link(graph)
        self.arrays = self._build(graph)

    def steps(self, point: Floats) -> list[int]:
        """Returns the steps of a point of the model."""
        is_taken = ~self.slots.is_free
        is_taken[self._free] = point[: len(self._free)] > 0.5
        is_taken[-1] = False
        return [int(op) for op in self.slots.operator[is_taken]]

    def start(self) -> Floats:
        """Returns the point of the schedule that the model was built around; NaN where open."""
        point = np.full(self.num_columns, np.nan)
        point[: len(self._free)] = self.slots.is_computed[self._free]
        return point

    def _link(self, graph: Graph) -> _Events:
        """Returns the events with their gaps, and adds the rows that link them."""
        value, slot, is_write = events_of(graph, self.slots.operator)
        is_free = self.slots.is_free[slot]
        follows = np.append(value[1:] == value[:-1], False)
        is_touched = np.zeros(len(self._size), np.bool_)
        is_touched[value[is_free]] = True

        # correct for values without a free event
        gap = np.where(follows & ~np.append(is_write[1:], False), ONE, ZERO)
        mine = np.flatnonzero(is_touched[value])
        gap[mine] = self._gaps(mine, slot, is_write, is_free, follows)

        events = _Events(value, slot, is_write, is_free, follows, gap)
        self._add_links(events, mine)
        return events

    def _gaps(
        self, mine: Ints, slot: Ints, is_write: Bools, is_free: Bools, follows: Bools
    ) -> list[int]:
        """Returns the h after each event: a constant where it is determined, else a new column."""
        result: list[int] = []
        later = ZERO  # after the following event
        rows = zip(*(array[mine].tolist() for array in (is_write, is_free, follows)), strict=True)
        next_write = next_free = False

        for write, free, has_next in reversed(list(rows)):
            if not has_next:
                gap = ZERO
            elif not next_write and not next_free:
                gap = ONE
            elif not next_free or (next_write and later == ZERO):
                gap = ZERO
            elif not next_write and later == ONE:
                gap = ONE
            else:
                gap = self._new_column()

            result.append(gap)
            later, next_write, next_free = gap, write, free
        return result[::-1]

    def _new_column(self) -> int:
        self.num_columns += 1
        return self.num_columns - 1

    def _add_links(self, events: _Events, mine: Ints) -> None:
        """Adds x <= h before, and h after <= h before (+ x where the slot computes the value)."""
        before = np.where(
            np.append(False, events.follows[:-1]), np.append(ZERO, events.gap[:-1]), ZERO
        )

        columns = self._column[events.slot]
        picked = zip(
            *(
                array[mine].tolist()
                for array in (events.is_write, events.is_free, before, events.gap, columns)
            ),
            strict=True,
        )

        for write, free, was, after, x in picked:
            if write and free:
                self._add_row([(after, 1.0), (was, -1.0), (x, -1.0)])
            elif not write and free:
                self._add_row([(x, 1.0), (was, -1.0)])
                self._add_row([(after, 1.0), (was, -1.0)])
            elif not write:
                self._add_row([(after, 1.0), (was, -1.0)])

    def _add_row(self, terms: list[tuple[int, float]], upper: float = 0.0) -> None:
        """Adds `terms <= upper` unless it always holds."""
        upper -= sum(factor for column, factor in terms if column == ONE)
        columns = [column for column, _ in terms if column >= 0]
        factors = [factor for column, factor in terms if column >= 0]
        if sum(factor for factor in factors if factor > 0) > upper:
            self._rows.append((columns, factors, upper))

    def _build(self, graph: Graph) -> ModelArrays:
        """Returns the model: the rows that link events, then the memory rows."""
        events, slots = self._events, self.slots
        taken = _TakenOver(self)
        weight = np.append(self._graph.workspace_bytes, 0)[slots.operator].astype(np.float64)
        np.add.at(weight, events.slot[events.is_write], self._size[events.value[events.is_write]])

        size = self._size[events.value]
        end = np.append(events.slot[1:], 0)
        count = len(slots.operator)
        held = self._always_held(size, end, count)
        base = held + np.where(slots.is_free, 0.0, weight) - taken.constant

        varies = events.gap >= 0
        begins = np.zeros(count + 2, np.bool_)
        for places in (
            events.slot[varies] + 1,
            end[varies] + 1,
            self._free,
            self._free + 1,
            taken.slots,
            taken.slots + 1,
        ):
            begins[places] = True
        row_slot = _largest_of_groups(np.cumsum(begins.astype(np.int64))[:count], base)

        low, high = (
            np.searchsorted(row_slot, places, "right")
            for places in (events.slot[varies], end[varies])
        )
        row = ranges(low, high)
        lengths = high - low

        parts = [
            (row, np.repeat(events.gap[varies], lengths), np.repeat(size[varies], lengths)),
            (np.searchsorted(row_slot, self._free), np.arange(len(self._free)), weight[self._free]),
            (np.searchsorted(row_slot, taken.slots), taken.columns, -taken.bytes),
        ]
        memory = tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return self._assemble(graph, memory, self._room - base[row_slot])

    def _always_held(self, size: Floats, end: Ints, count: int) -> Floats:
        """Returns the bytes that every solution holds at each slot.

        `size` and `end` are the bytes of each event and the slot of the next one.
        """
        events = self._events
        is_held = events.gap == ONE
        change = (
            np.bincount(events.slot[is_held] + 1, size[is_held], count + 1)
            - np.bincount(end[is_held] + 1, size[is_held], count + 1)[: count + 1]
        )
        return np.cumsum(change)[:count]

    def _assemble(self, graph: Graph, memory: tuple[Ints, ...], room: Floats) -> ModelArrays:
        row, column, size = memory
        largest = np.bincount(row, np.maximum(size, 0.0), len(room))
        is_needed = largest > room
        keep = is_needed[row] & (size != 0)
        new_row = np.cumsum(is_needed) - 1 + len(self._rows)
        row, column, size = new_row[row[keep]], column[keep], size[keep] / max(self._room, 1)

        lengths = [len(columns) for columns, _, _ in self._rows]
        row = np.concatenate([np.repeat(np.arange(len(lengths)), lengths), row]).astype(np.int64)
        column = np.concatenate(
            [np.array([c for columns, _, _ in self._rows for c in columns], np.int64), column]
        )
        size = np.concatenate(
            [np.array([f for _, factors, _ in self._rows for f in factors], np.float64), size]
        )

        order = np.argsort(row, kind="stable")
        upper = np.concatenate(
            [np.array([u for _, _, u in self._rows]), room[is_needed] / max(self._room, 1)]
        )

        operator, unit = self.slots.operator, _UNIT * graph.cost_s or 1.0
        cost = np.zeros(self.num_columns)
        cost[: len(self._free)] = self._graph.cost_s[operator[self._free]] / unit
        coefficient: Floats = np.asarray(size[order], np.float64)

        return ModelArrays(
            cost=cost,
            offset=float(self._graph.cost_s[operator[:-1][~self.slots.is_free[:-1]]].sum() / unit),
            column_upper=np.ones(self.num_columns),
            is_integer=np.ones(self.num_columns, np.bool_),
            row_start=np.searchsorted(row[order], np.arange(len(upper) + 1)).astype(np.int32),
            index=column[order].astype(np.int32),
            value=coefficient,
            row_upper=upper,
        )


class _TakenOver:
    """The bytes that slots save by working in place: constants, or else columns d.

    Attributes:
        constant: bytes saved, by slot.
        slots, columns, bytes: of each d.
    """

    def __init__(self, model: SlotModel) -> None:
        operator = model.slots.operator
        events = model._events
        start = np.append(model._graph.reuse_start, model._graph.reuse_start[-1])
        value, slot = gather(start, model._graph.reuse, operator)
        self.constant = np.zeros(len(operator))

        count = len(operator) + 1
        event = np.searchsorted(events.value * count + events.slot, value * count + slot)
        after = events.gap[event]
        size = model._size[value]

        is_open = np.zeros(len(operator), np.bool_)
        is_open[slot[(after >= 0) | model.slots.is_free[slot]]] = True
        ends = (after == ZERO) & ~is_open[slot]
        np.maximum.at(self.constant, slot[ends], size[ends])

        chosen = np.flatnonzero(is_open[slot] & (after != ONE) & (size > 0))
        self.slots = slot[chosen]
        self.bytes = size[chosen]
        self.columns = np.arange(model.num_columns, model.num_columns + len(chosen))
        model.num_columns += len(chosen)

        for column, at, held in zip(
            self.columns.tolist(), self.slots.tolist(), after[chosen].tolist(), strict=True
        ):
            model._add_row([(column, 1.0), (held, 1.0)], 1.0)
            model._add_row([(column, 1.0), (int(model._column[at]), -1.0)])
        for at in np.unique(self.slots):
            model._add_row([(int(column), 1.0) for column in self.columns[self.slots == at]], 1.0)


def _sizes(arrays: Arrays, slots: Slots) -> Floats:
    """Returns the bytes of each value.

    0 for resident values, and for snapshots that no repeated or optional slot reads.
    """
    count = len(arrays.cost_s)
    operator = slots.operator[:-1]
    is_repeated = np.bincount(operator, minlength=count) > 1
    is_needed = np.zeros(len(arrays.size_bytes), np.bool_)
    is_needed[arrays.read[np.repeat(is_repeated, np.diff(arrays.read_start))]] = True
    is_snapshot = arrays.is_snapshot[np.maximum(arrays.producer, 0)]
    counts: NDArray[np.bool_] = (arrays.producer >= 0) & (~is_snapshot | is_needed)
    return np.where(counts, arrays.size_bytes, 0).astype(np.float64)


def _largest_of_groups(group: Ints, base: Floats) -> Ints:
    """Returns the slot with the largest base of each group, in order."""
    order = np.lexsort((-base, group))
    is_first = np.append(True, group[order][1:] != group[order][:-1])
    return np.sort(order[is_first])
