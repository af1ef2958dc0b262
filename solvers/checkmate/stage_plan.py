"""Converts points of the stage models to schedules and back, stage by stage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from remat.solvers.checkmate.checkmate_model import CheckmateModel
from remat.solvers.checkmate.stage_form import StageForm
from remat.solvers.checkmate.stage_order import (
    UNKNOWN,
    StageResult,
    StageTask,
    goal_of,
    is_sequence_fit,
)


class StagePlan(NamedTuple):
    """One stage of a point: its task, and its cost according to the model."""

    task: StageTask
    cost_s: float


def plans_of_point(model: CheckmateModel, point: NDArray[np.float64]) -> list[StagePlan]:
    """Returns what an integral point does in each stage.

    A stage's `candidates` are the operators that the point recomputes, `kept` all values that it
    keeps, `wanted` only those that later stages use.
    """
    form = model.form
    chosen = np.append(point > 0.5, [True, False])  # ONE and ZERO, by index from the end
    recompute, keep = chosen[model.recompute], chosen[model.keep]
    snapshots = frozenset(
        v for v in np.flatnonzero(form.is_snapshot).tolist() if chosen[model.needed[v]]
    )

    plans: list[StagePlan] = []
    wanted: frozenset[int] = frozenset()
    for stage in range(form.num_operators - 1, -1, -1):
        old = frozenset(v for v in wanted if form.producer[v] < stage)
        kept = frozenset(np.flatnonzero(keep[stage]).tolist())
        task = StageTask(
            stage, kept, old, frozenset(np.flatnonzero(recompute[stage]).tolist()), snapshots
        )

        extra = point[model.extra_cost[stage]] * model.unit_s if stage in model.extra_cost else 0.0
        plans.append(
            StagePlan(task, math.fsum([*(form.cost_s[i] for i in task.candidates), extra]))
        )
        wanted = kept & useful_in(form, task)[1]

    return plans[::-1]


def useful_in(form: StageForm, task: StageTask) -> tuple[list[int], set[int]]:
    """Returns the recomputations that the stage can use, in the graph's order.

    Also returns the values that they and the goal need.
    """
    needed = set(goal_of(form, task))
    useful: list[int] = []
    for operator in sorted(task.candidates, reverse=True):
        if not needed.isdisjoint(form.writes[operator]):
            useful.append(operator)
            needed.update(form.reads[operator])
    return useful[::-1], needed


def order_stage(form: StageForm, plan: StagePlan) -> StageResult:
    """Returns the stage's recomputations, each once, in the graph's order or depth first.

    `UNKNOWN` where neither order fits.
    """
    useful, _ = useful_in(form, plan.task)
    for steps in (useful, _depth_first(form, plan.task, useful)):
        if is_sequence_fit(form, plan.task, steps):
            return StageResult(math.fsum(form.cost_s[i] for i in steps), tuple(steps))
    return UNKNOWN


def _depth_first(form: StageForm, task: StageTask, useful: Sequence[int]) -> list[int]:
    """Returns `useful` depth first, inputs before their readers, large working memory first."""
    pending, steps = set(useful), []
    for root in sorted(useful, key=lambda i: -form.working_bytes(i)):
        stack = [root]
        while stack:
            parents = {form.producer[v] for v in form.reads[stack[-1]]} & pending - {stack[-1]}
            if stack[-1] in pending and parents:
                stack.append(max(parents, key=form.working_bytes))
                continue

            operator = stack.pop()
            if operator in pending:
                pending.remove(operator)
                steps.append(operator)
    return steps


def point_of_steps(model: CheckmateModel, steps: Sequence[int]) -> NDArray[np.float64]:
    """Returns the integer columns of a schedule's point; the others are NaN."""
    form = model.form
    point = np.full(len(model.costs), math.nan)
    point[[*model.recompute[model.recompute >= 0], *model.keep[model.keep >= 0]]] = 0.0

    stage_of_step = _stages(steps, form.num_steps)
    repeated = {operator for operator, count in Counter(steps).items() if count > 1}
    for value in np.flatnonzero(form.is_snapshot):
        point[model.needed[value]] = float(not repeated.isdisjoint(form.users[value]))

    latest: dict[int, int] = {}
    for operator, stage in zip(
        [*steps, *range(form.num_steps, form.num_operators)], stage_of_step, strict=False
    ):
        for value in form.reads[operator]:
            columns = model.keep[latest[value] + 1 : stage + 1, value]
            if not form.is_snapshot[value] or point[model.needed[value]]:
                point[columns[columns >= 0]] = 1.0

        if operator != stage and model.recompute[stage, operator] >= 0:
            point[model.recompute[stage, operator]] = 1.0
        latest |= dict.fromkeys(form.writes[operator], stage)
    return point


def _stages(steps: Sequence[int], num_steps: int) -> list[int]:
    """Returns the stage of each step, and of the sink after them."""
    stages, stage = [], 0
    for operator in steps:
        stages.append(stage)
        stage += operator == stage
    return [*stages, num_steps]
