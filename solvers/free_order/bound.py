"""Lower bounds that hold in every order, from the memory that the dependencies alone force.

Let v be an operator, t the step of its first computation, and i a value whose producer comes before
v and which an operator after v reads, both in every order (by the dependencies, and with the
forward before the backward). The reader's first computation is after t, so i is held across t or
recomputed after t. With h = 1 where a value is held across t, r = 1 where an operator before v is
computed after t, x = 1 where an operator is computed twice or more:

    min  sum_j c_j (1 + x_j)
         h[v, i] + r[v, producer of i] >= 1              i forced: a reader comes after v
         r[v, j] <= h[v, p] + r[v, producer of p]        each p that j reads is held or recomputed
         own(v) + sum_{i not read by v} m_i h[v, i] <= B     own: reads, writes and workspace of v
         r[v, j] <= x_j

Every schedule within B gives a point that costs no more, whatever its order. So the optimum, and
any dual bound, is a lower bound for all of them, and a program without a feasible point proves that
nothing fits. The program has a few operators v at once, those that force the most. The bound is
weak where a graph is wide, as values that may be computed late are not forced to be held anywhere.

B is enlarged by 1e-6, and the bound lowered by as much, against the LP solver's tolerances.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from remat.core.graph import Graph
from remat.solvers.core.accounting import Accounting, Bools, Floats, Ints
from remat.solvers.lp.linear import Outcome, Program

_SLACK = 1e-6
_SCALE = 1_000.0  # the keep-all cost in the objective, far above HiGHS's tolerance of 1e-6
_MOST_CANDIDATES = 2_000  # operators whose forced bytes are counted; round, not measured
_NUM_MOMENTS = 6  # operators v in one program, at most; not measured


@dataclass(frozen=True)
class ForcedMemory:
    """The memory that is forced at the first computation of an operator, in any order."""

    graph: Graph

    @cached_property
    def accounting(self) -> Accounting:
        """The graph's bytes that count."""
        return Accounting(self.graph)

    @cached_property
    def own(self) -> Floats:
        """Bytes of each operator's reads, writes and workspace, less what it may reuse in place."""
        arrays, own = self.graph.arrays, self.accounting.own.copy()
        for v in range(self.graph.num_operators):
            candidates = arrays.reuse[arrays.reuse_start[v] : arrays.reuse_start[v + 1]]
            own[v] -= self.accounting.size[candidates].max(initial=0.0)
        return own

    @cached_property
    def _ancestors(self) -> list[int]:
        """The operators before each in every order, as bits; O(E n / 64)."""
        bits: list[int] = []
        forward = 0

        for v, parents in enumerate(self.graph.parents_of):
            found = forward if self.graph.arrays.is_backward[v] else 0
            for p in parents:
                found |= bits[p] | 1 << p
            bits.append(found)
            forward |= 0 if self.graph.arrays.is_backward[v] else 1 << v
        return bits

    @cached_property
    def _descendants(self) -> list[int]:
        """The operators after each in every order, as bits; O(E n / 64)."""
        count, backward = self.graph.num_operators, 0
        bits = [0] * count
        for v in reversed(range(count)):
            bits[v] |= 0 if self.graph.arrays.is_backward[v] else backward
            backward |= 1 << v if self.graph.arrays.is_backward[v] else 0
            for p in self.graph.parents_of[v]:
                bits[p] |= bits[v] | 1 << v
        return bits

    def _mask(self, bits: int) -> Bools:
        count = self.graph.num_operators
        packed = np.frombuffer(bits.to_bytes(count // 8 + 1, "little"), np.uint8)
        return np.unpackbits(packed, count=count, bitorder="little").astype(np.bool_)

    def before(self, v: int) -> Bools:
        """Returns a mask of the operators first computed before `v` in every order."""
        return self._mask(self._ancestors[v])

    def forced(self, v: int) -> Bools:
        """Returns a mask of values held across `v`'s first computation or recomputed after it."""
        arrays, before, after = self.graph.arrays, self.before(v), self._mask(self._descendants[v])
        is_read_after = np.zeros(len(arrays.size_bytes), np.bool_)
        is_read_after[arrays.read[after[self.accounting.reader]]] = True
        is_read_after[arrays.output] = True
        return is_read_after & (arrays.producer >= 0) & before[np.maximum(arrays.producer, 0)]

    def beside(self, v: int) -> Floats:
        """Returns the bytes of each value, 0 for those that `v` reads."""
        arrays, size = self.graph.arrays, self.accounting.size.copy()
        size[arrays.read[arrays.read_start[v] : arrays.read_start[v + 1]]] = 0.0
        return size

    def moments(self, room: int) -> list[int]:
        """Returns a few operators that force more than `room`.

        The one that forces most comes first; the others are spread over the graph.
        """
        count = self.graph.num_operators
        candidates = np.unique(
            np.linspace(0, count - 1, min(count, _MOST_CANDIDATES)).astype(np.int64)
        )
        if 0 < self.graph.num_forward < count:
            candidates = np.union1d(candidates, [self.graph.num_forward])

        needed = np.array([self.own[v] + self.beside(v)[self.forced(v)].sum() for v in candidates])
        over = candidates[needed > room]
        if len(over) == 0:
            return []

        spread = over[
            np.linspace(0, len(over) - 1, min(len(over), _NUM_MOMENTS - 1)).astype(np.int64)
        ]
        most = int(candidates[int(np.argmax(needed))])
        return [most, *(int(v) for v in np.unique(spread) if v != most)]


def order_bound_s(graph: Graph, budget_bytes: int, *, time_limit_s: float) -> float:
    """Returns a lower bound on every schedule within the budget, in any order.

    `inf` where it proves that none fits.
    """
    if graph.num_operators == 0:
        return graph.cost_s if graph.resident_bytes <= budget_bytes else math.inf

    forced, room = ForcedMemory(graph), budget_bytes - graph.resident_bytes
    if float(forced.own.max()) > room:
        return math.inf

    bound_s, moments = graph.cost_s, forced.moments(room)
    for chosen in (moments[:1], moments) if moments else ():
        outcome = _program(forced, chosen, room).minimise(
            is_relaxed=False, time_limit_s=time_limit_s / 2, relative_gap=1e-4
        )
        bound_s = max(bound_s, _in_seconds(graph, outcome))
    return bound_s


def _program(forced: ForcedMemory, moments: Iterable[int], room: int) -> Program:
    graph, program = forced.graph, Program()
    cost = graph.arrays.cost_s * (_SCALE / (graph.cost_s or 1.0))
    twice = program.add_columns(cost)
    for v in moments:
        _add_moment(forced, program, v, twice, max(room, 1))
    return program


def _add_moment(forced: ForcedMemory, program: Program, v: int, twice: Ints, room: int) -> None:
    graph, before = forced.graph, forced.before(v)
    arrays = graph.arrays
    values = np.flatnonzero((arrays.producer >= 0) & before[np.maximum(arrays.producer, 0)])
    operators = np.flatnonzero(before & ~arrays.is_pinned)

    held, again = np.full(len(arrays.size_bytes), -1), np.full(graph.num_operators, -1)
    held[values] = program.add_columns(np.zeros(len(values)))
    again[operators] = program.add_columns(np.zeros(len(operators)))

    needed = np.flatnonzero(forced.forced(v))
    program.add_rows(
        np.stack([held[needed], again[arrays.producer[needed]]], axis=1), (1.0, 1.0), lower=1.0
    )

    is_again = again[forced.accounting.reader] >= 0
    read, reader = arrays.read[is_again], forced.accounting.reader[is_again]
    program.add_rows(
        np.stack([again[reader], held[read], again[arrays.producer[read]]], axis=1),
        (1.0, -1.0, -1.0),
        upper=0.0,
    )
    program.add_rows(np.stack([again[operators], twice[operators]], axis=1), (1.0, -1.0), upper=0.0)

    weighty = values[forced.beside(v)[values] > 0]
    left = (1 + _SLACK) - forced.own[v] / room
    program.add_row(held[weighty], forced.beside(v)[weighty] / room, upper=float(left))


def _in_seconds(graph: Graph, outcome: Outcome) -> float:
    if not math.isfinite(outcome.bound):
        return outcome.bound if outcome.bound > 0 else graph.cost_s
    bound_s = graph.cost_s * (1 - _SLACK) + outcome.bound * graph.cost_s / _SCALE
    cost_s = graph.arrays.cost_s
    if graph.cost_s < 2**52 and bool((cost_s == np.floor(cost_s)).all()):
        bound_s = float(math.ceil(bound_s))
    return max(bound_s, graph.cost_s)
