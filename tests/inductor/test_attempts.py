"""A budget that an error names for kernels is met by the next one who asks for it."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch

import remat
from remat.core.errors import BudgetError
from remat.core.graph import Graph
from remat.core.room import Room
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution
from remat.inductor import attempts as module
from remat.inductor.attempts import ATTEMPTS, Attempts
from remat.plan.planner import Options, Plans
from remat.solvers.auto.solver import Auto
from remat.tracers.synthetic import chain
from tests.support.fused_models import Net, batch
from tests.support.planned import Step

GRAPH = chain(8)
PEAK_BYTES = simulate(GRAPH, Schedule.keep_all(GRAPH)).peak_bytes
BUDGET_BYTES = PEAK_BYTES + 100


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_least", OrderedDict())


def plan_of(budget_bytes: int, graph: Graph = GRAPH) -> Solution:
    steps = Schedule.keep_all(graph).steps
    return Solution.of_steps(
        graph, budget_bytes, steps, lower_bound_s=graph.cost_s, solver="", wall_s=0.0
    )


def exceed(attempts: Attempts, budget_bytes: int, excess_bytes: list[int]) -> None:
    """Notes plans whose kernels exceed a budget by so much."""
    for excess in excess_bytes:
        plan = plan_of(budget_bytes - attempts.room_bytes)
        attempts.held_too_much(GRAPH, plan, budget_bytes + excess)


def until_refused(budget_bytes: int, excess_bytes: list[int]) -> BudgetError:
    with pytest.raises(BudgetError) as refusal:
        exceed(Attempts(), budget_bytes, excess_bytes)
    return refusal.value


def test_the_named_budget_is_met_by_the_plan_that_held_it() -> None:
    """Naive: the next search finds another plan, whose kernels may hold more."""
    named_bytes = until_refused(BUDGET_BYTES, [9, 5, 7, 8]).minimum_bytes
    assert named_bytes == BUDGET_BYTES + 5

    attempts = Attempts()
    attempts.held_too_much(GRAPH, plan_of(named_bytes), named_bytes + 3)

    known = attempts.known
    assert known is not None
    # the second plan had room for the first excess
    assert known.solution.budget_bytes == BUDGET_BYTES - 9
    assert attempts.limit_room_bytes == 9
    assert known.solution.budget_bytes + attempts.room_bytes == named_bytes


def test_below_the_named_budget_nothing_is_known() -> None:
    named_bytes = until_refused(BUDGET_BYTES, [9, 5, 7, 8]).minimum_bytes
    attempts = Attempts()
    attempts.held_too_much(GRAPH, plan_of(named_bytes - 1), named_bytes + 3)
    assert attempts.known is None
    assert attempts.room_bytes == 4


def test_another_graph_has_plans_of_its_own() -> None:
    until_refused(BUDGET_BYTES, [9, 5, 7, 8])
    other, attempts = chain(9), Attempts()
    attempts.held_too_much(other, plan_of(2 * BUDGET_BYTES, other), 2 * BUDGET_BYTES + 1)
    assert attempts.known is None


def test_a_known_plan_that_holds_more_now_is_tried_once() -> None:
    """Naive: it is tried again and again."""
    until_refused(BUDGET_BYTES, [9, 5, 7, 8])
    attempts = Attempts()
    with pytest.raises(BudgetError):
        exceed(attempts, 2 * BUDGET_BYTES, [1] * (ATTEMPTS + 1))
    assert len(attempts.held) == ATTEMPTS
    assert attempts.known is None


def test_how_layouts_were_compiled_is_part_of_what_is_known() -> None:
    first = Attempts(keeps_layouts=True)
    first.held_too_much(GRAPH, plan_of(BUDGET_BYTES), BUDGET_BYTES + 5)

    later = Attempts()
    later.held_too_much(GRAPH, plan_of(BUDGET_BYTES + 5), BUDGET_BYTES + 9)
    assert later.keeps_layouts
    assert later.known is not None


def test_an_error_names_the_budget_as_it_was_given() -> None:
    """Naive: it names the kernels' part, so that the next budget is too small by the rest."""
    attempts = Attempts()
    for excess in (9, 5, 7):
        plan = plan_of(BUDGET_BYTES - attempts.room_bytes)
        room = Room(None, BUDGET_BYTES + 70, 0, reserve_bytes=70, gap_bytes=attempts.room_bytes)
        attempts.held_too_much(GRAPH, plan, BUDGET_BYTES + excess, room=room)
    refused = attempts.error()
    assert refused.budget_bytes == BUDGET_BYTES + 70
    assert refused.minimum_bytes == BUDGET_BYTES + 70 + 5
    assert "reserve 70 B" in str(refused)


def test_a_planner_takes_a_known_plan() -> None:
    plans = Plans(Options(BUDGET_BYTES, plan_cache=False, time_limit_s=1.0))
    known = plan_of(BUDGET_BYTES - 50)

    taken = plans(Step(GRAPH), unplanned_bytes=50, known=known)

    assert taken.schedule == known.schedule
    assert plans.room_of(taken).budget_bytes == BUDGET_BYTES
    assert plans(Step(GRAPH), unplanned_bytes=50) is taken


def test_a_known_plan_that_leaves_no_room_for_what_is_held_beside_it_is_not_taken() -> None:
    """Naive: a plan made before a loss outside of the module was measured is used again."""
    more = [op.workspace_bytes + 1 for op in GRAPH.operators]
    step = Step(GRAPH.with_costs([op.cost_s for op in GRAPH.operators], more))
    plans = Plans(Options(PEAK_BYTES + 50, plan_cache=False, time_limit_s=1.0))
    known = plan_of(PEAK_BYTES)

    taken = plans(step, unplanned_bytes=50, known=known)

    assert taken.schedule != known.schedule
    assert taken.peak_bytes <= PEAK_BYTES


@pytest.mark.usefixtures("fresh_torch", "idle_kernels")
def test_kernels_keep_the_budget_that_an_error_named() -> None:
    """Naive: the remembered plan gets another limit, so that other loops are fused."""

    def planned(budget_bytes: int, seed: int) -> torch.nn.Module:
        return remat.checkpoint(
            Net(),
            budget_bytes,
            executor="inductor",
            costs="flops",
            solver=Auto(seed=seed, time_limit_s=1.0, rounds=2),
            plan_cache=False,
            reserve_bytes=100_000,
        )

    with pytest.raises(BudgetError) as refusal:
        planned(1, seed=0)(batch()).backward()

    torch._dynamo.reset()
    model = planned(refusal.value.minimum_bytes, seed=1)
    model(batch()).backward()

    report = remat.report(model)
    assert report.kernels_peak_bytes is not None
    assert report.measured_peak_bytes is not None
    assert report.kernels_peak_bytes <= refusal.value.minimum_bytes
    assert report.measured_peak_bytes <= refusal.value.minimum_bytes
