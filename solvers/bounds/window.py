"""The window model: a small MILP whose optimum is a lower bound on all schedules in fixed order.

Cut the operators' order at *boundaries*; a window `w = [a, b)` runs from right after operator a - 1
to right after operator b - 1. All variables are binary; those that others imply are declared
continuous:

    S[a, i]   value i, written before a, is in memory at boundary a
    R[w, j]   operator j is recomputed at least once inside w
    A[w, i]   value i is in memory during all of w without being recomputed (implied, as is R of a
              window that others tile)

With m the sizes, c the costs, p(i) the operator that writes i, B the budget less the resident
bytes:

    min   sum c_j + sum over disjoint priced windows w, j of c_j R[w, j]
    (1)   S[b, i] <= S[a, i] + R[w, p(i)]           i written before a
    (2)   R[w, j] <= S[a, i] + R[w, p(i)]           j < a reads i
    (3)   S[a, i] + R[w, p(i)] >= 1                 an operator of w reads i, written before a
    (4)   R[w', j] <= R[w, j] <= sum of R[l, j]     windows w' inside w; priced windows l tile w
    (5)   A[w, i] >= S[b, i] - R[w, p(i)]
    (6)   for each operator v of w, at the moment of its first computation:
          m(writes) + workspace + m(reads) - reused
            + sum of m_i (1 - R[w, p(i)])   i written before v, not read by v, read in w after v
            + sum of m_i A[w, i]            i written before v, not read in w from v on
                                            (S[b, i] where v = b - 1)
          <= B

Every schedule of the fixed order maps to a feasible point that costs no more: S and R are read off;
the model pays an operator at most once per priced window; a value that is read again later in w is
either in memory at v or recomputed after v. So the optimum, and every dual bound of it, is a lower
bound for all of them. What an operator reuses in place (*reused*) is at most its largest candidate
that is not read later; a candidate that is read later counts only where it is recomputed. Values of
snapshots take no memory until no original operator reads them any more. From then on they are kept
for a recomputed reader, and count (`remat.core.schedule.effective_sizes`) if their total is large
enough to matter. Outputs are read once more at the end.

Rows (6) are added lazily. Tolerances: rows are solved for B (1 + 1e-6), and 1e-6 of the keep-all
cost is taken off each bound; where all costs are integers the bound is then rounded up. The bound
is HiGHS's dual bound, never an objective.

Limits: the model does not see transients of recomputing (memory between two original operators), so
at tight budgets the bound is below the optimum. Size: about two columns per operator and window.
Source: Checkmate (Jain et al., MLSys 2020) for S, R and the memory accounting; the aggregation over
windows is this package's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from remat.core.graph import Graph
from remat.solvers.core.accounting import Accounting, Floats, Ints
from remat.solvers.lp.linear import Outcome, Program
from remat.solvers.lp.rounding_cuts import Knapsack

Window = tuple[int, int]

_BUDGET_SLACK = 1e-6  # share of the budget by which rows may exceed it, for HiGHS's tolerances
_BOUND_MARGIN = 1e-6  # share of the keep-all cost that is taken off each bound, for the same
_COST_SCALE = 1000.0  # the keep-all cost in the objective, far above HiGHS's tolerance of 1e-6
# snapshots count from this share of the room that the largest operator leaves, so that other models
# stay small (traced steps: MobileNetV2 at its least budget needs them)
_LEAST_SNAPSHOTS = 0.01


class WindowModel:
    """The model over some windows; `LazyRows` adds memory rows where a point violates them."""

    def __init__(
        self,
        graph: Graph,
        windows: Sequence[Window],
        *,
        priced: Sequence[Window],
        budget_bytes: int,
        is_peak: bool = False,
    ) -> None:
        """Builds the model without memory rows, in O(windows * (V + E)).

        Args:
            graph: any graph.
            windows: pairs (a, b) of boundaries, 0 <= a < b <= n.
            priced: disjoint windows among them whose recomputations are paid for.
            budget_bytes: resident bytes included.
            is_peak: minimises the peak, as a share of the budget, in place of the cost; keeping
                everything must fit the budget.
        """
        self.graph = graph
        self.accounting = Accounting(graph)
        self.windows = tuple(windows)
        self.budget = float(max(budget_bytes - graph.resident_bytes, 1))
        self.cost_scale = _COST_SCALE / max(graph.cost_s, 1e-300)

        self.program = Program()
        self.peak_column = (
            int(self.program.add_columns(np.array([_COST_SCALE]), is_integer=False)[0])
            if is_peak
            else -1
        )

        self.keep: dict[int, Ints] = {}
        self.again: dict[Window, Ints] = {}
        self.through: dict[Window, Ints] = {}
        self.reserve = np.zeros(graph.num_operators)
        self.knapsacks: list[Knapsack] = []  # the memory rows, without reserves
        # a row's index, and its upper side without a reserve
        self._memory_rows: dict[tuple[Window, int], tuple[int, float]] = {}
        self._readers: dict[Window, Ints] = {}
        self._taken: dict[Window, tuple[Floats, Floats]] = {}

        for window in self.windows:
            self._add_columns(window, is_priced=window in priced)
        for window in self.windows:
            self._add_keep_rows(window)
            self._add_recompute_rows(window)
            self._add_read_rows(window)
            self._add_through_rows(window)
        self._add_nesting_rows(tuple(priced))

    def _add_columns(self, window: Window, *, is_priced: bool) -> None:
        start, end = window
        count, arrays = self.graph.num_operators, self.graph.arrays
        self._readers[window] = self.accounting.last_read(end)
        _, is_again = self.accounting.relevant(start)
        is_again[start:end] = ~arrays.is_pinned[start:end]
        chosen = np.flatnonzero(is_again)

        cost = (
            arrays.cost_s[chosen] * self.cost_scale
            if is_priced and self.peak_column < 0
            else np.zeros(len(chosen))
        )
        self.again[window] = self._scatter(
            count, chosen, self.program.add_columns(cost, is_integer=is_priced)
        )

        for boundary in {start, end} - {0, count} - set(self.keep):
            is_useful, _ = self.accounting.relevant(boundary)
            values = np.flatnonzero(is_useful)
            is_free = self._size_over(boundary)[values] == 0
            columns = self.program.add_columns(
                np.zeros(len(values)), lower=is_free.astype(np.float64)
            )
            self.keep[boundary] = self._scatter(len(is_useful), values, columns)

        if 0 < end < count:
            values = np.flatnonzero(self.keep[end] >= 0)
            columns = self.program.add_columns(np.zeros(len(values)), is_integer=False)
            self.through[window] = self._scatter(len(self.keep[end]), values, columns)

    def _size_over(self, boundary: int) -> Floats:
        """Returns the bytes that each value takes at a boundary.

        A snapshot takes memory only where all its later readers are recomputed ones.
        """
        if not self._do_snapshots_count:
            return self.accounting.size
        return np.where(
            self._last_read >= boundary, self.accounting.size, self.accounting.size_if_repeated
        )

    @cached_property
    def _last_read(self) -> Ints:
        return self.accounting.last_read(self.graph.num_operators)

    @cached_property
    def _do_snapshots_count(self) -> bool:
        """False where all snapshots take almost none of the room that any operator leaves.

        They then count as free and are always kept.
        """
        snapshots = (self.accounting.size_if_repeated - self.accounting.size).sum()
        return bool(
            snapshots > _LEAST_SNAPSHOTS * (self.budget - self.accounting.own.max(initial=0.0))
        )

    @staticmethod
    def _scatter(length: int, index: Ints, columns: Ints) -> Ints:
        result = np.full(length, -1)
        result[index] = columns
        return result

    def kept_columns(self, boundary: int) -> Ints:
        """Returns the column of S[boundary, i] for each value i, -1 where there is none."""
        return self.keep.get(boundary, np.full(len(self.graph.values), -1))

    def _again_of_value(self, window: Window) -> Ints:
        """Returns the column of R[window, p(i)] for each value i, -1 where there is none."""
        producer = self.graph.arrays.producer
        return np.where(producer >= 0, self.again[window][np.maximum(producer, 0)], -1)

    def _add_keep_rows(self, window: Window) -> None:
        """Adds (1) S[b, i] - S[a, i] - R[w, p(i)] <= 0."""
        start, end = window
        values = np.flatnonzero(
            (self.kept_columns(end) >= 0) & (self.graph.arrays.producer < start)
        )

        columns = np.stack(
            [
                self.kept_columns(end)[values],
                self.kept_columns(start)[values],
                self._again_of_value(window)[values],
            ],
            axis=1,
        )
        self.program.add_rows(columns, [1.0, -1.0, -1.0], upper=0.0)

    def _add_recompute_rows(self, window: Window) -> None:
        """Adds (2) R[w, j] - S[a, i] - R[w, p(i)] <= 0."""
        reader, read = self.accounting.reader, self.graph.arrays.read
        chosen = (reader < window[0]) & (self.again[window][reader] >= 0)
        value = read[chosen]

        columns = np.stack(
            [
                self.again[window][reader[chosen]],
                self.kept_columns(window[0])[value],
                self._again_of_value(window)[value],
            ],
            axis=1,
        )
        self.program.add_rows(columns, [1.0, -1.0, -1.0], upper=0.0)

    def _add_read_rows(self, window: Window) -> None:
        """Adds (3) S[a, i] + R[w, p(i)] >= 1."""
        start, end = window
        reader, read = self.accounting.reader, self.graph.arrays.read
        is_read = np.zeros(len(self.graph.values), np.bool_)
        is_read[read[(reader >= start) & (reader < end)]] = True
        if end == self.graph.num_operators:
            is_read[self.graph.arrays.output] = True

        value = np.flatnonzero(is_read & (self.graph.arrays.producer < start))
        columns = np.stack(
            [self.kept_columns(start)[value], self._again_of_value(window)[value]], axis=1
        )
        self.program.add_rows(columns, [1.0, 1.0], lower=1.0)

    def _add_nesting_rows(self, priced: tuple[Window, ...]) -> None:
        """Adds (4) R[w', j] <= R[w, j] <= sum of R[l, j] over the priced windows that tile w."""
        for outer in self.windows:
            inside = [
                w for w in self.windows if w != outer and outer[0] <= w[0] and w[1] <= outer[1]
            ]

            for inner in inside:
                if not any(w != inner and w[0] <= inner[0] and inner[1] <= w[1] for w in inside):
                    both = np.flatnonzero((self.again[inner] >= 0) & (self.again[outer] >= 0))
                    columns = np.stack([self.again[inner][both], self.again[outer][both]], axis=1)
                    self.program.add_rows(columns, [1.0, -1.0], upper=0.0)

            tiles = [p for p in priced if outer[0] <= p[0] and p[1] <= outer[1]]
            if outer not in priced and sum(b - a for a, b in tiles) == outer[1] - outer[0]:
                operators = np.flatnonzero(self.again[outer] >= 0)
                columns = np.stack([self.again[w][operators] for w in (outer, *tiles)], axis=1)
                self.program.add_rows(columns, [1.0] + [-1.0] * len(tiles), upper=0.0)

    def _add_through_rows(self, window: Window) -> None:
        """Adds (5) S[b, i] - R[w, p(i)] - A[w, i] <= 0."""
        if window not in self.through:
            return

        values = np.flatnonzero(self.through[window] >= 0)
        columns = np.stack(
            [
                self.kept_columns(window[1])[values],
                self._again_of_value(window)[values],
                self.through[window][values],
            ],
            axis=1,
        )
        self.program.add_rows(columns, [1.0, -1.0, -1.0], upper=0.0)

    @property
    def relative_limit(self) -> float:
        """Upper side of memory rows, as a multiple of the budget."""
        return 1 + _BUDGET_SLACK

    def limit(self, point: Floats) -> float:
        """Returns the bytes that `usage` may reach at `point`."""
        return self.budget * (
            float(point[self.peak_column]) if self.peak_column >= 0 else self.relative_limit
        )

    def objective(self, cost_s: float) -> float:
        """Returns the objective of a schedule that costs `cost_s`."""
        return (cost_s - self.graph.cost_s) * self.cost_scale

    def bound_s(self, outcome: Outcome) -> float:
        """Returns a lower bound on the cost of every schedule; `inf` where no schedule fits."""
        return self.bound_s_of(outcome.bound)

    def bound_s_of(self, objective: float) -> float:
        """Converts a lower bound on the objective to one on the cost of every schedule."""
        if not math.isfinite(objective):
            return objective if objective > 0 else self.graph.cost_s
        cost_s = self.graph.arrays.cost_s
        bound = self.graph.cost_s * (1 - _BOUND_MARGIN) + objective / self.cost_scale
        if self.graph.cost_s < 2**52 and bool((cost_s == np.floor(cost_s)).all()):
            bound = math.ceil(bound)
        return max(float(bound), self.graph.cost_s)

    def peak_bytes(self, outcome: Outcome) -> int:
        """Returns a lower bound on the peak of every schedule, resident bytes included."""
        share = (
            max(outcome.bound / _COST_SCALE - _BUDGET_SLACK, 0.0)
            if math.isfinite(outcome.bound)
            else 0.0
        )
        return self.graph.resident_bytes + math.floor(self.budget * share)

    def kept(self, point: Floats, least: float = 0.5) -> dict[int, Ints]:
        """Returns, for each boundary, the values whose S variable exceeds `least` at `point`."""
        return {
            boundary: np.flatnonzero(self.values_at(columns, point) > least)
            for boundary, columns in self.keep.items()
        }

    def usage(self, point: Floats, window: Window) -> Floats:
        """Returns the left sides of (6) in bytes for the operators of `window`.

        Reserves are included. Complexity: O(V + E).
        """
        start, end = window
        gone = self.values_at(self._again_of_value(window), point)
        last, producer, size = (
            self._readers[window],
            self.graph.arrays.producer,
            self.accounting.size,
        )

        count = end - start
        change = np.zeros(count + 1)
        chosen = np.flatnonzero(
            (producer >= 0) & (last > start) & (size > 0) & (last > producer + 1)
        )
        stay = size * (1 - gone)
        np.add.at(change, np.maximum(producer[chosen] + 1 - start, 0), stay[chosen])
        np.add.at(change, np.minimum(last[chosen], end) - start, -stay[chosen])
        if window in self.through:
            self._add_usage_through(point, window, change)

        usage = np.cumsum(change[:-1]) + self._own(window, gone) + self.reserve[start:end]
        reader, read = self.accounting.reader, self.graph.arrays.read
        again = (reader >= start) & (reader < end) & (last[read] > reader)
        usage -= np.bincount(reader[again] - start, stay[read[again]], count)
        return usage

    def _add_usage_through(self, point: Floats, window: Window, change: Floats) -> None:
        start, end = window
        last, producer, size = (
            self._readers[window],
            self.graph.arrays.producer,
            self._size_over(end),
        )
        through, kept = (
            self.values_at(self.through[window], point),
            self.values_at(self.kept_columns(end), point),
        )

        begin = np.maximum(np.maximum(producer, last) + 1, start) - start
        chosen = np.flatnonzero((self.through[window] >= 0) & (begin < end - start))
        np.add.at(change, begin[chosen], size[chosen] * through[chosen])
        change[-2] += float(np.dot(size[chosen], kept[chosen] - through[chosen]))

    def _own(self, window: Window, gone: Floats) -> Floats:
        """Returns the bytes of the operators' working sets, less what they may reuse in place."""
        start, end = window
        sure, excess = self._reused(window)
        taken = np.zeros(end - start)

        if len(excess):
            inside = slice(self.graph.arrays.reuse_start[start], self.graph.arrays.reuse_start[end])
            taken += np.bincount(
                self._reuser[inside] - start,
                (excess * gone[self.graph.arrays.reuse])[inside],
                end - start,
            )
        return np.asarray(self.accounting.own[start:end] - sure - taken)

    @cached_property
    def _reuser(self) -> Ints:
        """For each entry of `arrays.reuse`, the operator that may reuse it in place."""
        return np.repeat(
            np.arange(self.graph.num_operators), np.diff(self.graph.arrays.reuse_start)
        )

    def _reused(self, window: Window) -> tuple[Floats, Floats]:
        """Returns the bytes that operators of `window` may reuse in place.

        The first array, by operator, holds what is reused even where nothing is recomputed; the
        second, by entry of `arrays.reuse`, how much more where its value is recomputed.
        """
        if window not in self._taken:
            arrays, size, last = self.graph.arrays, self.accounting.size, self._readers[window]
            is_last = last[arrays.reuse] <= self._reuser
            sure = np.zeros(self.graph.num_operators)
            np.maximum.at(sure, self._reuser[is_last], size[arrays.reuse[is_last]])
            excess = np.where(
                is_last, 0.0, np.maximum(size[arrays.reuse] - sure[self._reuser], 0.0)
            )
            self._taken[window] = (sure[window[0] : window[1]], excess)
        return self._taken[window]

    @staticmethod
    def values_at(columns: Ints, point: Floats) -> Floats:
        """Returns the values of `columns` at `point`, 0 where a column is -1."""
        return np.where(columns >= 0, point[np.maximum(columns, 0)], 0.0)

    def add_memory_row(self, window: Window, v: int) -> None:
        """Adds row (6) of operator `v` of `window`, scaled by the budget."""
        coefficient, constant = self.memory_row(window, v)
        limit = self.budget * self.relative_limit
        if self.peak_column >= 0:
            coefficient[self.peak_column], limit = -self.budget, 0.0
        columns, upper = np.flatnonzero(coefficient), (limit - constant) / self.budget

        if self.peak_column < 0:
            bytes_, upper_bytes = (
                coefficient[columns].astype(np.int64),
                int(self.budget) - int(constant),
            )
            self.knapsacks.append(
                Knapsack(columns, bytes_, upper_bytes, self._written(window)[columns])
            )

        row = self.program.add_row(
            columns, coefficient[columns] / self.budget, upper=upper - self.reserve[v] / self.budget
        )
        self._memory_rows[window, v] = row, upper

    def _written(self, window: Window) -> Ints:
        """Returns, by column of `window`'s memory rows, the operator that writes its value."""
        written = np.full(self.program.num_columns, -1)
        for columns in (self.through.get(window), self.keep.get(window[1])):
            if columns is not None:
                written[columns[columns >= 0]] = self.graph.arrays.producer[columns >= 0]
        written[self.again[window][self.again[window] >= 0]] = np.flatnonzero(
            self.again[window] >= 0
        )
        return written

    def set_reserve(self, reserve: Floats) -> None:
        """Takes bytes off the budget at each operator; the model is then not a relaxation."""
        self.reserve = reserve
        for (_, v), (row, upper) in self._memory_rows.items():
            self.program.change_upper(row, upper - reserve[v] / self.budget)

    def memory_row(self, window: Window, v: int) -> tuple[Floats, float]:
        """Returns the left side of (6) in bytes: coefficients by column, and the constant."""
        arrays, size, last = self.graph.arrays, self.accounting.size, self._readers[window]
        is_read = np.zeros(len(size), np.bool_)
        is_read[arrays.read[arrays.read_start[v] : arrays.read_start[v + 1]]] = True
        is_held = (arrays.producer >= 0) & (arrays.producer < v) & ~is_read
        again = self._again_of_value(window)

        later = np.flatnonzero(is_held & (last > v))
        constant = float(self.accounting.own[v] + size[later].sum())
        coefficient = np.zeros(self.program.num_columns)
        np.add.at(coefficient, again[later[again[later] >= 0]], -size[later[again[later] >= 0]])

        if window in self.through:
            column = self.kept_columns(window[1]) if v == window[1] - 1 else self.through[window]
            over = np.flatnonzero(is_held & (last < v) & (column >= 0))
            np.add.at(coefficient, column[over], self._size_over(window[1])[over])

        sure, excess = self._reused(window)
        constant -= float(sure[v - window[0]])
        candidates = slice(arrays.reuse_start[v], arrays.reuse_start[v + 1])
        np.add.at(
            coefficient,
            again[arrays.reuse[candidates]],
            -np.where(again[arrays.reuse[candidates]] >= 0, excess[candidates], 0.0),
        )

        return coefficient, constant
