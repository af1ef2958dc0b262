"""Where a search starts: far below the peak of keeping everything, from what fits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.solvers.auto import raising, starting
from remat.solvers.auto.minimum import minimum
from remat.solvers.auto.reuse import Shared
from remat.solvers.auto.solver import Auto
from remat.solvers.auto.starting import Segments
from remat.solvers.auto.technique import Solve
from remat.solvers.core.incumbent import Search
from remat.solvers.persistent.rotor import rotor_steps
from remat.solvers.search.annealing import LocalSearch, Round
from remat.solvers.search.restarts import Restarts
from remat.tracers.synthetic import chain, random_step
from tests.support.graphs import keep_all_bytes


@pytest.mark.parametrize(
    ("graph", "share", "is_far"), [(random_step(40, seed=1), 0.77, False), (chain(30), 0.14, True)]
)
def test_far_below_keep_all_runs_start_from_the_schedule_that_fits(
    graph: Graph, share: float, is_far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a small graph the second set of runs starts without it."""
    budget = int(share * keep_all_bytes(graph))
    starts: list[list[list[int]]] = []

    def recording(self: Restarts, begins: Sequence[Sequence[int]], **options: Any) -> None:
        starts.append([list(steps) for steps in begins])  # nothing runs from them
        if len(starts) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Restarts, "run", recording)
    bounds = tuple(technique.name for technique in raising.BOUNDING)
    solver = Auto(gap=0.0, rounds=1, time_limit_s=60.0, threads=1, without=bounds)
    with pytest.raises(KeyboardInterrupt):
        solver.solve(graph, budget_bytes=budget)

    first, second = starts
    keep_all = list(range(graph.num_operators))
    fits = [
        simulate(graph, Schedule.from_steps(graph, steps)).peak_bytes <= budget for steps in first
    ]

    assert fits.index(True) == (0 if is_far else len(first) - 1)
    assert first[1 if is_far else 0] == keep_all
    assert second == [steps for steps, does_fit in zip(first, fits, strict=True) if not does_fit]


@functools.cache
def segments_of(graph: Graph, budget_bytes: int) -> list[int] | None:
    return rotor_steps(graph, budget_bytes)


@pytest.mark.parametrize(("share", "is_far"), [(0.04, True), (0.25, False)])
@pytest.mark.parametrize("threads", [1, 2])
def test_far_below_keeping_everything_segments_are_planned_and_annealed(
    share: float, is_far: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = chain(300)
    budget = int(share * keep_all_bytes(graph))
    planned: list[list[int] | None] = []
    run = LocalSearch.run

    def recording(self: LocalSearch, steps: Any, round_: Round, **options: Any) -> Any:
        if list(steps) in planned:
            raise KeyboardInterrupt  # the rest of the solve shows nothing more
        return run(self, steps, replace(round_, iterations=500), **options)

    def planning(graph: Graph, budget_bytes: int, **_: Any) -> list[int] | None:
        planned.append(segments_of(graph, budget_bytes))
        return planned[-1]

    def applies(self: Segments, solve: Solve) -> bool:  # however slow the machine is
        return solve.is_large and solve.is_far(self.least_times)

    monkeypatch.setattr(starting, "rotor_steps", planning)
    monkeypatch.setattr(Segments, "applies", applies)
    monkeypatch.setattr(LocalSearch, "run", recording)

    shared = Shared(graph, minimum(graph))
    solver = Auto(gap=0.0, rounds=1, time_limit_s=4.0, threads=threads)
    if is_far:
        segments_of(graph, budget)  # before the clock starts
        with pytest.raises(KeyboardInterrupt):
            solver.improve(graph, budget_bytes=budget, shared=shared)
    else:
        assert solver.improve(graph, budget_bytes=budget, shared=shared).is_solved

    assert len(planned) == is_far


@pytest.mark.parametrize(("time_limit_s", "is_planned"), [(5.0, False), (100.0, True)])
def test_segments_are_not_planned_under_the_limit_of_a_point_of_a_curve(
    time_limit_s: float, is_planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planning(graph: Graph, budget_bytes: int, **_: Any) -> list[int] | None:
        return segments_of(graph, budget_bytes)

    monkeypatch.setattr(starting, "rotor_steps", planning)
    graph = chain(300)
    search = Search(
        graph, budget_bytes=int(0.04 * keep_all_bytes(graph)), gap=0.0, time_limit_s=time_limit_s
    )
    Segments()(Auto().begin(search, Shared(graph)))

    assert bool(search.num_starts or search.steps is not None) == is_planned
