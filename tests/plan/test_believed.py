"""Nothing in a plan's file is trusted: its numbers are those of the simulator."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import remat
from remat.cli import commands
from remat.cli.arguments import Refused, load_solutions
from remat.core.errors import BudgetError, ScheduleError
from remat.core.graph import Graph
from remat.core.schedule import simulate
from remat.core.solution import Solution, Status
from remat.plan.disk_cache import PlanCache, key_of
from remat.tracers.synthetic import chain
from tests.support.planned import Net, batch, call_of

GRAPH = chain(8).with_costs([1.0] * 17)
PLAN = remat.solve(GRAPH, 12, solver="chen-sqrt")
LIES: list[dict[str, Any]] = [
    {"peak_bytes": 1},
    {"cost_s": 1.0},
    {"keep_all_cost_s": 1e6},
    {"cost_s": 1e6, "lower_bound_s": 1e6},
    {"status": "optimal"},
    {"status": "optimal", "lower_bound_s": PLAN.cost_s},
    {"lower_bound_s": 1e6},
    {"minimum_bytes": 10**6},
    {"is_bound_stated": False},
    {"wall_s": 1e9},
]


def lying(tmp_path: Path, lie: dict[str, Any], plan: Solution = PLAN) -> Path:
    path = tmp_path / "plan.json"
    plan.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | lie))
    return path


def assert_true(graph: Graph, solution: Solution) -> None:
    assert solution.schedule is not None
    simulation = simulate(graph, solution.schedule)
    assert solution.peak_bytes == simulation.peak_bytes
    assert solution.cost_s == simulation.cost_s
    assert solution.keep_all_cost_s == graph.cost_s

    assert solution.minimum_bytes <= simulation.peak_bytes
    assert graph.cost_s <= solution.lower_bound_s <= solution.cost_s
    assert solution.is_bound_stated == (solution.lower_bound_s > graph.cost_s)
    assert solution.status is Status.FEASIBLE


@pytest.mark.parametrize("lie", LIES, ids=json.dumps)
def test_every_reader_corrects_a_false_number_in_a_file(
    lie: dict[str, Any], tmp_path: Path
) -> None:
    path = lying(tmp_path, lie)
    assert PLAN.cost_s > GRAPH.cost_s
    assert_true(GRAPH, Solution.load(path).on(GRAPH))
    assert_true(GRAPH, load_solutions(path, GRAPH)[0])

    path.rename(tmp_path / f"{key_of(GRAPH, 12, 'chen-sqrt')}.json")
    found = PlanCache(tmp_path).get_or_solve(GRAPH, 12, "chen-sqrt", pytest.fail)
    assert_true(GRAPH, found)


def test_a_bound_that_cannot_hold_is_replaced() -> None:
    stated = replace(PLAN, is_bound_stated=True, lower_bound_s=GRAPH.cost_s + 1)
    assert stated.on(GRAPH).lower_bound_s == GRAPH.cost_s + 1
    slower = GRAPH.with_costs([3.0] * GRAPH.num_operators)
    assert stated.on(slower).lower_bound_s == slower.cost_s
    assert not stated.on(slower).is_bound_stated


def test_what_was_proved_here_stays_proved(tmp_path: Path) -> None:
    proved = remat.solve(GRAPH, 12, time_limit_s=5.0)
    assert proved.on(GRAPH) == proved
    assert not proved.on(GRAPH).is_bound_stated
    kept = remat.solve(GRAPH, "100%", solver="keep-all")
    kept.save(tmp_path / "plan.json")
    again = Solution.load(tmp_path / "plan.json").on(GRAPH)
    assert (again, again.is_bound_stated) == (kept, False)  # running each operator once costs least


def test_a_plan_above_its_own_budget_is_refused(tmp_path: Path) -> None:
    path = lying(tmp_path, {"budget_bytes": PLAN.peak_bytes - 1})
    with pytest.raises(BudgetError) as caught:
        Solution.load(path).on(GRAPH)
    assert caught.value.minimum_bytes == PLAN.peak_bytes
    with pytest.raises(Refused, match=r"plan\.json.*own budget"):
        load_solutions(path, GRAPH)


def test_a_plan_without_a_schedule_proves_nothing(tmp_path: Path) -> None:
    none = Solution.without_schedule(GRAPH, 10**6, Status.INFEASIBLE, solver="s", wall_s=0.0)
    none.save(tmp_path / "plan.json")
    assert load_solutions(tmp_path / "plan.json", GRAPH)[0].status is Status.NO_SOLUTION


def test_a_cached_plan_of_another_budget_is_made_again(tmp_path: Path) -> None:
    path = lying(tmp_path, {"budget_bytes": 10**6})
    path.rename(tmp_path / f"{key_of(GRAPH, 12, 'chen-sqrt')}.json")
    found = PlanCache(tmp_path).get_or_solve(GRAPH, 12, "chen-sqrt", lambda: PLAN)
    assert found is PLAN


def test_wrap_refuses_a_schedule_above_its_own_budget(tmp_path: Path) -> None:
    """A step held 730,384 bytes; the file stated a budget of 547,791 and a lower peak."""
    graph = remat.trace(Net(), (batch(64),))
    plan = remat.solve(graph, "100%", solver="keep-all")
    lie = {"budget_bytes": plan.peak_bytes * 3 // 4, "peak_bytes": plan.peak_bytes // 2}
    model = remat.wrap(Net(), Solution.load(lying(tmp_path, lie, plan)))
    with pytest.raises(BudgetError, match="own budget") as caught:
        model(batch(64))
    assert caught.value.minimum_bytes == plan.peak_bytes


def test_wrap_reports_what_the_simulator_says(tmp_path: Path) -> None:
    graph = remat.trace(Net(), (batch(64),))
    plan = next(s for s in remat.frontier(graph, 6, solver="chen-greedy") if s.is_solved)
    assert plan.cost_s > graph.cost_s
    lie = {"peak_bytes": 7, "cost_s": plan.cost_s * 2, "lower_bound_s": plan.cost_s}
    model = remat.wrap(Net(), Solution.load(lying(tmp_path, lie, plan)))
    model(batch(64)).backward()

    assert isinstance(model, torch.nn.Module)
    found = call_of(model).pieces[0].solution
    assert (found.peak_bytes, found.cost_s) == (plan.peak_bytes, plan.cost_s)
    assert "stated by the file" in str(remat.report(model))


def test_a_broken_schedule_is_named_by_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    GRAPH.save("graph.json")
    assert PLAN.schedule is not None
    steps = list(PLAN.schedule.steps)
    schedule = {"num_forward_steps": PLAN.schedule.num_forward_steps, "version": 1}

    for broken in (steps[1:], [*steps, 99], [steps[1], steps[0], *steps[2:]]):
        lying(tmp_path, {"schedule": {**schedule, "steps": broken}})
        for command in ("plot", "report", "export"):
            result = CliRunner().invoke(commands.app, [command, "graph.json", "plan.json"])
            assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1), result.output
            assert "plan is broken" in result.stderr
        with pytest.raises(ScheduleError, match="broken"):
            Solution.load("plan.json").on(GRAPH)


def test_a_page_says_who_states_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    GRAPH.save("graph.json")
    lying(tmp_path, {"lower_bound_s": PLAN.cost_s})

    done = CliRunner().invoke(
        commands.app, ["report", "graph.json", "plan.json", "--points", "0", "--output", "a.html"]
    )
    assert done.exit_code == 0, done.stderr

    text = Path("a.html").read_text()
    assert "stated by the file" in text
    assert "%: proved" not in text
