"""Moment rows: what a window of one operator needs while values are computed again for it.

The window model sees memory at the original operators only. In a window w = [v, v + 1) it can see more, as all that
runs there runs before v: at the moment in which operator j is computed again for the last time, in memory are what j
reads and writes, and much of what w ends with. With S and R of the window model, S' = S[v + 1] and, for each j:

    T[q] >= R[j] - S[v, i]                q writes i, which j reads: q was computed again before j
    T[q] >= T[p] - S[v, i]                q writes i, which p reads
    D[q] <= R[q], cost c_q                q is computed at least twice more in w; one for all j
    a[i] >= S'[i] - R[p(i)]               held through w (1 in place of S'[i] where v reads i)
    a[i] >= S'[i] + T[p(i)] - 1 - D[p(i)] computed again before j, once, and held since
    (m(reads of j) + m(writes of j) + workspace - reused) R[j] + sum over the others of m_i a_i <= B

No order and no number of recomputations is assumed, so every schedule of the fixed order satisfies them, and the model
stays a bound. Rows are added for those j whose own bytes are a good part of the budget; where values
are small next to it, the original operator's own row says nearly as much. Source: this package's own.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from .accounting import Bools, Floats, Ints
from .window import WindowModel

_TOLERANCE = 1e-6
_LEAST_SHARE = 0.2  # of the budget, in bytes that an operator itself needs, for it to get a row


class MomentRows:
    """The moment rows of the one-operator window [v, v + 1) of a model."""

    def __init__(self, model: WindowModel, v: int) -> None:
        self.model, self.v = model, v
        self.graph, self.size = model.graph, model.accounting.size
        self.again = model.again[v, v + 1]
        self.through = model.through.get((v, v + 1), np.full(len(self.size), -1))
        self.start, self.end = model.kept_columns(v), model.kept_columns(v + 1)
        arrays = self.graph.arrays
        self.is_read = np.zeros(len(self.size), np.bool_)
        self.is_read[arrays.read[arrays.read_start[v] : arrays.read_start[v + 1]]] = True
        self.is_held_after = (arrays.producer >= 0) & (arrays.producer < v) & (self.size > 0) & ((self.through >= 0) | self.is_read)
        self.twice: dict[int, int] = {}
        self.added: set[int] = set()

    def violated(self, point: Floats) -> list[tuple[float, int]]:
        """Returns (bytes over the budget, operator) of the rows that are not there yet and that `point` violates."""
        again, limit = self.model.values_at(self.again, point), self.model.budget * self.model.relative_limit
        found = []
        for j in np.flatnonzero(self._may_bind & (again > 0)).tolist():
            excess = self._usage(j, point, again) - limit
            if j not in self.added and excess > _TOLERANCE * self.model.budget:
                found.append((excess, j))
        return sorted(found, reverse=True)

    def _usage(self, j: int, point: Floats, again: Floats) -> float:
        """The left side of the row of `j`, with the least T and a that `point` allows."""
        size, producer, start = self.size, self.graph.arrays.producer, self.model.values_at(self.start, point)
        before = np.zeros(self.graph.num_operators)
        before[j] = again[j]
        for p in range(j, -1, -1):
            if before[p] > 0:
                values = self._reads(p)
                values = values[(producer[values] >= 0) & (self.again[producer[values]] >= 0)]
                np.maximum.at(before, producer[values], before[p] - start[values])
        before[j] = 0.0
        others = np.flatnonzero(self.is_held_after & ~self._is_own(j))
        makers = producer[others]
        after = np.where(self.is_read[others], 1.0, self.model.values_at(self.end[others], point))
        twice = np.array([point[self.twice[q]] if q in self.twice else 0.0 for q in makers.tolist()])
        held = np.maximum(after - again[makers], after + before[makers] - 1 - twice)
        return float(self._own_bytes[j] * again[j] + np.dot(size[others], np.maximum(held, 0.0)))

    @cached_property
    def _own_bytes(self) -> Floats:
        """What each operator reads, writes and works with, less what it may take over."""
        arrays = self.graph.arrays
        own = self.model.accounting.own.copy()
        for j in np.flatnonzero((self.again >= 0) & (np.diff(arrays.reuse_start) > 0)).tolist():
            own[j] -= self.size[arrays.reuse[arrays.reuse_start[j] : arrays.reuse_start[j + 1]]].max(initial=0.0)
        return own

    @cached_property
    def _may_bind(self) -> Bools:
        return (self.again >= 0) & (self._own_bytes >= _LEAST_SHARE * self.model.budget)

    def _is_own(self, j: int) -> Bools:
        """Which values `j` reads or writes."""
        arrays = self.graph.arrays
        is_own = np.zeros(len(self.size), np.bool_)
        is_own[self._reads(j)] = True
        is_own[arrays.write[arrays.write_start[j] : arrays.write_start[j + 1]]] = True
        return is_own

    def _reads(self, j: int) -> Ints:
        arrays = self.graph.arrays
        return arrays.read[arrays.read_start[j] : arrays.read_start[j + 1]]

    def add(self, j: int) -> None:
        """Adds the row of operator `j`."""
        arrays, size = self.graph.arrays, self.size
        before = self._before(j)
        self.added.add(j)
        entries: dict[int, float] = {int(self.again[j]): float(self._own_bytes[j])}
        constant = 0.0
        for value in np.flatnonzero(self.is_held_after & ~self._is_own(j)).tolist():
            again = int(self.again[arrays.producer[value]])
            if int(arrays.producer[value]) in before:
                entries[self._held(value, before[int(arrays.producer[value])])] = size[value]
            elif not self.is_read[value]:
                entries[int(self.through[value])] = size[value]
            else:
                constant += size[value]
                if again >= 0:
                    entries[again] = entries.get(again, 0.0) - size[value]
        columns, coefficients = np.array(list(entries)), np.array(list(entries.values()))
        budget = self.model.budget
        self.model.program.add_row(columns, coefficients / budget, upper=self.model.relative_limit - constant / budget)

    def _before(self, j: int) -> dict[int, int]:
        """The columns of T by operator, for what may have to be computed again before `j`."""
        program, producer = self.model.program, self.graph.arrays.producer
        columns: dict[int, int] = {j: int(self.again[j])}
        stack = [j]
        while stack:
            p = stack.pop()
            for value in self._reads(p).tolist():
                q = int(producer[value])
                if q < 0 or self.again[q] < 0:
                    continue
                if q not in columns:
                    columns[q] = int(program.add_columns(np.zeros(1))[0])
                    stack.append(q)
                row = np.array([[columns[p], columns[q], self.start[value]]])
                program.add_rows(row, [1.0, -1.0, -1.0], upper=0.0)
        del columns[j]
        return columns

    def _held(self, value: int, before: int) -> int:
        """The column of a[i] for a value that may have been computed again before j."""
        program, producer = self.model.program, int(self.graph.arrays.producer[value])
        column = int(program.add_columns(np.zeros(1))[0])
        after, constant = (-1, 1.0) if self.is_read[value] else (int(self.end[value]), 0.0)
        program.add_rows(np.array([[after, self.again[producer], column]]), [1.0, -1.0, -1.0], upper=-constant)
        row = np.array([[after, before, self._twice(producer), column]])
        program.add_rows(row, [1.0, 1.0, -1.0, -1.0], upper=1.0 - constant)
        return column

    def _twice(self, operator: int) -> int:
        if operator not in self.twice:
            program = self.model.program
            cost = np.array([float(self.graph.arrays.cost_s[operator]) * self.model.cost_scale])
            self.twice[operator] = int(program.add_columns(cost)[0])
            program.add_rows(np.array([[self.twice[operator], self.again[operator]]]), [1.0, -1.0], upper=0.0)
        return self.twice[operator]
