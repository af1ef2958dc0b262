"""`Auto`, its bounds, the least budget and the curve.

Exact oracles on tiny graphs, published numbers on large ones.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import remat
from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution, Status
from remat.core.validate import validate
from remat.solvers import make_solver
from remat.solvers.auto import raising, starting
from remat.solvers.auto.minimum import minimum
from remat.solvers.auto.reuse import Shared
from remat.solvers.auto.solver import NAMES, Auto
from remat.solvers.auto.starting import Segments
from remat.solvers.auto.technique import Solve
from remat.solvers.bounds.lazy_rows import LazyRows
from remat.solvers.bounds.window import Window, WindowModel
from remat.solvers.core import compiled
from remat.solvers.core.accounting import working_set_bytes
from remat.solvers.core.incumbent import Search
from remat.solvers.core.on_demand import forward_length, steps_on_demand
from remat.solvers.core.progress import Progress
from remat.solvers.persistent.rotor import rotor_steps
from remat.solvers.search.annealing import LocalSearch, Round
from remat.solvers.search.greedy_eviction import Rule, steps_with_eviction
from remat.solvers.search.restarts import Restarts
from remat.solvers.search.sequence import OVER, SLOT, bytes_held, pack
from remat.solvers.search.timeline import lay_out
from remat.tracers.synthetic import (
    FAMILIES,
    chain,
    random_layered,
    random_step,
    transformer,
    two_regions,
    unet,
)
from tests.support.checkout import SHARED
from tests.support.graphs import keep_all_bytes
from tests.support.oracles import brute_force, minimum_bytes

INSTANCES = SHARED / "instances"
QUICK = Auto(gap=0.0, rounds=1, time_limit_s=3.0)


@functools.cache
def instance(name: str) -> tuple[Graph, dict[str, int]]:
    path = INSTANCES / f"{name}.json"
    if not path.exists():
        pytest.skip(f"the published instance {path} is missing")
    data = json.loads(path.read_text())
    return Graph.from_arrays(
        data["cost"], data["size"], data["edges"], first_backward=data.get("first_backward")
    ), data["budgets"]


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
    solution = Auto(gap=gap, rounds=1, time_limit_s=60.0).solve(graph, budget_bytes=budgets[label])

    assert solution.schedule is not None
    assert validate(graph, solution.schedule, budget_bytes=budgets[label]) == []
    assert solution.lower_bound_s <= solution.cost_s <= best
    assert solution.gap < 0.01
    assert solution.wall_s < 60


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


def walk(local: LocalSearch, steps: Sequence[int]) -> list[int]:
    return [
        int(op) for op in local.run(np.array(steps, np.int64), Round(300, 1e-2, 1e-3), chunk=50)
    ]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), num_operators=st.integers(2, 14))
def test_the_sequence_agrees_with_the_simulator_to_the_byte(seed: int, num_operators: int) -> None:
    graph = random_step(num_operators, seed=seed)
    local = LocalSearch(graph, budget_bytes=int(0.8 * keep_all_bytes(graph)), seed=seed)
    steps = walk(local, range(graph.num_operators))
    schedule = Schedule.from_steps(graph, steps)
    assert validate(graph, schedule) == []

    state, simulation = (
        lay_out(pack(graph, room=0), np.array(steps, np.int64)),
        simulate(graph, schedule),
    )

    is_step = (state.slots[SLOT] >= 0) & (state.slots[SLOT] < graph.num_operators)
    assert (
        bytes_held(state.slots)[is_step] + graph.resident_bytes
    ).tolist() == simulation.bytes_at.tolist()
    assert state.costs[-1] == pytest.approx(simulation.cost_s)
    assert state.sums[OVER] == np.maximum(bytes_held(state.slots), 0).sum()


def test_annealing_never_leaves_the_regions() -> None:
    graph = two_regions(8)
    local = LocalSearch(graph, budget_bytes=int(0.7 * keep_all_bytes(graph)), seed=1)
    steps = walk(local, range(graph.num_operators))
    assert len(steps) > graph.num_operators
    assert validate(graph, Schedule.from_steps(graph, steps)) == []


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


@pytest.mark.parametrize("rule", Rule)
def test_eviction_fits_or_returns_none(rule: Rule) -> None:
    graph = chain(30)
    for budget in range(3, 40, 9):
        steps = steps_with_eviction(graph, budget, rule)
        if steps is not None:
            assert simulate(graph, Schedule.from_steps(graph, steps.tolist())).peak_bytes <= budget
    assert steps_with_eviction(graph, 2, rule) is None


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 100_000),
    chances=st.lists(st.sampled_from([0.0, 0.3, 0.7]), min_size=1, max_size=3),
)
def test_eviction_returns_a_plan_that_fits_and_repairs_one_that_does_not(
    seed: int, chances: list[float]
) -> None:
    graph, rng = random_layered(12, seed=seed), random.Random(seed)
    first = forward_length(graph)
    kept = {
        first + 3 * index: [
            v
            for v in range(len(graph.values))
            if graph.producer[v] < first + 3 * index and rng.random() < chance
        ]
        for index, chance in enumerate(chances)
    }

    plan = steps_on_demand(graph, kept[first], later=kept)
    roomy = steps_with_eviction(graph, 1 << 40, kept=kept)
    assert roomy is not None
    assert roomy.tolist() == plan

    needed = simulate(graph, Schedule.from_steps(graph, plan)).peak_bytes
    for rule in Rule:
        steps = steps_with_eviction(graph, needed * 9 // 10, rule, kept=kept)
        if steps is not None:
            assert (
                simulate(graph, Schedule.from_steps(graph, steps.tolist())).peak_bytes
                <= needed * 9 // 10
            )


@pytest.mark.parametrize("graph", [random_layered(40, seed=1), unet(4)], ids=["layered", "unet"])
def test_eviction_repairs_a_plan_that_needs_a_tenth_too_much(graph: Graph) -> None:
    first = forward_length(graph)
    plan = [
        value for value in range(len(graph.values)) if graph.producer[value] < first and value % 2
    ]
    needed = simulate(graph, Schedule.from_steps(graph, steps_on_demand(graph, plan))).peak_bytes

    moved = [
        steps_with_eviction(graph, needed * 9 // 10, rule, kept={first: plan}) for rule in Rule
    ]
    fitting = [
        simulate(graph, Schedule.from_steps(graph, steps.tolist()))
        for steps in moved
        if steps is not None
    ]

    assert fitting
    assert all(simulation.peak_bytes <= needed * 9 // 10 for simulation in fitting)


def test_the_search_runs_in_python_if_compiling_would_take_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled, "is_ready", lambda function: False)
    graph, budgets = instance("checkmate_unet")

    for rule in Rule:
        plain, fast = (
            steps_with_eviction(graph, budgets["7GB"], rule, left_s=left_s)
            for left_s in (1.0, math.inf)
        )
        assert plain is not None
        assert fast is not None
        assert np.array_equal(plain, fast)

    assert steps_with_eviction(chain(3_000), 100, left_s=1.0) is None
    solution = Auto(time_limit_s=2.0).solve(graph, budget_bytes=budgets["7GB"])
    assert solution.schedule is not None


def test_one_seed_gives_one_answer() -> None:
    graph = random_layered(9, seed=5)
    budget = int(0.7 * keep_all_bytes(graph))
    first, second = (
        Auto(gap=0.0, seed=3, rounds=1).solve(graph, budget_bytes=budget) for _ in range(2)
    )
    assert first.schedule == second.schedule
    assert first.lower_bound_s == second.lower_bound_s


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


def test_a_large_graph_is_answered_within_the_time_limit() -> None:
    graph = transformer(60)
    minimum(chain(4))  # compiles once per machine, under its own limit
    budget = int(0.75 * keep_all_bytes(graph))
    solution = Auto(time_limit_s=2.0).solve(graph, budget_bytes=budget)
    assert solution.is_solved
    assert solution.wall_s < 2.2 + 0.3  # 10 % more, on a busy machine


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


# these run on large graphs only, or on graphs of a few operators
ELSEWHERE = {"prices", "relaxations", "margins", "segments", "exhaustive"}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ELSEWHERE])
def test_a_technique_that_is_off_finds_and_proves_nothing(name: str) -> None:
    graph = random_layered(24, seed=3, is_training=True)
    told: list[Progress] = []
    solver = Auto(gap=0.0, rounds=1, time_limit_s=0.7, without=(name,), progress=told.append)
    solution = solver.solve(graph, budget_bytes=int(0.6 * keep_all_bytes(graph)))

    assert solution.is_solved
    assert all(name not in (p.found_by, p.proved_by) for p in told)


def test_an_unknown_technique_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'restart'.*restarts"):
        Auto(without=("restart",))
    with pytest.raises(TypeError, match="give names"):
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


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="gap"):
        Auto(gap=-1.0)
    with pytest.raises(ValueError, match="time"):
        Auto(time_limit_s=0.0)


def test_a_solver_is_named_by_its_options() -> None:
    graph = chain(4)
    solution: Solution = QUICK.solve(graph, budget_bytes=keep_all_bytes(graph))
    assert solution.solver == repr(QUICK)
    assert "progress" not in solution.solver
