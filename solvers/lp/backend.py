"""MILP backends: the interface with warm start and progress report, and HiGHS as one.

A backend takes arrays and returns points and a dual bound that is safe against tolerances
(`safe_bound`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from remat.solvers.lp import highs
from remat.solvers.lp.arrays import ModelArrays
from remat.solvers.lp.safe_bound import (
    LinearProgram,
    branching_margin,
    proves_infeasible,
    safe_bound,
)

Report = Callable[[float | None, float], None]  # objective of the best point so far, bound
_MAX_POINTS = 20  # returned at most, the last ones found; a round number, not measured


@dataclass(frozen=True)
class Answer:
    """What a backend found.

    Attributes:
        bound: no point of the model has a smaller objective; infinite where it has no point.
        points: feasible points, best first.
        is_finished: False where a limit stopped the backend.
    """

    bound: float
    points: tuple[NDArray[np.float64], ...]
    is_finished: bool


class Backend(Protocol):
    """A MILP solver."""

    def minimise(
        self,
        model: ModelArrays,
        *,
        gap: float,
        time_limit_s: float,
        start: NDArray[np.float64] | None = None,
        report: Report | None = None,
    ) -> Answer:
        """Returns an answer within `gap` (a fraction) or `time_limit_s`.

        NaN in `start` leaves a column open.
        """


@dataclass(frozen=True)
class Highs:
    """HiGHS through highspy.

    Attributes:
        threads: 0 leaves the number to HiGHS.
        max_nodes: node limit of branch and bound; 0 for none.
        tolerance: feasibility tolerance of rows and of integrality.
    """

    threads: int = 1
    max_nodes: int = 0
    tolerance: float = 1e-6

    def minimise(
        self,
        model: ModelArrays,
        *,
        gap: float,
        time_limit_s: float,
        start: NDArray[np.float64] | None = None,
        report: Report | None = None,
    ) -> Answer:
        """Returns HiGHS's best points and its dual bound, never its objective, as the bound."""
        if len(model.cost) == 0:
            return _without_columns(model)

        solver = self._solver(time_limit_s, mip_rel_gap=gap, mip_abs_gap=1e-6)
        program = _program(model)
        highs.pass_program(solver, program, model.is_integer, offset=model.offset)
        points: list[tuple[float, NDArray[np.float64]]] = []
        _listen(solver, points, report)
        if start is not None:
            known = np.flatnonzero(~np.isnan(start))
            solver.setSolution(len(known), known.astype(np.int32), start[known])

        highs.run(solver)
        if highs.is_infeasible(solver):
            return Answer(math.inf, (), True)

        if (point := highs.point_of(solver)) is not None:
            points.append((solver.getInfo().objective_function_value, point))
        ranked = sorted(points[-_MAX_POINTS:], key=lambda pair: pair[0])
        bound = self._bound(solver, model, ranked[0][0] if ranked else math.inf)
        return Answer(bound, tuple(point for _, point in ranked), highs.is_finished(solver))

    def _bound(self, solver: Any, model: ModelArrays, best: float) -> float:
        """Returns the dual bound.

        Columns without an upper bound are costs, so they are at most the best point's objective.
        """
        if not model.is_integer.any():
            return _dual_bound(solver, model)
        largest = max(best - model.offset, 1.0)
        return float(solver.getInfo().mip_dual_bound) - branching_margin(
            np.zeros(len(model.cost)), model.column_upper, self.tolerance, largest
        )

    def relax(self, model: ModelArrays, *, time_limit_s: float) -> Answer:
        """Returns the optimum of the LP relaxation, with the bound that its duals prove."""
        if len(model.cost) == 0:
            return _without_columns(model)
        solver, program = self._solver(time_limit_s), _program(model)
        highs.pass_program(solver, program, offset=model.offset)
        highs.run(solver)
        if highs.is_infeasible(solver):
            is_proved = proves_infeasible(solver, program)
            return Answer(math.inf if is_proved else -math.inf, (), is_proved)

        point = highs.point_of(solver)
        if point is None or not highs.is_finished(solver):
            return Answer(-math.inf, (), False)
        return Answer(_dual_bound(solver, model), (point,), True)

    def _solver(self, time_limit_s: float, **options: float) -> Any:
        if self.max_nodes:
            options["mip_max_nodes"] = self.max_nodes
        return highs.new_solver(
            threads=self.threads,
            time_limit=max(time_limit_s, 0.01),
            mip_feasibility_tolerance=self.tolerance,
            primal_feasibility_tolerance=min(self.tolerance, 1e-7),
            **options,
        )


def _program(model: ModelArrays) -> LinearProgram:
    columns, rows = len(model.cost), len(model.row_upper)
    return LinearProgram(
        cost=model.cost,
        lower=np.zeros(columns),
        upper=model.column_upper,
        row_lower=np.full(rows, -math.inf),
        row_upper=model.row_upper,
        row_start=model.row_start.astype(np.int64),
        index=model.index.astype(np.int64),
        value=model.value,
    )


def _dual_bound(solver: Any, model: ModelArrays) -> float:
    solution = solver.getSolution()
    return (
        model.offset + safe_bound(_program(model), np.array(solution.row_dual))
        if solution.dual_valid
        else -math.inf
    )


def _without_columns(model: ModelArrays) -> Answer:
    if (model.row_upper < 0).any():
        return Answer(math.inf, (), True)
    return Answer(model.offset, (np.zeros(0),), True)


def _listen(
    solver: Any, points: list[tuple[float, NDArray[np.float64]]], report: Report | None
) -> None:
    """Collects every improving point and reports progress."""

    def improved(event: Any) -> None:
        out = event.data_out
        points.append((float(out.objective_function_value), np.array(out.mip_solution)))

    def logged(event: Any) -> None:
        out = event.data_out
        cost = float(out.mip_primal_bound)
        if report is not None:
            report(cost if math.isfinite(cost) and cost < 1e29 else None, float(out.mip_dual_bound))

    solver.cbMipImprovingSolution += improved
    if report is not None:
        solver.cbMipLogging += logged
