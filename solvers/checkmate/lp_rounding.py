"""The LP relaxation of the Checkmate model: a bound, and schedules by two-phase rounding.

Other names: Checkmate approximation.
Papers: Jain et al., "Checkmate", MLSys 2020, section 5 and algorithm 2.
Phase 1 rounds the relaxed S, at 1/2 or at random with probability S, to the values kept across each
stage; phase 2 recomputes the least that this needs. Rounding ignores memory: the relaxation is
solved within (1 - allowance) of the budget, and schedules that still do not fit are discarded.
Optimal: never by construction; `OPTIMAL` where the schedule meets the relaxation's bound.
Complexity: one LP of O(n (n + E)) nonzeros per allowance, O(n (n + E)) per rounding.
Imperfections: at tight budgets every rounding may exceed the budget (`NO_SOLUTION`); the bound
ignores the memory while recomputing. The paper has one allowance (0.1); several are tried here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

import numpy as np
from numpy.typing import NDArray

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution, Status
from remat.core.validate import validate
from remat.solvers.checkmate.checkmate_model import stage_model
from remat.solvers.checkmate.stage_form import StageForm, stage_form
from remat.solvers.core.base import Solver
from remat.solvers.lp.backend import Highs

# shares of the budget: the paper's 0.1, some around it, and 0, whose relaxation gives the bound;
# not tuned
ALLOWANCES = (0.0, 0.05, 0.1, 0.2, 0.3)
# relative; coefficients are rounded when sizes are divided by the budget (`safe_bound` covers the
# LP solver's tolerances)
_ROUNDOFF = 1e-9


@final
@dataclass(frozen=True)
class LPRounding(Solver):
    """The LP relaxation and two-phase rounding.

    Attributes:
        seed: of the randomized rounding; None rounds deterministically, at 1/2.
        num_samples: randomized roundings per allowance; a round number, not tuned.
        time_limit_s: stop after this long, with the best schedule so far.
    """

    seed: int | None = None
    num_samples: int = 20
    time_limit_s: float = 60.0

    def solve(self, graph: Graph, *, budget_bytes: int) -> Solution:
        """Returns the cheapest rounding that fits, with the relaxation's bound.

        Raises:
            SolverError: the graph is too large for the model, or HiGHS is not installed.
        """
        began = time.monotonic()
        steps = list(range(graph.num_operators))
        cost_s, bound_s = _cost_if_fit(graph, steps, budget_bytes), graph.cost_s

        if cost_s is None:
            for relaxed, rounded in self._roundings(stage_form(graph, budget_bytes), began):
                bound_s = max(bound_s, relaxed.bound_s if relaxed.allowance == 0.0 else 0.0)
                found_s = _cost_if_fit(graph, rounded, budget_bytes) if rounded else None
                if found_s is not None and (cost_s is None or found_s < cost_s):
                    cost_s, steps = found_s, rounded

        wall_s = time.monotonic() - began
        if cost_s is not None:
            return Solution.of_steps(
                graph, budget_bytes, steps, lower_bound_s=bound_s, solver=repr(self), wall_s=wall_s
            )

        if math.isinf(bound_s):
            return Solution.without_schedule(
                graph, budget_bytes, Status.INFEASIBLE, solver=repr(self), wall_s=wall_s
            )

        status = Status.NO_SOLUTION
        return Solution.without_schedule(
            graph, budget_bytes, status, solver=repr(self), wall_s=wall_s, lower_bound_s=bound_s
        )

    def _roundings(self, form: StageForm, began: float) -> Iterator[tuple[Relaxation, list[int]]]:
        """Yields each relaxation with each of its roundings, or no steps where it is infeasible."""
        random = None if self.seed is None else np.random.default_rng(self.seed)
        for allowance in ALLOWANCES:
            left_s = self.time_limit_s - (time.monotonic() - began)
            relaxed = relax(form, allowance=allowance, time_limit_s=left_s) if left_s > 0 else None
            if relaxed is None:
                return

            if math.isinf(relaxed.bound_s):
                yield relaxed, []
                return

            for _ in range(1 if random is None else self.num_samples):
                threshold = 0.5 if random is None else random.random(relaxed.keep.shape)
                yield relaxed, round_to_steps(form, relaxed.keep > threshold)


@dataclass(frozen=True)
class Relaxation:
    """The optimum of the LP relaxation: a lower bound (infinite if infeasible) and S, [t, v]."""

    allowance: float
    bound_s: float
    keep: NDArray[np.float64]


def lp_bound(graph: Graph, budget_bytes: int, *, time_limit_s: float = 60.0) -> float:
    """Returns a lower bound on the cost of every schedule in fixed order within the budget.

    Infinite where it proves that none fits; the cost of keeping everything where time runs out.

    >>> lp_bound(Graph.from_arrays([1, 1, 1, 1], [4, 4, 4, 1], [(0, 1), (1, 2), (2, 3), (0, 3)]), 9)
    5.0
    """
    relaxed = relax(stage_form(graph, budget_bytes), time_limit_s=time_limit_s)
    return graph.cost_s if relaxed is None else max(relaxed.bound_s, graph.cost_s)


def relax(
    form: StageForm, *, allowance: float = 0.0, time_limit_s: float = 60.0
) -> Relaxation | None:
    """Returns the LP relaxation within (1 - allowance) of the capacity; None where time ran out."""
    form = replace(form, capacity_bytes=int(form.capacity_bytes * (1 - allowance)))
    if not form.fits_every_operator:
        return Relaxation(allowance, math.inf, np.zeros(form.may_keep.shape))

    model = stage_model(form)
    answer = Highs().relax(model.arrays(), time_limit_s=time_limit_s)
    if not answer.is_finished:
        return None
    if not answer.points:
        return Relaxation(allowance, math.inf, np.zeros(model.keep.shape))

    bound = answer.bound - _ROUNDOFF * abs(answer.bound)
    bound_s = (math.ceil(bound - 1e-4) if model.is_integral else bound) * model.unit_s
    # ONE and ZERO, by index from the end
    values = np.append(np.clip(answer.points[0], 0.0, 1.0), [1.0, 0.0])
    return Relaxation(allowance, bound_s, values[model.keep])


def round_to_steps(form: StageForm, keep: NDArray[np.bool_]) -> list[int]:
    """Returns the steps that keep what `keep` says and recompute the least that this needs.

    This is phase 2. Values that can't be recomputed where they are needed are kept in any case.
    """
    keep = keep.copy()
    while True:
        steps: list[int] = []
        missing = _run(form, keep, steps)
        if missing is None:
            return steps
        stage, value = missing
        keep[form.producer[value] + 1 : stage + 1, value] = True


def _run(form: StageForm, keep: NDArray[np.bool_], steps: list[int]) -> tuple[int, int] | None:
    """Appends the steps of all stages; returns the first (stage, value) that is not available."""
    held: set[int] = set()
    for stage in range(form.num_operators):
        held &= set(np.flatnonzero(keep[stage]).tolist())
        kept_on = {v for v in np.flatnonzero(keep[stage + 1]).tolist() if form.producer[v] < stage}
        wanted = (kept_on | set(form.reads[stage])) - held
        again: list[int] = []

        # the graph's order, backwards: parents come later
        for operator in range(stage - 1, -1, -1):
            if wanted.isdisjoint(form.writes[operator]):
                continue
            if not form.may_recompute[stage, operator]:
                return stage, min(wanted.intersection(form.writes[operator]))
            again.append(operator)
            wanted |= set(form.reads[operator]) - held

        steps += again[::-1]
        held |= wanted.union(*(form.writes[operator] for operator in (*again, stage)))
        if stage < form.num_steps:
            steps.append(stage)
    return None


def _cost_if_fit(graph: Graph, steps: list[int], budget_bytes: int) -> float | None:
    """Returns the cost of a schedule, None where it does not fit."""
    schedule = Schedule.from_steps(graph, steps)
    if validate(graph, schedule, budget_bytes=budget_bytes):
        return None
    return simulate(graph, schedule).cost_s
