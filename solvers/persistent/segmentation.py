"""A training step as a chain of segments.

Where to cut the forward, what crosses a cut, and the backward of each segment.

A *border* is the last operator of a segment of the forward. The values written up to a border and
read by the forward after it *enter* the next segment: with these in memory, and nothing else of the
forward, everything after the border can be recomputed. Any graph can be cut like this; a long skip
connection then enters every segment that it spans. The operators of the backward belong to segments
in descending order: an operator belongs to the last segment whose forward values it reads, but
never to a later one than the operator before it.

Borders lie where the bytes that cross are at a local minimum. The worst borders are removed one by
one: those with the most crossing bytes, relative to the cost and bytes of both neighbouring
segments. Complexity: O(E + n^2) for n local minima.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from remat.core.graph import Graph
from remat.core.operators import Operator, Value, ValueKind
from remat.solvers.core.accounting import Accounting, Floats, Ints
from remat.solvers.core.on_demand import forward_length, values_always_kept


@dataclass(frozen=True)
class Part:
    """Some operators of a graph as a separate graph, whose first operator writes what enters.

    Attributes:
        graph: the part; values that are always in memory take no bytes in it.
        operators: for each operator of the part, its index in the whole graph; -1 for the first.
        entering: values of the whole graph that are in memory before the part.
    """

    graph: Graph
    operators: tuple[int, ...]
    entering: frozenset[int]


class Segmentation:
    """The segments of one graph.

    Attributes:
        graph: any graph.
        num_forward: operators of the forward.
        always: values that are never dropped.
        borders: the last operator of each segment.
        entering: for each segment, the droppable values that are written before it and read by the
            forward in or after it; one more entry, for the end of the forward, is empty.
        backward: for each segment, its operators of the backward.
        outside_bytes: for each segment, the bytes that the rest of the step holds when the
            segment's backward begins: resident values, values never dropped, gradients.
    """

    def __init__(self, graph: Graph, most_segments: int) -> None:
        """Cuts the forward into at most `most_segments` segments."""
        self.graph = graph
        self.num_forward = forward_length(graph)
        self.always = values_always_kept(graph)
        self._size = Accounting(graph).size
        self._last = self._last_forward_reads()
        self.borders = self._thinned(most_segments)

        begins = [0, *(border + 1 for border in self.borders)]
        producer = graph.arrays.producer
        self.entering = [
            frozenset(np.flatnonzero((producer < begin) & (self._last >= begin)).tolist())
            for begin in begins
        ]
        self.backward = self._backward()
        self.outside_bytes = self._outside()

    def size_of(self, values: Collection[int]) -> int:
        """Returns the bytes of some values."""
        return int(self._size[list(values)].sum())

    def needed(self, first: int, last: int) -> set[int]:
        """Returns the droppable forward values read by the backward of `first` to `last`."""
        operators = [op for segment in range(first, last + 1) for op in self.backward[segment]]
        return {
            v for op in operators for v in self.graph.operators[op].reads if self.is_droppable(v)
        }

    def kept(self, segment: int) -> frozenset[int]:
        """Returns the values in memory after a segment whose forward keeps what its backward reads.

        They include what enters the next segment.
        """
        return self.entering[segment + 1].union(self.needed(segment, segment))

    def is_droppable(self, value: int) -> bool:
        """True for a value that the forward writes and that can be recomputed."""
        return value not in self.always and 0 <= self.graph.producer[value] < self.num_forward

    def closure(self, targets: Iterable[int], available: Collection[int]) -> list[int]:
        """Returns the forward operators that compute the targets from `available`, in order.

        Complexity: O(E) for these operators.
        """
        found: set[int] = set()
        missing = [
            value for value in targets if value not in available and value not in self.always
        ]

        while missing:
            operator = self.graph.producer[missing.pop()]
            if operator not in found:
                found.add(operator)
                missing += [
                    v
                    for v in self.graph.operators[operator].reads
                    if v not in available and v not in self.always
                ]

        return sorted(found)

    def part_of_backward(self, first: int, last: int) -> Part:
        """Returns the backward of segments `first` to `last`, and what they recompute for it.

        They recompute from what enters `first`. Values that also enter the previous segment stay in
        memory, as they may be held for earlier segments.
        """
        backward = [op for segment in range(last, first - 1, -1) for op in self.backward[segment]]
        operators = self.closure(self.needed(first, last), self.entering[first]) + backward
        stays = self.entering[first] & self.entering[first - 1] if first else frozenset()
        return self.part(operators, stays)

    def part(self, operators: list[int], stays: Collection[int] = ()) -> Part:
        """Returns some operators as a separate graph.

        Values that later operators read, and those in `stays`, are still in memory at its end.
        """
        arrays, outputs, done = self.graph.arrays, set(self.graph.outputs), set(operators)
        writes = [v for op in operators for v in self.graph.operators[op].writes]
        reads = dict.fromkeys(v for op in operators for v in self.graph.operators[op].reads)
        before = [v for v in reads if arrays.producer[v] not in done]
        entering = [v for v in before if arrays.producer[v] >= 0]
        local = {v: index for index, v in enumerate([*before, *writes])}
        values = tuple(self._value(v) for v in local)

        leaving = [
            v
            for v in (*entering, *writes)
            if v in stays or v in outputs or self._is_read_after(v, done)
        ]

        first = Operator(
            "entering", 0.0, (), tuple(local[v] for v in entering), pinned="it was computed before"
        )
        inside = tuple(self._operator(op, index, local) for index, op in enumerate(operators))

        return Part(
            Graph(values, (first, *inside), tuple(local[v] for v in leaving)),
            (-1, *operators),
            frozenset(entering),
        )

    def _is_read_after(self, value: int, done: set[int]) -> bool:
        """True for a value that cannot be recomputed and has a reader after the part."""
        users = self.graph.users_of[value]
        return not self.is_droppable(value) and bool(users) and users[-1] not in done

    def _value(self, value: int) -> Value:
        old = self.graph.values[value]
        if self.graph.producer[value] < 0:
            return Value(old.name, 0, ValueKind.INPUT)
        return Value(old.name, int(self._size[value]))

    def _operator(self, operator: int, index: int, local: dict[int, int]) -> Operator:
        old = self.graph.operators[operator]
        return Operator(
            name=str(index),
            cost_s=old.cost_s,
            reads=tuple(local[v] for v in old.reads),
            writes=tuple(local[v] for v in old.writes),
            workspace_bytes=old.workspace_bytes,
            phase=old.phase,
            pinned=old.pinned,
            reuses=tuple(local[v] for v in old.reuses),
            is_snapshot=old.is_snapshot,
        )

    def _last_forward_reads(self) -> Ints:
        """Returns the last forward reader of each droppable forward value; -1 for other values."""
        last = Accounting(self.graph).last_read(self.num_forward)
        last[self.graph.arrays.producer >= self.num_forward] = -1
        last[self.graph.arrays.producer < 0] = -1
        last[list(self.always)] = -1
        return np.where(last >= self.num_forward, -1, last)

    def _thinned(self, most: int) -> list[int]:
        """Returns the borders: local minima of the crossing bytes, without the worst."""
        crossing, share = self._crossing(), self._shares()
        ends = [
            k
            for k in range(self.num_forward - 1)
            if (k == 0 or crossing[k] <= crossing[k - 1]) and crossing[k] <= crossing[k + 1]
        ]

        while len(ends) >= most:
            around = np.array([-1, *ends, self.num_forward - 1]) + 1
            # the shares of the two segments that each border divides, summed
            both = share[around[2:]] - share[around[:-2]]
            ends.pop(int(np.argmax(crossing[ends] / np.maximum(both, 1e-12))))
        return [*ends, self.num_forward - 1]

    def _crossing(self) -> Floats:
        """Returns the bytes that cross from each forward operator to the next."""
        moving = self._last >= 0
        producer = self.graph.arrays.producer[moving]
        change = np.bincount(producer, self._size[moving], self.num_forward + 1)
        change -= np.bincount(self._last[moving], self._size[moving], self.num_forward + 1)
        return np.asarray(np.cumsum(change)[: self.num_forward], np.float64)

    def _shares(self) -> Floats:
        """Returns the share of the forward's cost, plus that of its bytes, before each operator.

        Shape (num_forward + 1,).
        """
        arrays, count = self.graph.arrays, self.num_forward
        written = arrays.write[: arrays.write_start[count]]
        size = np.bincount(arrays.producer[written], self._size[written], count)
        cost = arrays.cost_s[:count]
        both = cost / (cost.sum() or 1.0) + size / (size.sum() or 1.0)
        return np.concatenate([[0.0], np.cumsum(both)])

    def _backward(self) -> list[range]:
        producer, end = self.graph.arrays.producer, self.graph.num_operators
        segment_of = np.searchsorted(self.borders, producer)
        current = len(self.borders) - 1
        begins: dict[int, int] = {}

        for index in range(self.num_forward, end):
            read = [
                int(segment_of[v])
                for v in self.graph.operators[index].reads
                if self.is_droppable(v)
            ]
            current = min(current, max(read, default=current))
            begins.setdefault(current, index)

        ranges, stop = [], end
        for segment in range(len(self.borders)):
            begin = begins.get(segment, stop)
            ranges.append(range(begin, stop))
            stop = begin
        return ranges

    def _outside(self) -> list[int]:
        """Returns the bytes of `outside_bytes`, at the start of each segment's backward."""
        arrays, end = self.graph.arrays, self.graph.num_operators
        last = Accounting(self.graph).last_read(end)
        kept = np.isin(np.arange(len(last)), list(self.always)) | (
            arrays.producer >= self.num_forward
        )

        result = []
        for backward in self.backward:
            crosses = (
                kept
                & (arrays.producer >= 0)
                & (arrays.producer < backward.start)
                & (last >= backward.start)
            )
            result.append(self.graph.resident_bytes + int(self._size[crosses].sum()))
        return result
