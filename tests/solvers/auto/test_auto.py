"""`Auto` and its bounds: exact oracles on tiny graphs, published numbers on large ones."""

from __future__ import annotations

import itertools
import time
from typing import NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.core.graph import Graph
from remat.core.solution import Solution, Status
from remat.core.validate import validate
from remat.solvers.auto import raising
from remat.solvers.auto.minimum import minimum
from remat.solvers.auto.raising import BOUNDING
from remat.solvers.auto.reuse import Shared
from remat.solvers.auto.solver import NAMES, Auto
from remat.solvers.auto.technique import Solve
from remat.solvers.bounds.lazy_rows import LazyRows
from remat.solvers.bounds.window import Window, WindowModel
from remat.solvers.core.accounting import working_set_bytes
from remat.tracers.synthetic import FAMILIES, chain, random_layered, random_step, transformer
from tests.support.graphs import keep_all_bytes
from tests.support.oracles import brute_force, minimum_bytes
from tests.support.published import instance

QUICK = Auto(gap=0.0, rounds=1, time_limit_s=3.0)


def tiny_graph(seed: int) -> Graph:
    kind = seed % 4
    if kind == 3:
        return random_layered(3, seed=seed, width=2)
    return (
        random_layered(6, seed=seed, width=2, is_training=False)
        if kind == 2
        else random_step(3 + seed % 4, seed=seed)
    )


@pytest.mark.parametrize(
    ("name", "label", "best"),
    [
        ("checkmate_vgg16", "8GB", 255_828),
        ("checkmate_vgg16", "10GB", 250_600),
        ("checkmate_unet", "10GB", 192_834 * 1.001),
        ("checkmate_unet", "7GB", 196_567 * 1.006),
        ("checkmate_resnet50", "10GB", 108_048),
        ("checkmate_resnet50", "8GB", 110_154),
        ("checkmate_fcn8", "80%", 10_275_337_746_048 * 1.00137),
        ("checkmate_vgg19", "51380224", 58_982_891_520),
        ("random_layered_100", "80%", 47_769 * 1.025),
    ],
)
def test_published_instances_are_solved_near_the_best_known(
    name: str, label: str, best: float
) -> None:
    graph, budgets = instance(name)
    gap = 0.001 if label != "7GB" else 0.006  # there 0.5 % takes half a minute
    solution = Auto(gap=gap, rounds=1, time_limit_s=120.0).solve(graph, budget_bytes=budgets[label])

    assert solution.schedule is not None
    assert validate(graph, solution.schedule, budget_bytes=budgets[label]) == []
    assert solution.lower_bound_s <= solution.cost_s <= best
    assert solution.gap <= gap


@pytest.mark.parametrize("label", ["6GB", "7GB"])
def test_published_infeasible_budgets_are_proved(label: str) -> None:
    graph, budgets = instance("checkmate_vgg16")
    solution = Auto().solve(graph, budget_bytes=budgets[label])
    assert solution.status is Status.INFEASIBLE
    assert solution.minimum_bytes == minimum(graph).peak_bytes > budgets[label]
    assert solution.techniques == f"proved infeasible by {solution.proved_by}"
    assert solution.proved_by in {*NAMES, "working-set"}


