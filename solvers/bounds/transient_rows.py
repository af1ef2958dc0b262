"""Moment rows: the memory of a window of one operator while values are recomputed for it.

The window model sees memory only at the original operators. In a window w = [v, v + 1) it can see
more, as all recomputations there run before v: the moment at which operator j is recomputed for the
last time cuts the window in two. With S, R of the window model, S' = S[v + 1], and for each
operator q that may be recomputed in w and each value i:

    T[q], L[q]   q is recomputed in w before the moment, after it (later)
    a[i]         value i is in memory at the moment
    D[q]         q is recomputed at least twice in w, at cost c_q; shared by all j

    a[i] <= S[i] + T[p(i)]         in memory from the start, or computed before the moment
    T[q] <= S[i] + T[p(i)]         q reads i
    L[q] <= a[i] + L[p(i)]         q reads i
    a[i] + L[p(i)] >= S'[i]        held over the window's end (1 for S'[i] where v reads i)
    a[i] >= R[j]                   j reads i
    T[q] <= R[q],  L[q] <= R[q],  T[q] + L[q] <= 1 + D[q] <= 1 + R[q],  T[j] = R[j],  L[j] = 0
    (m(reads of j) + m(writes of j) + workspace - reused) R[j] + sum over the others of m_i a_i <= B

The rows assume no order and no number of recomputations: every schedule of the fixed order has such
a moment (the window's start, with a = S and L = R, where j is not recomputed in w), so the model
remains a relaxation. T and L exist only for a chosen set of operators, those that the violating
point recomputes in w. Others have R in their place, which is weaker and keeps the rows few; j may
be added again with a larger set. A moment is violated where the least memory that the point allows
there, a linear program over the set, exceeds the budget.

Moments are added for operators j whose own bytes are a substantial part of the budget. Where values
are small, the original operator's own row is nearly as strong. Source: this package's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from remat.solvers.bounds.window import WindowModel
from remat.solvers.core.accounting import Bools, Floats
from remat.solvers.core.interrupt import is_past
from remat.solvers.lp.linear import Program
from remat.solvers.lp.rounding_cuts import Knapsack

# values of columns and violations of rows up to this count as 0; HiGHS is no more exact
_TOLERANCE = 1e-6
_LEAST_EXCESS = 10 * _TOLERANCE  # of the budget; moments violated by less are not added; not tuned
# of the budget; operators that need fewer bytes get no moment; a prototype had 0.2, and no
# measurement of the present value is on record
_LEAST_SHARE = 0.1
# how often one operator's moment may be added, each time with a larger set; not measured
_MOST_TIMES = 4
_LIMIT_S = 10.0  # seconds for the small linear program of one moment; round, not measured

Key = tuple[str, int]  # one of S, E (for S'), R, D, T, L, a; the operator or value


@dataclass(frozen=True, slots=True)
class _Row:
    """The row `sum of coefficient * key >= lower`."""

    entries: tuple[tuple[Key, float], ...]
    lower: float = 0.0


class MomentRows:
    """The moments of the one-operator window [v, v + 1) of a model."""

    def __init__(self, model: WindowModel, v: int) -> None:
        self.model, self.v = model, v
        self.graph, self.size = model.graph, model.accounting.size
        self.again = model.again[v, v + 1]
        self.start, self.end = model.kept_columns(v), model.kept_columns(v + 1)

        arrays = self.graph.arrays
        self.is_read = np.zeros(len(self.size), np.bool_)
        self.is_read[arrays.read[arrays.read_start[v] : arrays.read_start[v + 1]]] = True
        is_kept = (self.end >= 0) | self.is_read
        self.held_after = np.flatnonzero(
            (arrays.producer >= 0) & (arrays.producer < v) & (self.size > 0) & is_kept
        )

        self.twice: dict[int, int] = {}
        self.knapsacks: list[Knapsack] = []  # the moments' memory rows
        # operator -> how often its moment was added, the operators of its set
        self.sets: dict[int, tuple[int, set[int]]] = {}

    def violated(self, point: Floats, *, deadline: float = math.inf) -> list[tuple[float, int]]:
        """Returns (bytes over the budget, operator) of the moments that `point` violates.

        The worst come first; moments not checked by the deadline are missing.
        """
        again, limit = (
            self.model.values_at(self.again, point),
            self.model.budget * self.model.relative_limit,
        )

        chosen = set(np.flatnonzero(again > _TOLERANCE).tolist())
        found = []
        for j in np.flatnonzero(self._may_bind & (again > _TOLERANCE)).tolist():
            if is_past(deadline):
                break

            times, known = self.sets.get(j, (0, set()))
            if times < _MOST_TIMES and not chosen <= known:
                excess = self._least_usage(j, chosen, point) - limit
                if excess > _LEAST_EXCESS * self.model.budget:
                    found.append((excess, j))
        return sorted(found, reverse=True)

    def add_at(self, j: int, point: Floats) -> None:
        """Adds the moment of operator `j`; its set is what `point` recomputes in the window."""
        self.add(
            j, set(np.flatnonzero(self.model.values_at(self.again, point) > _TOLERANCE).tolist())
        )

    def add(self, j: int, chosen: set[int]) -> None:
        """Adds the moment of operator `j`; its set is `chosen` and its earlier set."""
        program = self.model.program
        times, known = self.sets.get(j, (0, set()))
        chosen = known | chosen
        self.sets[j] = (times + 1, chosen)
        own: dict[Key, int] = {}

        def column_of(key: Key) -> int:
            kind, index = key
            if kind == "D":
                return self._twice(index)
            if kind in "SER":
                return int({"S": self.start, "E": self.end, "R": self.again}[kind][index])
            if key not in own:
                own[key] = int(program.add_columns(np.zeros(1), is_integer=False)[0])
            return own[key]

        budget = self.model.budget
        usage = _Row(
            tuple((key, -size / budget) for key, size in self._usage(j, chosen)),
            lower=-self.model.relative_limit,
        )

        rows = [*self._rows(j, chosen), usage]
        entries = [self._merged(row.entries, column_of) for row in rows]
        program.add_rows_of(entries, [row.lower for row in rows])

        columns, shares = (np.array(side) for side in zip(*entries[-1], strict=True))
        producer = self.graph.arrays.producer
        written = {
            column_of((kind, index)): index if kind == "R" else int(producer[index])
            for (kind, index), _ in usage.entries
        }
        ranks = np.array([written[column] for column in columns.tolist()])
        self.knapsacks.append(
            Knapsack(columns, np.rint(shares * -budget).astype(np.int64), int(budget), ranks)
        )

    @staticmethod
    def _merged(
        entries: Sequence[tuple[Key, float]], column_of: Callable[[Key], int]
    ) -> list[tuple[int, float]]:
        """Returns the row's coefficients by column, without variables fixed at 0."""
        merged: dict[int, float] = {}
        for key, coefficient in entries:
            column = column_of(key)
            if column >= 0:
                merged[column] = merged.get(column, 0.0) + coefficient
        return list(merged.items())

    def _least_usage(self, j: int, chosen: set[int], point: Floats) -> float:
        """Returns the least memory in bytes that `point` allows at the moment of `j`.

        Infinite where the moment's rows have no solution.
        """
        given = {
            "S": self.model.values_at(self.start, point),
            "E": self.model.values_at(self.end, point),
        }
        given["R"] = self.model.values_at(self.again, point)

        constant, cost = 0.0, dict[Key, float]()
        for key, size in self._usage(j, chosen):
            if key[0] in given:
                constant += size * float(given[key[0]][key[1]])
            else:
                cost[key] = size

        own: dict[Key, int] = {}
        rows, lowers = list[list[tuple[int, float]]](), list[float]()

        for row in self._rows(j, chosen):
            left = self._at(row, given, point)
            if left.entries:
                rows.append(
                    [(own.setdefault(key, len(own)), factor) for key, factor in left.entries]
                )
                lowers.append(left.lower - _TOLERANCE)
            elif left.lower > _TOLERANCE:
                return math.inf

        if not own:
            return constant

        program = Program()
        program.add_columns(
            np.array([cost.get(key, 0.0) for key in own]) / self.model.budget, is_integer=False
        )
        program.add_rows_of(rows, lowers)
        outcome = program.minimise(is_relaxed=True, time_limit_s=_LIMIT_S)
        return outcome.bound * self.model.budget + constant

    def _at(self, row: _Row, given: Mapping[str, Floats], point: Floats) -> _Row:
        """Returns what `point` leaves of a row: the entries that it does not fix.

        `given` has the values of S', S and R at the point.
        """
        lower, entries = row.lower, list[tuple[Key, float]]()
        for key, coefficient in row.entries:
            kind, index = key
            if kind in given:
                lower -= coefficient * float(given[kind][index])
            elif kind == "D":
                lower -= coefficient * (
                    float(point[self.twice[index]]) if index in self.twice else 0.0
                )
            else:
                entries.append((key, coefficient))
        return _Row(tuple(entries), lower)

    def _rows(self, j: int, chosen: set[int]) -> Iterator[_Row]:
        """Yields all rows of the moment but the memory row."""
        for q in sorted(chosen - {j}):
            yield _Row(((("R", q), 1.0), (("T", q), -1.0)))
            yield _Row(((("R", q), 1.0), (("L", q), -1.0)))
            yield _Row(((("D", q), 1.0), (("T", q), -1.0), (("L", q), -1.0)), lower=-1.0)
            for value in self._reads(q):
                yield _Row(((("T", q), -1.0), (("S", value), 1.0), *self._before(value, j, chosen)))
                yield _Row(((("L", q), -1.0), (("a", value), 1.0), *self._later(value, j, chosen)))

        for value in self._reads(j):
            yield _Row(((("a", value), 1.0), (("R", j), -1.0)))
        for value in self._values(j, chosen):
            yield _Row(((("a", value), -1.0), (("S", value), 1.0), *self._before(value, j, chosen)))

        for value in self.held_after.tolist():
            if int(self.graph.arrays.producer[value]) != j:
                entries = ((("a", value), 1.0), *self._later(value, j, chosen))
                yield (
                    _Row(entries, lower=1.0)
                    if self.is_read[value]
                    else _Row((*entries, (("E", value), -1.0)))
                )

    def _usage(self, j: int, chosen: set[int]) -> Iterator[tuple[Key, float]]:
        """Yields the left side of the memory row, in bytes."""
        yield ("R", j), float(self._own_bytes[j])
        arrays = self.graph.arrays
        own = {
            *self._reads(j),
            *arrays.write[arrays.write_start[j] : arrays.write_start[j + 1]].tolist(),
        }

        for value in self._values(j, chosen):
            if value not in own and self.size[value] > 0:
                yield ("a", value), float(self.size[value])

    def _before(self, value: int, j: int, chosen: set[int]) -> tuple[tuple[Key, float], ...]:
        """Returns T of the operator that writes `value`, R where it has no T."""
        producer = int(self.graph.arrays.producer[value])
        return (
            ((("T", producer) if producer in chosen and producer != j else ("R", producer)), 1.0),
        )

    def _later(self, value: int, j: int, chosen: set[int]) -> tuple[tuple[Key, float], ...]:
        """Returns L of the operator that writes `value`, R where it has no L; nothing for j."""
        producer = int(self.graph.arrays.producer[value])
        return (
            ()
            if producer == j
            else (((("L", producer) if producer in chosen else ("R", producer)), 1.0),)
        )

    def _values(self, j: int, chosen: set[int]) -> list[int]:
        """Returns the values that have an a: those held afterwards, and those the set reads."""
        return sorted(
            {
                *self.held_after.tolist(),
                *self._reads(j),
                *(value for q in chosen for value in self._reads(q)),
            }
        )

    def _reads(self, j: int) -> list[int]:
        """Returns the values that `j` reads and that were written before v."""
        arrays = self.graph.arrays
        read = arrays.read[arrays.read_start[j] : arrays.read_start[j + 1]]
        return [int(value) for value in read if arrays.producer[value] < self.v]

    @cached_property
    def _own_bytes(self) -> Floats:
        """Bytes of each operator's reads, writes and workspace, less what it may reuse in place."""
        arrays = self.graph.arrays
        own = self.model.accounting.own.copy()
        for j in np.flatnonzero((self.again >= 0) & (np.diff(arrays.reuse_start) > 0)).tolist():
            own[j] -= self.size[
                arrays.reuse[arrays.reuse_start[j] : arrays.reuse_start[j + 1]]
            ].max(initial=0.0)
        return own

    @cached_property
    def _may_bind(self) -> Bools:
        return (self.again >= 0) & (self._own_bytes >= _LEAST_SHARE * self.model.budget)

    def _twice(self, operator: int) -> int:
        if operator not in self.twice:
            program = self.model.program
            cost = np.array([float(self.graph.arrays.cost_s[operator]) * self.model.cost_scale])
            self.twice[operator] = int(program.add_columns(cost)[0])
            program.add_rows(
                np.array([[self.twice[operator], self.again[operator]]]), [1.0, -1.0], upper=0.0
            )
        return self.twice[operator]
