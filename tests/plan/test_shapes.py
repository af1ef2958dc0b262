"""Shapes that change from step to step, and plans that are found again on disk."""

from __future__ import annotations

import copy
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import remat
from remat.core.solution import Solution
from remat.plan import planner, solving
from remat.plan.disk_cache import PlanCache, key_of
from tests.support.planned import Net, assert_same, batch, call_of, state_after

pytestmark = pytest.mark.usefixtures("fresh_torch")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time limit of each call of a solver."""
    limits: list[float] = []
    plain = solving.solve_in

    def counted(*args: object, **kwargs: object) -> Solution:
        limits.append(float(kwargs["time_limit_s"]))  # type: ignore[arg-type]
        return plain(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(planner, "solve_in", counted)
    return limits


def checkpointed(
    model: nn.Module, budget: str | int = "80%", *, plan_cache: bool = True
) -> nn.Module:
    return remat.checkpoint(model, budget, costs="flops", time_limit_s=2.0, plan_cache=plan_cache)


@cache
def traced(rows: int) -> remat.Graph:
    return remat.trace(Net(), (batch(rows),), costs="flops")


def plan_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("remat/plans-v1/*.json"))


def test_a_smaller_last_batch_keeps_the_budget(solved: list[float]) -> None:
    """Naive: "80%" of a small batch is less than parameters and gradients alone.

    The last step of an epoch then fails.
    """
    model = Net()
    plain = copy.deepcopy(model)
    checkpointed(model)

    for rows in (256, 256, 3, 256, 3):
        assert_same(
            state_after(model, batch(rows), seed=rows), state_after(plain, batch(rows), seed=rows)
        )

    assert len(solved) == 2  # each shape once, the second with a shorter limit
    assert solved[1] < solved[0]
    assert len({piece.solution.budget_bytes for piece in call_of(model).pieces}) == 1


def test_a_plan_is_found_again_by_the_next_job(tmp_path: Path, solved: list[float]) -> None:
    first, second = Net(), Net()
    checkpointed(first)(batch(64)).backward()
    assert len(plan_files(tmp_path)) == len(solved) == 1

    torch._dynamo.reset()
    checkpointed(second)(batch(64)).backward()
    assert len(solved) == 1

    made, read = (call_of(model).pieces[0].solution for model in (first, second))
    assert (read.schedule, read.peak_bytes, read.cost_s, read.lower_bound_s) == (
        *(made.schedule, made.peak_bytes, made.cost_s, made.lower_bound_s),
    )
    assert not made.is_bound_stated
    assert read.is_bound_stated == (read.lower_bound_s > read.keep_all_cost_s)


def test_what_a_plan_depends_on_is_its_key() -> None:
    graph = traced(64)
    slower = graph.with_costs([2 * op.cost_s for op in graph.operators])
    larger = graph.with_costs(
        [op.cost_s for op in graph.operators], [op.workspace_bytes + 1 for op in graph.operators]
    )
    other = traced(65)

    keys = [
        key_of(g, budget, how)
        for g in (graph, slower, larger, other)
        for budget in (1, 2)
        for how in ("auto", "milp")
    ]

    assert len(set(keys)) == len(keys)
    assert key_of(graph, 1, "auto") == key_of(replace(graph, costs="another name"), 1, "auto")


@pytest.mark.parametrize("damage", ["{", "not json", "", "[" * 60_000, '{"status": ' * 60_000])
def test_a_damaged_plan_is_made_again(
    damage: str, tmp_path: Path, solved: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    graph = traced(64)
    cache = PlanCache(tmp_path)
    solution = cache.get_or_solve(graph, 1 << 30, "auto", lambda: remat.solve(graph, 1 << 30))
    (path,) = tmp_path.glob("*.json")
    path.write_text(damage)

    with caplog.at_level(logging.WARNING):
        again = cache.get_or_solve(graph, 1 << 30, "auto", lambda: replace(solution, wall_s=1.0))
    assert again.wall_s == 1.0
    assert "is made again" in caplog.text


def test_a_plan_that_does_not_fit_its_step_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Naive: the file under the key is trusted.

    A copied or edited file then exceeds the budget.
    """
    graph = traced(64)
    keep_all = remat.solve(graph, "100%")
    budget_bytes = int(0.8 * keep_all.peak_bytes)
    cache = PlanCache(tmp_path)
    keep_all.save(tmp_path / f"{key_of(graph, budget_bytes, 'auto')}.json")

    with caplog.at_level(logging.WARNING):
        solution = cache.get_or_solve(
            graph, budget_bytes, "auto", lambda: remat.solve(graph, budget_bytes, time_limit_s=2.0)
        )

    assert solution.peak_bytes <= budget_bytes
    assert "does not fit its step" in caplog.text