@settings(max_examples=6, deadline=None, derandomize=True)  # many more in `test_many_graphs`
@given(seed=st.integers(0, 10_000), share=st.floats(0, 1))
def test_bounds_and_answers_agree_with_brute_force(seed: int, share: float) -> None:
    graph = tiny_graph(seed)
    floor, ceiling = minimum_bytes(graph), keep_all_bytes(graph)
    least = minimum(graph)
    assert least.lower_bound_bytes <= floor <= least.peak_bytes <= ceiling

    for budget in {floor - 1, floor, int(floor + share * (ceiling - floor)), least.peak_bytes}:
        best = brute_force(graph, budget)
        solution = Auto(gap=1e-4, rounds=1, time_limit_s=5.0).solve(graph, budget_bytes=budget)
        if best is None:
            assert not solution.is_solved
            assert solution.minimum_bytes == least.peak_bytes
            continue

        assert solution.status is not Status.INFEASIBLE
        assert solution.lower_bound_s <= best * (1 + 1e-9)
        assert solution.is_solved or budget < least.peak_bytes
        assert not solution.is_solved or solution.cost_s >= best * (1 - 1e-9)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=3, unique=True),
)
def test_every_window_model_bounds_the_exact_optimum(seed: int, cuts: list[int]) -> None:
    graph = tiny_graph(seed)
    boundaries = [0, *sorted(c for c in cuts if c < graph.num_operators), graph.num_operators]
    tiles = list(itertools.pairwise(boundaries))
    everything: list[Window] = [(a, b) for a in boundaries for b in boundaries if a < b]
    floor, ceiling = minimum_bytes(graph), keep_all_bytes(graph)

    for budget in {floor, (floor + ceiling) // 2}:
        best = brute_force(graph, budget)
        assert best is not None
        for windows in (tiles, everything):
            model = WindowModel(graph, windows, priced=tiles, budget_bytes=budget)
            assert model.bound_s(
                LazyRows(model).solve(deadline=time.perf_counter() + 5)
            ) <= best * (1 + 1e-9)

    model = WindowModel(graph, everything, priced=tiles, budget_bytes=ceiling, is_peak=True)
    assert model.peak_bytes(LazyRows(model).solve(deadline=time.perf_counter() + 5)) <= floor


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_solved_at_the_least_a_middle_and_the_full_budget(family: str) -> None:
    graph = FAMILIES[family]()
    least, ceiling = minimum(graph), keep_all_bytes(graph)
    solver = Auto(rounds=1, time_limit_s=0.3)
    assert solver.solve(graph, budget_bytes=ceiling).status is Status.OPTIMAL

    for budget in {least.peak_bytes, (least.peak_bytes + ceiling) // 2}:
        solution = solver.improve(graph, budget_bytes=budget, shared=Shared(graph, least))
        assert solution.is_solved
        assert solution.peak_bytes <= budget

    if working_set_bytes(graph) > 0:
        below = solver.improve(
            graph, budget_bytes=working_set_bytes(graph) - 1, shared=Shared(graph, least)
        )
        assert below.status is Status.INFEASIBLE
        assert below.minimum_bytes == least.peak_bytes


@pytest.mark.parametrize("family", ["chain_with_skips", "unet", "random_layered"])
def test_the_least_budget_has_a_schedule_before_models_may_take_the_time(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    graph = FAMILIES[family]()
    has_schedule: list[bool] = []

    def first_model(solve: Solve, **options: object) -> NoReturn:
        has_schedule.append(solve.search.steps is not None)
        raise KeyboardInterrupt  # the rest of the solve shows nothing more

    monkeypatch.setattr(raising, "refine", first_model)
    with pytest.raises(KeyboardInterrupt):
        QUICK.solve(graph, budget_bytes=minimum(graph).peak_bytes)

    assert has_schedule == [True]


def test_the_least_budget_is_always_met() -> None:
    graph = FAMILIES["unet"]()
    least = minimum(graph)
    solution = Auto(gap=100.0, time_limit_s=20.0).solve(graph, budget_bytes=least.peak_bytes)
    assert solution.is_solved
    assert solution.peak_bytes <= least.peak_bytes


def test_with_one_thread_a_seed_gives_one_answer() -> None:
    graph = random_layered(24, seed=3)
    budget = int(0.6 * keep_all_bytes(graph))
    bounding = tuple(technique.name for technique in BOUNDING)  # so that the search decides
    solver = Auto(gap=0.0, seed=3, rounds=1, threads=1, time_limit_s=60.0, without=bounding)
    first, second = (solver.solve(graph, budget_bytes=budget) for _ in range(2))
    assert first.is_solved
    assert first.cost_s > graph.cost_s
    assert (first.schedule, first.lower_bound_s) == (second.schedule, second.lower_bound_s)


def test_a_large_graph_is_answered_within_the_time_limit() -> None:
    graph = transformer(60)
    minimum(chain(4))  # compiles once per machine, under its own limit
    budget = int(0.75 * keep_all_bytes(graph))
    solution = Auto(time_limit_s=2.0).solve(graph, budget_bytes=budget)
    assert solution.is_solved
    assert solution.wall_s < 2 * 2.0  # this machine may be busy


def test_a_solver_is_named_by_its_options() -> None:
    graph = chain(4)
    solution: Solution = QUICK.solve(graph, budget_bytes=keep_all_bytes(graph))
    assert solution.solver == repr(QUICK)
    assert "progress" not in solution.solver
