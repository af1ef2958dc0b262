"""The loop around the stage model: solve, order every stage, cut off what cannot be ordered.

1. Solve the relaxation (`checkmate_model` without the moments of recomputation). Its optimum bounds
   every schedule in fixed order.
2. Look for an order of each stage's recomputations that fits. Where all stages have one, the
   schedule costs what the model says, and is optimal.
3. Where a stage has none, add the moment rows that the point violates; where it violates none, add
   the least cost of that stage (`stage_order`) as a Benders cut. Both hold for every schedule.
   Repeat.
4. Where a stage is too large for the exact search, the bound remains valid, and the model is solved
   once more with the paper's own accounting in such stages (`ordered_stage`): a restriction, only
   to find a schedule.

The loop terminates, as every round cuts off the point it found. Each bound is the backend's dual
bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.validate import validate
from remat.solvers.checkmate.checkmate_model import (
    CheckmateModel,
    add_moment,
    add_stage_cut,
    moment_bytes,
    stage_model,
)
from remat.solvers.checkmate.ordered_stage import add_ordered_stage
from remat.solvers.checkmate.stage_form import StageForm
from remat.solvers.checkmate.stage_order import (
    UNKNOWN,
    StageResult,
    StageTask,
    cheapest_stage,
    goal_of,
)
from remat.solvers.checkmate.stage_plan import (
    StagePlan,
    order_stage,
    plans_of_point,
    point_of_steps,
    useful_in,
)
from remat.solvers.core.interrupt import is_interrupted
from remat.solvers.core.progress import Progress, ProgressCallback
from remat.solvers.lp.backend import Answer, Backend

# relative; HiGHS's tolerances allow no better bound where costs are not integers
TOLERANCE = 1e-7
# no measurement of the numbers below is on record
# shares of the time left: for a solve, and for the next one if its point gave no cuts
_FIRST_SHARE, _SECOND_SHARE = 0.35, 0.75
_RESERVE = 0.3  # share of the time left that is kept for schedules in the paper's class
_MAX_STATES = 20_000  # of the exact search of one stage, in the first round
_STATES_TO_WIDEN = 3_000  # of each search that makes a cut stronger
_FARTHER = 8  # factor on `max_states` in the next round


@dataclass(frozen=True)
class Limits:
    """When to stop: at a proved gap (a fraction), or after a time."""

    gap: float
    time_limit_s: float


class StageSearch:
    """One solve of one graph and budget; holds the best schedule and the best bound."""

    def __init__(
        self,
        form: StageForm,
        graph: Graph,
        budget_bytes: int,
        backend: Backend,
        limits: Limits,
        progress: ProgressCallback | None = None,
    ) -> None:
        self.form, self.graph, self.budget_bytes, self.backend, self.limits = (
            form,
            graph,
            budget_bytes,
            backend,
            limits,
        )

        self.bound_s = graph.cost_s
        self.is_infeasible = False
        self.steps: tuple[int, ...] | None = None
        self.cost_s = math.inf
        self.progress = progress
        self.began = time.monotonic()

        self.unordered: set[int] = set()  # stages that were neither ordered nor cut
        self.failing: set[int] = set()  # stages of the latest point without an order
        self.moments: set[tuple[int, int]] = set()
        self.cuts: set[StageTask] = set()
        self.max_states = _MAX_STATES

    @property
    def remaining_s(self) -> float:
        """Seconds left; 0 after Ctrl-C."""
        return (
            0.0 if is_interrupted() else self.limits.time_limit_s - (time.monotonic() - self.began)
        )

    @property
    def is_closed(self) -> bool:
        """True where the best schedule is proved within the gap, or infeasibility is proved."""
        return (
            self.is_infeasible
            or self.cost_s - self.bound_s
            <= max(self.limits.gap, TOLERANCE) * self.cost_s
            < math.inf
        )

    def offer(self, steps: Sequence[int]) -> None:
        """Takes `steps` as the best schedule where they are valid, fit and cost less."""
        schedule = Schedule.from_steps(self.graph, list(steps))
        if len(set(schedule.steps)) < self.form.num_steps or validate(
            self.graph, schedule, budget_bytes=self.budget_bytes
        ):
            return

        cost_s = simulate(self.graph, schedule).cost_s
        if cost_s < self.cost_s:
            self.steps, self.cost_s = tuple(steps), cost_s
            self._tell()

    def run(self) -> None:
        """Runs until closed, out of time, or out of cuts.

        Each round gives the exact search of stages more states.
        """
        while not self.is_closed and self.remaining_s > 0:
            self.unordered.clear()
            has_more = self._run_relaxation(reserve_s=_RESERVE * self.remaining_s)
            self._run_ordered()
            if not (has_more or self.unordered):
                break
            self.max_states *= _FARTHER if self.unordered else 1

    def _run_relaxation(self, reserve_s: float) -> bool:
        """Solves and cuts; returns whether time ran out before the work was done."""
        share = _FIRST_SHARE
        while not self.is_closed and self.remaining_s > reserve_s:
            answer = self._minimise(self.model, share * self.remaining_s)
            self._raise_bound(answer.bound)
            is_cut = self._learn(answer)
            if not is_cut and (answer.is_finished or share == _SECOND_SHARE):
                return False
            share = _FIRST_SHARE if is_cut else _SECOND_SHARE
        return True

    @property
    def _states(self) -> int:
        return self.max_states if self.remaining_s > 0 else 0

    @cached_property
    def model(self) -> CheckmateModel:
        """The relaxation and its cuts; built when first needed."""
        return stage_model(self.form)

    def _minimise(self, model: CheckmateModel, time_limit_s: float) -> Answer:
        start: NDArray[np.float64] | None = None
        if self.steps is not None:
            start = point_of_steps(model, self.steps)

        def report(cost: float | None, bound: float) -> None:
            if self.progress is not None and model is self.model:
                self._tell(bound * model.unit_s)

        return self.backend.minimise(
            model.arrays(),
            gap=self.limits.gap,
            time_limit_s=time_limit_s,
            start=start,
            report=report,
        )

    def _tell(self, bound_s: float = -math.inf) -> None:
        if self.progress is not None:
            cost_s = self.cost_s if self.steps is not None else None
            self.progress(
                Progress(
                    time.monotonic() - self.began,
                    cost_s,
                    max(self.bound_s, min(bound_s, self.cost_s)),
                )
            )

    def _raise_bound(self, bound: float) -> None:
        if bound == math.inf:
            self.is_infeasible = self.steps is None
            bound = self.cost_s / self.model.unit_s
        if self.model.is_integral and math.isfinite(bound):
            bound = math.ceil(bound - 1e-4)
        if math.isfinite(bound):
            self.bound_s = max(self.bound_s, min(bound * self.model.unit_s, self.cost_s))
            self._tell()

    def _learn(self, answer: Answer) -> bool:
        """Orders each point's stages, keeps the best schedule; returns whether it added a cut."""
        is_cut = False
        plans = [plans_of_point(self.model, point) for point in answer.points]
        for rank in reversed(range(len(plans))):  # the best one last
            is_cut |= self._digest(plans[rank], is_cutting=rank == 0)
        return is_cut

    def _digest(self, plans: list[StagePlan], *, is_cutting: bool) -> bool:
        is_cut = False
        self.failing = set()
        steps: list[int] = []

        for plan in plans:
            found = order_stage(self.form, plan)
            if is_cutting and not found.cost_s <= _slightly_above(plan.cost_s):
                is_new, found = self._cut(plan)
                is_cut |= is_new
            if not math.isfinite(found.cost_s):
                self.failing.add(plan.task.stage)
            steps += [*found.steps, plan.task.stage]

        if not self.failing:
            self.offer(steps[: len(steps) - (self.form.num_operators - self.form.num_steps)])
        return is_cut

    def _cut(self, plan: StagePlan) -> tuple[bool, StageResult]:
        """Cuts off a stage that has no order at the model's cost.

        Returns whether a cut was added, and the stage's true cost.
        """
        violated = [(plan.task.stage, j) for j in violated_moments(self.form, plan.task)]
        if fresh := [moment for moment in violated if moment not in self.moments]:
            for moment in fresh:
                add_moment(self.model, *moment)
            self.moments.update(fresh)
            if self.steps is not None:
                return True, UNKNOWN

        task = self._with_all_candidates(plan.task)
        found = cheapest_stage(self.form, task, max_states=self._states)
        if fresh:
            return True, found

        if math.isnan(found.cost_s) or task in self.cuts:
            self.unordered.add(task.stage)
            return False, found
        if found.cost_s <= _slightly_above(plan.cost_s):
            return False, found

        self.cuts.add(task)
        wide = self._widened(task, found.cost_s)
        add_stage_cut(self.model, task.stage, wide.kept, wide.wanted, wide.snapshots, found.cost_s)
        return True, found

    def _with_all_candidates(self, task: StageTask) -> StageTask:
        candidates = frozenset(np.flatnonzero(self.form.may_recompute[task.stage]).tolist())
        return replace(task, candidates=candidates)

    def _widened(self, task: StageTask, cost_s: float) -> StageTask:
        """Returns an easier task that still costs as much, which makes a stronger cut.

        It starts from more values and wants fewer.
        """
        more = sorted(set(np.flatnonzero(self.form.may_keep[task.stage]).tolist()) - task.kept)
        easier = [("wanted", v) for v in sorted(task.wanted)] + [("kept", v) for v in more]

        for side, value in easier:
            other = replace(task, **{side: getattr(task, side) ^ {value}})
            if (
                self.remaining_s > 0
                and cheapest_stage(self.form, other, max_states=_STATES_TO_WIDEN).cost_s >= cost_s
            ):
                task = other
        return task

    def _run_ordered(self) -> None:
        """Looks for a better schedule, with the paper's accounting in stages without an order."""
        if self.is_closed or self.remaining_s <= 0:
            return

        model = stage_model(self.form)
        ordered: set[int] = set()
        pending = self.unordered | self.failing
        for stage, operator in self.moments:
            add_moment(model, stage, operator)

        while pending and self.remaining_s > 0 and not self.is_closed:
            for stage in pending:
                add_ordered_stage(model, stage)
            ordered |= pending
            answer = self._minimise(model, self.remaining_s)

            pending = set()
            for point in answer.points:
                plans = plans_of_point(model, point)
                self._digest(plans, is_cutting=False)
                pending |= self.failing - ordered


def _slightly_above(cost_s: float) -> float:
    return cost_s * (1 + 1e-9) + 1e-12


def violated_moments(form: StageForm, task: StageTask) -> list[int]:
    """Returns the task's recomputations that do not fit beside what is held through the stage."""
    again = {v for j in task.candidates for v in form.writes[j]}
    through = goal_of(form, task) - again
    found = []

    for operator in useful_in(form, task)[0]:
        others = through.difference(form.reads[operator], form.writes[operator])
        if (
            moment_bytes(form, operator) + sum(form.size_bytes[v] for v in others)
            > form.capacity_bytes
        ):
            found.append(operator)
    return found
