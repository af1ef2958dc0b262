"""HiGHS through highspy: the one place that configures it, passes models and runs it.

Models are passed as arrays, never as expressions, so 20,000 rows take milliseconds. Bounds
that leave this folder are made safe against HiGHS's tolerances (`safe_bound`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from remat.core.errors import SolverError
from remat.solvers.core.interrupt import stop_when_interrupted
from remat.solvers.lp.safe_bound import LinearProgram

if TYPE_CHECKING:
    import highspy


def new_solver(*, threads: int = 1, **options: Any) -> highspy.Highs:
    """Returns a HiGHS solver with these options, which prints nothing and ends at Ctrl-C.

    Args:
        threads: 0 leaves the number to HiGHS.
        **options: HiGHS's own, such as `time_limit` in seconds.

    Raises:
        SolverError: highspy is not installed.
    """
    try:
        import highspy
    except ImportError as error:
        raise SolverError(
            "HiGHS is not installed; run `pip install highspy`, or use solver='milp-pulp'"
        ) from error

    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, value in {"output_flag": False, "threads": threads, **options}.items():
        solver.setOptionValue(name, value)
    stop_when_interrupted(solver)
    return solver  # type: ignore[no-any-return]


def pass_program(
    solver: highspy.Highs,
    program: LinearProgram,
    is_integer: NDArray[np.bool_] | None = None,
    *,
    offset: float = 0.0,
) -> None:
    """Passes a minimisation problem to a solver; it is linear where `is_integer` is None."""
    import highspy

    columns = len(program.cost)
    integer = np.zeros(columns, np.int32) if is_integer is None else is_integer.astype(np.int32)

    solver.passModel(
        columns,
        len(program.row_upper),
        len(program.index),
        int(highspy.MatrixFormat.kRowwise),
        int(highspy.ObjSense.kMinimize),
        offset,
        program.cost,
        program.lower,
        program.upper,
        program.row_lower,
        program.row_upper,
        program.row_start[:-1].astype(np.int32),
        program.index.astype(np.int32),
        program.value,
        integer,
    )


def does_run(solver: highspy.Highs) -> bool:
    """Runs a solver; returns whether HiGHS did so without an error.

    HiGHS starts its threads once in each thread that calls it, and fails on another number of them
    until they are reset, so a failed run is tried once more after a reset.
    """
    import highspy

    if solver.run() != highspy.HighsStatus.kError:
        return True
    highspy.Highs.resetGlobalScheduler(True)
    return bool(solver.run() != highspy.HighsStatus.kError)


def run(solver: highspy.Highs) -> None:
    """Runs a solver.

    Raises:
        SolverError: HiGHS fails on the model.
    """
    if not does_run(solver):
        raise SolverError(
            f"HiGHS {solver.version()} fails on this model ({solver.getModelStatus()}); use "
            "solver='auto' or 'milp-pulp'"
        )


def is_infeasible(solver: highspy.Highs) -> bool:
    """True where HiGHS reports that its model has no feasible point."""
    import highspy

    status = highspy.HighsModelStatus
    return solver.getModelStatus() in (status.kInfeasible, status.kUnboundedOrInfeasible)


def is_finished(solver: highspy.Highs) -> bool:
    """True where the last run ended with an optimum, not at a limit."""
    import highspy

    return bool(solver.getModelStatus() == highspy.HighsModelStatus.kOptimal)


def point_of(solver: highspy.Highs) -> NDArray[np.float64] | None:
    """Returns the best feasible point of the last run, or None."""
    import highspy

    is_feasible = highspy.SolutionStatus.kSolutionStatusFeasible
    if solver.getInfo().primal_solution_status != is_feasible:
        return None
    return np.array(solver.getSolution().col_value)
