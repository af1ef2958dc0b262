"""The Checkmate MILP through PuLP: the same model for people who have another MILP solver.

Only the call of the solver differs from `milp`; papers, class and guarantees are the same. PuLP
reports no dual bound, so there is a bound only where the solver ended by itself: the objective
less the requested gap. Models are passed as expressions, which takes seconds where `milp` needs
milliseconds.

Imperfections: no warm start, no progress during a solve. The tolerances are the backend's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from remat.core.errors import SolverError
from remat.core.graph import Graph
from remat.core.solution import Solution
from remat.solvers.checkmate.milp import quick_schedules, solve_exactly
from remat.solvers.checkmate.stage_search import Limits
from remat.solvers.core.base import Solver
from remat.solvers.core.progress import ProgressCallback
from remat.solvers.lp.arrays import ModelArrays
from remat.solvers.lp.backend import Answer, Report

_SMALLEST_GAP = 1e-9  # several of PuLP's interfaces take 0 for "not given"


@final
@dataclass(frozen=True)
class PuLPMILP(Solver):
    """The Checkmate MILP through PuLP.

    Attributes:
        backend: PuLP's name of a solver, as `pulp.listSolvers()` gives them: `HiGHS`, `GUROBI`,
            `CPLEX_PY`, `COIN_CMD`, `SCIP_CMD`, ...
        gap: stop where the cost is proved within this fraction of the optimum.
        time_limit_s: stop after this long, with the best schedule and bound so far.
        threads: of the backend; 0 leaves the number to it.
        incumbent: steps of a known schedule to compare with.
        progress: called with the best cost and bound so far, between solves.
    """

    backend: str = "HiGHS"
    gap: float = 0.0
    time_limit_s: float = 60.0
    threads: int = 1
    incumbent: tuple[int, ...] = field(default=(), repr=False)
    progress: ProgressCallback | None = field(default=None, repr=False, compare=False)

    def solve(self, graph: Graph, *, budget_bytes: int) -> Solution:
        """Returns the optimum, or the best schedule within the limits with a valid bound.

        Raises:
            SolverError: the graph is too large for the model, or PuLP or the backend is not
                installed.
        """
        backend = PuLP(self.backend, self.threads)
        backend.check()
        limits = Limits(self.gap, self.time_limit_s)
        starts = chain([self.incumbent], quick_schedules(graph, budget_bytes))
        return solve_exactly(
            graph, budget_bytes, backend, limits, starts, solver=repr(self), progress=self.progress
        )


@dataclass(frozen=True)
class PuLP:
    """A PuLP solver by name, as a backend of the stage models."""

    name: str
    threads: int = 1

    def check(self) -> None:
        """Raises `SolverError` where the backend is unknown to PuLP or not installed."""
        pulp = _import_pulp()
        if self.name not in pulp.listSolvers():
            raise SolverError(
                f"PuLP knows no solver called {self.name!r}; give backend= one of "
                f"{', '.join(pulp.listSolvers())}"
            )

        if self.name not in pulp.listSolvers(onlyAvailable=True):
            available = ", ".join(pulp.listSolvers(onlyAvailable=True)) or "none"
            raise SolverError(
                f"PuLP's solver {self.name!r} is not installed: install its package or program "
                "(`pip install highspy` for HiGHS, `pip install gurobipy` for GUROBI, `pip "
                "install pulp[cbc]` for CBC), "
                f"or name one that is installed ({available})"
            )

    def minimise(
        self,
        model: ModelArrays,
        *,
        gap: float,
        time_limit_s: float,
        start: NDArray[np.float64] | None = None,
        report: Report | None = None,
    ) -> Answer:
        """Returns the solver's last point; the bound is -inf unless it ended by itself."""
        del start, report
        pulp = _import_pulp()
        gap = max(gap, _SMALLEST_GAP)
        problem, columns = _problem(pulp, model)
        options = {"threads": self.threads} if self.threads else {}

        problem.solve(
            pulp.getSolver(
                self.name, msg=False, gapRel=gap, timeLimit=max(time_limit_s, 1.0), **options
            )
        )

        if problem.status == pulp.LpStatusInfeasible:
            return Answer(math.inf, (), True)
        if (
            all(column.varValue is None for column in columns)
            or problem.status != pulp.LpStatusOptimal
        ):
            return Answer(-math.inf, (), False)

        point = np.array([column.varValue or 0.0 for column in columns])  # None: a column in no row
        is_finished = problem.sol_status == pulp.LpSolutionOptimal
        objective = float(model.cost @ point) + model.offset
        bound = objective - gap * abs(objective) - 1e-6 if is_finished else -math.inf
        return Answer(bound, (point,) if is_feasible(model, point) else (), is_finished)


def is_feasible(model: ModelArrays, point: NDArray[np.float64], *, tolerance: float = 1e-5) -> bool:
    """Returns whether a point satisfies rows, bounds and integrality.

    After a time limit some interfaces return points that do not.
    """
    rows = np.repeat(np.arange(len(model.row_upper)), np.diff(model.row_start))
    activity = np.bincount(rows, model.value * point[model.index], len(model.row_upper))
    is_integral = np.abs(point - np.round(point))[model.is_integer] <= tolerance
    is_inside = (point >= -tolerance) & (point <= model.column_upper + tolerance)
    return bool(
        is_integral.all() and is_inside.all() and (activity <= model.row_upper + tolerance).all()
    )


def _import_pulp() -> Any:
    try:
        import pulp
    except ImportError as error:
        raise SolverError(
            "PuLP is not installed; run `pip install pulp`, or use solver='milp'"
        ) from error
    return pulp


def _problem(pulp: Any, model: ModelArrays) -> tuple[Any, list[Any]]:
    problem = pulp.LpProblem("checkmate", pulp.LpMinimize)
    # before PuLP 3.3 variables are made outside of the problem
    make = getattr(problem, "add_variable", pulp.LpVariable)

    columns = [
        make(
            f"x{i}",
            0,
            None if math.isinf(upper) else float(upper),
            pulp.LpInteger if is_integer else pulp.LpContinuous,
        )
        for i, (upper, is_integer) in enumerate(
            zip(model.column_upper, model.is_integer, strict=True)
        )
    ]

    problem += pulp.lpSum(float(cost) * columns[i] for i, cost in enumerate(model.cost) if cost)
    for row in range(len(model.row_upper)):
        entries = range(model.row_start[row], model.row_start[row + 1])
        problem += pulp.lpSum(
            float(model.value[k]) * columns[model.index[k]] for k in entries
        ) <= float(model.row_upper[row])
    return problem, columns