def test_concurrent_readers_and_writers_see_whole_plans(tmp_path: Path) -> None:
    graph = traced(64)
    solution = remat.solve(graph, 1 << 30)
    cache = PlanCache(tmp_path, limit_bytes=0)  # every write removes what the others wrote

    def use(turn: int) -> bool:
        """Whether the plan came from disk."""
        own = replace(solution, wall_s=float(turn))
        found = cache.get_or_solve(graph, 1 << 30, f"auto {turn % 3}", lambda: own)
        assert found.schedule == solution.schedule
        return found.wall_s != turn

    with ThreadPoolExecutor(8) as pool:
        assert any(list(pool.map(use, range(200))))


def test_the_folder_stays_within_its_limit(tmp_path: Path) -> None:
    graph = traced(64)
    solution = remat.solve(graph, "100%")
    cache = PlanCache(tmp_path)
    for turn in range(4):
        cache.get_or_solve(graph, 1 << 30, f"auto {turn}", lambda: solution)

    size = next(tmp_path.glob("*.json")).stat().st_size
    replace(cache, limit_bytes=2 * size).get_or_solve(graph, 1 << 30, "auto 4", lambda: solution)
    assert len(list(tmp_path.glob("*.json"))) == 2
    assert (tmp_path / f"{key_of(graph, 1 << 30, 'auto 4')}.json").exists()


def test_nothing_is_written_without_a_plan_cache(tmp_path: Path) -> None:
    checkpointed(Net(), plan_cache=False)(batch(64)).backward()
    assert plan_files(tmp_path) == []


def test_a_folder_that_cant_be_written_does_not_stop_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "remat").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        checkpointed(Net())(batch(64)).backward()
    assert "stays in memory" in caplog.text


def test_declared_sizes_are_planned_for_at_their_largest(solved: list[float]) -> None:
    model = Net()
    plain = copy.deepcopy(model)
    checkpointed(model)
    x = batch(16)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=256)

    for each in (x, batch(100), batch(256)):
        assert_same(state_after(model, each, seed=1), state_after(plain, each, seed=1))

    assert len(solved) == 1
    pieces = call_of(model).pieces
    assert pieces[-1].solution.overhead > 0
    assert {piece.solution.schedule for piece in pieces} == {pieces[-1].solution.schedule}
    assert x._dynamo_dynamic_indices == {0}  # type: ignore[attr-defined]


def test_a_largest_size_that_cannot_fit_is_refused_at_the_first_call() -> None:
    """Naive: a small first batch fits, and training stops hours later at a long one."""
    largest = remat.minimum(traced(4096)).peak_bytes
    model, x = checkpointed(Net(), largest // 4), batch(2)
    torch._dynamo.mark_dynamic(x, 0, max=4096)
    with pytest.raises(remat.BudgetError):
        model(x)


def test_a_wrong_shape_is_refused_and_changes_nothing() -> None:
    """Naive: torch.compile's failure counts as a graph break; later steps run in pieces."""
    model = Net()
    plain = copy.deepcopy(model)
    checkpointed(model)

    for _ in range(2):
        with pytest.raises(remat.TraceError, match=r"(?s)whole and in pieces: .*17"):
            model(torch.randn(256, 17))
        assert_same(state_after(model, batch(256), seed=1), state_after(plain, batch(256), seed=1))

    call = call_of(model)
    assert call.piecewise is None
    assert not remat.report(model).breaks
