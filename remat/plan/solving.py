"""Solves a graph for a budget, and shows progress on stderr and in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from remat.core.budget import describe_bytes
from remat.core.errors import BudgetError
from remat.core.graph import Graph
from remat.core.outline import outline
from remat.core.room import Room
from remat.core.solution import Solution, Status
from remat.core.units import Units
from remat.narration.stages import stage
from remat.solvers import Solver, make_solver

_LOG = logging.getLogger(__name__)
_LEAST_LIMIT_S = 10.0  # limit of the search for the least budget, if no plan fits


def solve_in(
    room: Room,
    graph: Graph,
    *,
    solver: str | Solver,
    time_limit_s: float,
    gap: float,
    progress: Callable[[Any], None] | None = None,
    near: Sequence[Solution] = (),
) -> Solution:
    """Returns the solution for `graph` within the plan's part of the budget.

    `near` are solutions of `graph` for other budgets, from which `auto` starts.

    Raises:
        BudgetError: no schedule was found that fits.
    """
    method = new_solver(solver, time_limit_s=time_limit_s, gap=gap, progress=progress)
    solution = _solved(graph, room.plan_bytes, method, near)
    if solution.is_solved:
        return replace(solution, outline=outline(graph))
    raise _budget_error(graph, solution, room)


def new_solver(
    solver: str | Solver,
    *,
    time_limit_s: float,
    gap: float,
    progress: Callable[[Any], None] | None = None,
) -> Solver:
    """Returns the solver that is given, or a new one with this name and these options.

    Raises:
        ValueError: no solver has this name, or an option is out of range.
        TypeError: `solver` is neither a name nor a solver.
    """
    if time_limit_s <= 0:
        raise ValueError(f"time_limit_s={time_limit_s} was given; give a time above 0 in seconds")
    given: object = solver
    if not isinstance(given, str | Solver):
        kind = type(given).__name__
        raise TypeError(
            f"solver is a {kind}; give a name from remat.SOLVER_NAMES, or a solver such as "
            'remat.make_solver("auto")'
        )
    if not isinstance(solver, str):
        return solver
    return make_solver(solver, time_limit_s=time_limit_s, gap=gap, progress=progress)


def _solved(graph: Graph, budget_bytes: int, method: Solver, near: Sequence[Solution]) -> Solution:
    """Solves, and reports progress on stderr and in the log."""
    what = f"{graph.num_operators:,} operators within {Units.of(graph).size_text(budget_bytes)}"
    _LOG.info("solving %s with %s", what, method)
    with stage(f"planning {what}") as progress:
        telling = method.telling(lambda moment: progress.say(moment.text(graph.cost_s)))
        solution = telling.solve_near(graph, near, budget_bytes=budget_bytes)

    outcome = "; ".join(filter(None, (solution.verdict, solution.techniques)))
    _LOG.info("solved %s in %.1f s: %s", what, solution.wall_s, outcome)
    return solution


def _budget_error(graph: Graph, solution: Solution, room: Room) -> BudgetError:
    is_proved = solution.status is Status.INFEASIBLE
    minimum_bytes = (solution.minimum_bytes or _minimum_bytes(graph)) + room.held_bytes
    what = "no schedule fits" if is_proved else f"{solution.solver} found no schedule that fits"
    what += f" ({solution.cut_short})" if solution.cut_short else ""
    kept_free = f" (kept free: {room.held_text()})" if room.held_bytes else ""
    held = (
        f"; parameters, buffers and inputs alone hold {describe_bytes(graph.resident_bytes)}"
        if graph.resident_bytes
        else ""
    )

    return BudgetError(
        f"{what} in the budget {room.budget_text()}{kept_free}: the least budget known to work "
        f"is {describe_bytes(minimum_bytes)}{held}. "
        "Raise the budget to at least that, or take a smaller batch.",
        budget_bytes=room.budget_bytes,
        minimum_bytes=minimum_bytes,
        is_proved=is_proved,
    )


def _minimum_bytes(graph: Graph) -> int:
    from remat.solvers.auto.minimum import minimum

    return minimum(graph, time_limit_s=_LEAST_LIMIT_S).peak_bytes
