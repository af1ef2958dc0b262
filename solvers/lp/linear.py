"""Mixed-integer programs from arrays, solved by HiGHS on one thread.

Models are built from arrays, not from expressions, so 20,000 rows take milliseconds. All
bounds are dual bounds, made safe against HiGHS's tolerances (`safe_bound`). An LP's bound is
recomputed from the duals and rounded down, even where a limit stopped the solve. A MIP's bound is
HiGHS's own, less what the tolerances can have added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import highspy
import numpy as np
from numpy.typing import NDArray

from remat.solvers.core.accounting import Floats, Ints
from remat.solvers.lp import highs
from remat.solvers.lp.safe_bound import (
    LinearProgram,
    Support,
    branching_margin,
    dual_rays,
    proves_infeasible,
    safe_bound,
    safe_support,
)


@dataclass(frozen=True)
class Outcome:
    """What a solve returns: a proved bound on the objective, and the best point if there is one.

    Attributes:
        bound: no point of the program has a smaller objective; `inf` where it has no point at all.
        point: values of the columns, or None.
        is_finished: False where a limit stopped the solve.
    """

    bound: float
    point: Floats | None
    is_finished: bool

    @property
    def is_infeasible(self) -> bool:
        """True where the program was proved to have no point."""
        return self.bound == math.inf


class Program:
    """A program to minimise, built row by row; rows have few entries.

    Attributes:
        starts_from_last: relaxations start from the last one's basis, without presolve; where rows
            were added, dual simplex repairs it. This pays below some 10,000 columns.
    """

    def __init__(self) -> None:
        self.starts_from_last = False
        # the last relaxation's solver and its numbers of columns and rows
        self._last: tuple[highspy.Highs, int, int] | None = None

        self._cost: list[Floats] = []
        self._lower: list[Floats] = []
        self._upper: list[Floats] = []
        self._is_integer: list[NDArray[np.bool_]] = []

        self._index: list[Ints] = []
        self._value: list[Floats] = []
        self._length: list[Ints] = []
        self._row_lower: list[Floats] = []
        self._row_upper: list[Floats] = []
        self._single: dict[int, Floats] = {}  # by row: the part of `_row_upper` from `add_row`

        self._fixed: tuple[Ints, Floats] = np.zeros(0, np.int64), np.zeros(0)
        self.num_columns = 0
        self.num_rows = 0

    @property
    def costs(self) -> Floats:
        """Coefficients of the objective, by column."""
        return np.concatenate([*self._cost, np.zeros(0)])

    def add_columns(
        self,
        cost: Floats,
        *,
        lower: Floats | None = None,
        upper: float = 1.0,
        is_integer: bool = True,
    ) -> Ints:
        """Adds one column per cost and returns their indices."""
        count = len(cost)
        self._cost.append(cost)
        self._lower.append(np.zeros(count) if lower is None else lower)
        self._upper.append(np.full(count, upper))
        self._is_integer.append(np.full(count, is_integer))
        self.num_columns += count
        return np.arange(self.num_columns - count, self.num_columns)

    def add_rows(
        self,
        columns: Ints,
        coefficients: Sequence[float],
        *,
        lower: float = -math.inf,
        upper: float = math.inf,
    ) -> None:
        """Adds rows with the same coefficients.

        `columns` has shape (rows, entries); -1 omits an entry.
        """
        is_there = columns >= 0
        self._index.append(columns[is_there])
        self._value.append(np.broadcast_to(np.array(coefficients), columns.shape)[is_there])
        self._length.append(is_there.sum(axis=1))
        self._row_lower.append(np.full(len(columns), lower))
        self._row_upper.append(np.full(len(columns), upper))
        self.num_rows += len(columns)

    def add_rows_of(
        self, entries: Sequence[Sequence[tuple[int, float]]], lower: Sequence[float]
    ) -> None:
        """Adds rows `lower <= sum of coefficient * x[column]`.

        Each row is a sequence of pairs (column, coefficient) with distinct columns.
        """
        self._index.append(np.array([column for row in entries for column, _ in row], np.int64))
        self._value.append(
            np.array([coefficient for row in entries for _, coefficient in row], np.float64)
        )
        self._length.append(np.array([len(row) for row in entries], np.int64))
        self._row_lower.append(np.array(lower, np.float64))
        self._row_upper.append(np.full(len(entries), math.inf))
        self.num_rows += len(entries)

    def add_row(self, columns: Ints, coefficients: Floats, *, upper: float) -> int:
        """Adds one row `coefficients @ x[columns] <= upper` and returns its index."""
        self._index.append(columns)
        self._value.append(coefficients)
        self._length.append(np.array([len(columns)]))
        self._row_lower.append(np.array([-math.inf]))
        self._row_upper.append(np.array([upper]))
        self._single[self.num_rows] = self._row_upper[-1]
        self.num_rows += 1
        return self.num_rows - 1

    def change_upper(self, row: int, upper: float) -> None:
        """Changes the upper side of a row that `add_row` made."""
        self._single[row][0] = upper
        if self._last is not None and row < self._last[2]:
            self._last[0].changeRowBounds(row, -math.inf, upper)

    def fix(self, columns: Ints, values: Floats) -> None:
        """Fixes these columns at `values` and frees those fixed before."""
        if self._last is not None:
            free = self._fixed[0]
            bounds = [
                (free, np.concatenate(self._lower)[free], np.concatenate(self._upper)[free]),
                (columns, values, values),
            ]
            for changed, lower, upper in bounds:
                self._last[0].changeColsBounds(len(changed), changed.astype(np.int32), lower, upper)
        self._fixed = columns, values

    def support(self, columns: Ints) -> Support | None:
        """Returns a bound as a function of fixed columns, from the duals of the last relaxation.

        It holds for all values of these columns. None without duals; needs `starts_from_last`.
        """
        if self._last is None:
            return None

        solver, program = self._last[0], self._arrays()
        if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            cost = np.zeros(self.num_columns)
            found = [safe_support(program, cost, ray, columns) for ray in dual_rays(solver)]
            return max(
                (replace(ray, is_ray=True) for ray in found),
                key=lambda ray: ray.at(program.lower[columns]),
                default=None,
            )

        solution = solver.getSolution()
        return (
            safe_support(program, program.cost, np.array(solution.row_dual), columns)
            if solution.dual_valid
            else None
        )

    def minimise(
        self,
        *,
        is_relaxed: bool,
        time_limit_s: float,
        relative_gap: float = 1e-6,
        node_limit: int = 10_000,
        cutoff: float | None = None,
    ) -> Outcome:
        """Minimises the costs; all columns are continuous where `is_relaxed`.

        Branch and bound ends at `relative_gap`, by default no smaller than HiGHS's tolerances, or
        after `node_limit` nodes, by default a round number.
        With a `cutoff`, points with a larger objective may be ignored, and the bound never exceeds
        the cutoff.
        """
        program = self._arrays()
        solver = self._loaded(program, is_relaxed=is_relaxed)

        # HiGHS's time limit counts all runs of a solver
        solver.setOptionValue("time_limit", solver.getRunTime() + max(time_limit_s, 0.01))
        solver.setOptionValue("mip_rel_gap", relative_gap)
        solver.setOptionValue("mip_max_nodes", node_limit)
        if cutoff is not None and not is_relaxed:
            solver.setOptionValue("objective_bound", cutoff)
        highs.does_run(solver)

        if (
            is_relaxed
            and solver.getModelStatus() == highspy.HighsModelStatus.kSolveError
            and self._last is not None
        ):
            self._last = None  # HiGHS failed from the last basis: start afresh
            solver = self._loaded(program, is_relaxed=True)
            solver.setOptionValue("time_limit", max(time_limit_s, 0.01))
            highs.does_run(solver)

        is_continuous = is_relaxed or not any(part.any() for part in self._is_integer)
        outcome = _read_relaxed(solver, program) if is_continuous else _read(solver, program)
        return (
            outcome
            if cutoff is None
            else Outcome(min(outcome.bound, cutoff), outcome.point, outcome.is_finished)
        )

    def _loaded(self, program: LinearProgram, *, is_relaxed: bool) -> highspy.Highs:
        """Returns a solver with the program: a new one, or the last relaxation's, updated."""
        if is_relaxed and self._last is not None:
            solver, columns, rows = self._last
            self._add_to(solver, program, columns, rows)
        else:
            solver = highs.new_solver()
            is_integer = None if is_relaxed else np.concatenate(self._is_integer)
            highs.pass_program(solver, program, is_integer)

        if is_relaxed and self.starts_from_last:
            self._last = solver, self.num_columns, self.num_rows
        return solver

    def _add_to(
        self, solver: highspy.Highs, program: LinearProgram, columns: int, rows: int
    ) -> None:
        """Adds the columns and rows after the first `columns` and `rows` to the solver."""
        if self.num_columns > columns:
            solver.addVars(
                self.num_columns - columns, program.lower[columns:], program.upper[columns:]
            )
            added = np.arange(columns, self.num_columns, dtype=np.int32)
            solver.changeColsCost(len(added), added, program.cost[columns:])

        if self.num_rows > rows:
            begin = program.row_start[rows]
            solver.addRows(
                self.num_rows - rows,
                program.row_lower[rows:],
                program.row_upper[rows:],
                len(program.index) - int(begin),
                (program.row_start[rows:-1] - begin).astype(np.int32),
                program.index[begin:].astype(np.int32),
                program.value[begin:],
            )

    def _arrays(self) -> LinearProgram:
        length = np.concatenate([*self._length, np.zeros(0, np.int64)])
        lower, upper = (
            np.concatenate([*parts, np.zeros(0)]) for parts in (self._lower, self._upper)
        )
        columns, values = self._fixed
        lower[columns] = upper[columns] = values

        return LinearProgram(
            cost=self.costs,
            lower=lower,
            upper=upper,
            row_lower=np.concatenate([*self._row_lower, np.zeros(0)]),
            row_upper=np.concatenate([*self._row_upper, np.zeros(0)]),
            row_start=np.concatenate([[0], np.cumsum(length)]),
            index=np.concatenate([*self._index, np.zeros(0, np.int64)]),
            value=np.concatenate([*self._value, np.zeros(0)]),
        )


def _read(solver: highspy.Highs, program: LinearProgram) -> Outcome:
    """Returns the outcome of branch and bound."""
    status, info = solver.getModelStatus(), solver.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        return Outcome(math.inf, None, True)

    tolerance = float(solver.getOptionValue("mip_feasibility_tolerance")[1])
    margin = branching_margin(program.lower, program.upper, tolerance, 1.0)
    return Outcome(
        float(info.mip_dual_bound) - margin,
        highs.point_of(solver),
        highs.is_finished(solver),
    )


def _read_relaxed(solver: highspy.Highs, program: LinearProgram) -> Outcome:
    """Returns the outcome of the simplex method; the bound is derived from its duals."""
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return Outcome(math.inf if proves_infeasible(solver, program) else -math.inf, None, True)
    solution = solver.getSolution()
    bound = safe_bound(program, np.array(solution.row_dual)) if solution.dual_valid else -math.inf
    return Outcome(bound, highs.point_of(solver), highs.is_finished(solver))
