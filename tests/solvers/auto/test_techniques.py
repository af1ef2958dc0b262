"""Techniques and options: who found and who proved, what can be switched off."""

from __future__ import annotations

import logging

import pytest

import remat
from remat.solvers import make_solver
from remat.solvers.auto.solver import NAMES, PARTS, Auto
from remat.solvers.core.progress import Progress
from remat.tracers.synthetic import random_layered
from tests.support.graphs import keep_all_bytes


def test_progress_is_reported_and_never_gets_worse() -> None:
    graph = random_layered(16, seed=7)
    told: list[Progress] = []
    solution = Auto(rounds=1, time_limit_s=0.8, progress=told.append).solve(
        graph, budget_bytes=int(0.6 * keep_all_bytes(graph))
    )

    costs = [p.cost_s for p in told if p.cost_s is not None]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == solution.cost_s
    assert [p.bound_s for p in told] == sorted(p.bound_s for p in told)


@pytest.mark.parametrize("threads", [1, 2])
def test_every_improvement_names_its_technique(threads: int) -> None:
    graph = random_layered(40, seed=0, is_training=True)
    told: list[Progress] = []
    solver = Auto(gap=0.0, rounds=1, time_limit_s=2.0, threads=threads, progress=told.append)
    solution = solver.solve(graph, budget_bytes=int(0.5 * keep_all_bytes(graph)))

    names = {*NAMES, "least-budget", "keep-all"}
    assert {p.found_by for p in told if p.cost_s is not None} <= names
    assert {p.proved_by for p in told if p.bound_s > graph.cost_s} <= names
    last = next(p for p in told if p.cost_s == solution.cost_s)
    assert solution.found_by == last.found_by != ""
    assert solution.proved_by == told[-1].proved_by != ""


# these run on large graphs only, on graphs of a few operators, or where a gap is left at the end
ELSEWHERE = {
    "prices", "relaxations", "margins", "segments", "exhaustive", "repair", "stage-selection",
    "neighbourhoods", "second-restarts", "other-seeds", "benders",
}  # fmt: skip


HERE = [name for name in NAMES if name not in {*ELSEWHERE, *PARTS}]


def techniques_run(
    caplog: pytest.LogCaptureFixture, without: tuple[str, ...], time_limit_s: float
) -> set[str]:
    graph = random_layered(24, seed=3, is_training=True)
    solver = Auto(gap=0.0, rounds=1, time_limit_s=time_limit_s, without=without)
    with caplog.at_level(logging.DEBUG, "remat.solvers.auto.technique"):
        assert solver.solve(graph, budget_bytes=int(0.6 * keep_all_bytes(graph))).is_solved
    return {record.getMessage() for record in caplog.records if record.module == "technique"}


def test_all_techniques_but_those_for_other_graphs_run(caplog: pytest.LogCaptureFixture) -> None:
    assert set(HERE) <= techniques_run(caplog, without=(), time_limit_s=5.0)


def test_benders_runs_where_refinement_leaves_a_gap(caplog: pytest.LogCaptureFixture) -> None:
    assert "benders" in techniques_run(caplog, without=("refinement",), time_limit_s=5.0)
    caplog.clear()
    assert "benders" not in techniques_run(
        caplog, without=("refinement", "benders"), time_limit_s=0.7
    )


@pytest.mark.parametrize("name", HERE)
def test_a_technique_that_is_off_does_not_run(caplog: pytest.LogCaptureFixture, name: str) -> None:
    assert name not in techniques_run(caplog, without=(name,), time_limit_s=0.7)


def test_an_unknown_technique_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'restart'.*restarts"):
        Auto(without=("restart",))
    with pytest.raises(TypeError, match="give a tuple"):
        Auto(without="restarts")  # type: ignore[arg-type]


def test_a_misspelled_option_is_refused_and_those_of_searches_are_not() -> None:
    with pytest.raises(TypeError, match=r"no option withot; it has .*without"):
        make_solver("auto", withot=("window",))
    with pytest.raises(TypeError, match="no option without; it has none"):
        make_solver("chen-greedy", without=("window",))
    make_solver("chen-greedy", time_limit_s=1.0, gap=0.0, threads=1)


def test_the_log_says_who_found_and_who_proved(caplog: pytest.LogCaptureFixture) -> None:
    graph = random_layered(24, seed=3, is_training=True)
    with caplog.at_level(logging.INFO, "remat"):
        solution = remat.solve(graph, "60%", time_limit_s=1.0)
    assert caplog.messages[-1].endswith(
        f"; found by {solution.found_by}, bound by {solution.proved_by}"
    )
