"""A step whose kernels or pieces hold more than planned is planned again for less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution
from remat.core.validate import validate
from remat.plan import planner, solving
from remat.plan.planner import Options, Plans
from remat.solvers.auto.solver import Auto
from remat.tracers.synthetic import random_layered
from tests.support.planned import Step

LIMIT_S = 10.0
GRAPH = random_layered(40, seed=0)
KEEP_ALL_BYTES = simulate(GRAPH, Schedule.keep_all(GRAPH)).peak_bytes
BUDGET_BYTES, EXCESS_BYTES = int(0.8 * KEEP_ALL_BYTES), int(0.05 * KEEP_ALL_BYTES)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, Sequence[Solution]]]:
    """The time limit of each call of a solver, and the solutions that it starts from."""
    calls: list[tuple[float, Sequence[Solution]]] = []
    plain = solving.solve_in

    def noted(*args: object, **kwargs: object) -> Solution:
        calls.append((kwargs["time_limit_s"], kwargs["near"]))  # type: ignore[arg-type]
        return plain(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(planner, "solve_in", noted)
    return calls


def plans(solver: str = "auto") -> Plans:
    return Plans(Options(BUDGET_BYTES, solver=solver, time_limit_s=LIMIT_S, plan_cache=False))


def test_it_starts_from_the_first_plan_and_takes_a_tenth_of_the_time(
    asked: list[tuple[float, Sequence[Solution]]],
) -> None:
    """Naive: each plan that Inductor's kernels exceed costs a whole time limit."""
    made = plans()
    first = made(Step(GRAPH))
    second = made(Step(GRAPH), unplanned_bytes=EXCESS_BYTES)

    assert asked == [(LIMIT_S, ()), (LIMIT_S / 10, (first,))]
    assert second.schedule is not None
    assert not validate(GRAPH, second.schedule, budget_bytes=BUDGET_BYTES - EXCESS_BYTES)
    assert first.lower_bound_s <= second.lower_bound_s <= second.cost_s


def test_a_plan_beside_other_gradients_is_no_start(
    asked: list[tuple[float, Sequence[Solution]]],
) -> None:
    """Naive: the plan beside accumulated gradients, for a far smaller budget, gets a tenth too."""
    made = plans()
    made(Step(GRAPH))
    made(Step(GRAPH), gradient_bytes=EXCESS_BYTES)

    assert asked == [(LIMIT_S, ()), (LIMIT_S, ())]


def test_a_solver_that_cannot_start_from_a_plan_solves_anew() -> None:
    made = plans("linear-greedy")
    made(Step(GRAPH))
    second = made(Step(GRAPH), unplanned_bytes=EXCESS_BYTES)

    assert second.peak_bytes <= BUDGET_BYTES - EXCESS_BYTES


def test_only_bounds_that_hold_are_taken_over() -> None:
    """Naive: the bound of a smaller budget, or one that a file states, is believed."""
    smaller_bytes = BUDGET_BYTES - EXCESS_BYTES
    solver = Auto(time_limit_s=2.0, gap=0.0)
    smaller = solver.solve(GRAPH, budget_bytes=smaller_bytes)
    stated = replace(
        solver.solve(GRAPH, budget_bytes=BUDGET_BYTES), lower_bound_s=1e9, is_bound_stated=True
    )

    found = solver.solve_near(GRAPH, [smaller, stated], budget_bytes=BUDGET_BYTES)

    assert found.lower_bound_s <= found.cost_s <= smaller.cost_s
    assert smaller.lower_bound_s > found.cost_s, "else the first half shows nothing"
