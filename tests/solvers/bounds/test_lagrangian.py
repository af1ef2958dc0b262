"""Prices for memory.

The bound is compared with the linear program and the optimum, the cut with enumeration; schedules
are valid.
"""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.validate import validate
from remat.solvers.auto.minimum import minimum
from remat.solvers.auto.solver import Auto
from remat.solvers.bounds.lagrangian import Lagrangian
from remat.solvers.bounds.lazy_rows import LazyRows
from remat.solvers.bounds.window import WindowModel
from remat.solvers.core.accounting import Accounting
from remat.solvers.core.on_demand import forward_length
from remat.solvers.lp.min_cut import MinCut
from remat.tracers.synthetic import FAMILIES, chain, random_layered, random_step, transformer, unet
from tests.support.graphs import keep_all_bytes
from tests.support.oracles import brute_force, minimum_bytes


def deadline() -> float:
    return time.perf_counter() + 60


def least_weight(graph: Graph, first: int, weight: list[float], price: list[float]) -> float:
    """Solves the problem of `MinCut` by trying all sets of recomputations."""
    free = [j for j in range(graph.num_operators) if graph.operators[j].is_recomputable]
    made = {v: j for j, op in enumerate(graph.operators) for v in op.writes}
    read_later = {v for op in graph.operators[first:] for v in op.reads} | set(graph.outputs)

    least = float("inf")
    for size in range(len(free) + 1):
        for again in map(set, itertools.combinations(free, size)):
            needed = read_later | {v for j in again if j < first for v in graph.operators[j].reads}
            kept = [v for v in needed if v in made and made[v] < first and made[v] not in again]
            least = min(least, sum(weight[j] for j in again) + sum(price[v] for v in kept))
    return least


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), data=st.data())
def test_the_cut_has_the_least_weight_of_all_sets(seed: int, data: st.DataObject) -> None:
    graph = random_step(7, seed=seed)
    first = forward_length(graph)
    weights = st.lists(
        st.integers(-3, 9), min_size=graph.num_operators, max_size=graph.num_operators
    )
    prices = st.lists(st.integers(0, 9), min_size=len(graph.values), max_size=len(graph.values))
    weight, price = data.draw(weights), data.draw(prices)

    cut = MinCut(graph, Accounting(graph), first).cut(
        np.array(weight, np.float64), np.array(price, np.float64)
    )
    best = least_weight(graph, first, [float(w) for w in weight], [float(p) for p in price])

    assert cut.value <= best + 1e-9
    assert cut.value == pytest.approx(best, abs=1e-4)
    assert np.dot(weight, cut.is_again) + np.dot(price, cut.is_kept) == pytest.approx(
        best, abs=1e-4
    )


def with_least(name: str) -> tuple[Graph, int]:
    graph = {
        "chain": chain(40),
        "unet": unet(5),
        "transformer": transformer(6),
        "layered": random_layered(60, seed=3),
    }[name]
    return graph, minimum(graph).peak_bytes


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
@pytest.mark.parametrize("name", ["chain", "unet", "transformer", "layered"])
def test_the_bound_is_that_of_the_linear_relaxation(name: str, share: float) -> None:
    graph, least_bytes = with_least(name)
    budget = int(least_bytes + share * (keep_all_bytes(graph) - least_bytes))
    first, count = forward_length(graph), graph.num_operators
    windows = [(0, first), (first, count)]
    model = WindowModel(graph, windows, priced=windows, budget_bytes=budget)

    bound = Lagrangian(graph, budget_bytes=budget).raise_bound(deadline=deadline())
    outcome = LazyRows(model).solve(deadline=deadline(), is_relaxed=True)
    exact = graph.cost_s + outcome.bound / model.cost_scale

    assert bound <= max(exact, graph.cost_s) * (1 + 1e-6)
    assert bound >= exact - 2e-4 * graph.cost_s


@settings(max_examples=120, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), share=st.floats(0, 1))
def test_no_bound_is_above_the_optimum(seed: int, share: float) -> None:
    graph = random_step(3 + seed % 5, seed=seed)
    floor, ceiling = minimum_bytes(graph), keep_all_bytes(graph)
    budget = int(floor + share * (ceiling - floor))

    best = brute_force(graph, budget)
    assert best is not None
    assert Lagrangian(graph, budget_bytes=budget).raise_bound(deadline=deadline()) <= best * (
        1 + 1e-12
    )


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_has_a_bound_and_valid_schedules(name: str) -> None:
    graph = FAMILIES[name]()
    lagrangian = Lagrangian(graph, budget_bytes=int(0.8 * keep_all_bytes(graph)))
    assert lagrangian.raise_bound(deadline=deadline()) >= graph.cost_s
    for steps in lagrangian.schedules(deadline=deadline()):
        assert validate(graph, Schedule.from_steps(graph, steps)) == []


def test_layers_that_repeat_are_solved_once() -> None:
    """One solution of a layer serves all of them.

    The gap shrinks, and no more cuts are needed for more layers.
    """
    gaps, cuts = [], []
    for blocks in (20, 160):
        graph = transformer(blocks)
        budget = int(0.8 * keep_all_bytes(graph))
        lagrangian = Lagrangian(graph, budget_bytes=budget)
        bound = lagrangian.raise_bound(deadline=deadline())
        cuts.append(lagrangian.num_cuts)

        found = [
            simulate(graph, Schedule.from_steps(graph, steps))
            for steps in lagrangian.schedules(deadline=deadline())
        ]
        gaps.append(min(run.cost_s for run in found if run.peak_bytes <= budget) / bound - 1)

    assert gaps[1] < min(gaps[0], 2e-3)
    assert cuts[1] <= 2 * cuts[0]


def test_thousands_of_operators_are_planned_within_a_percent() -> None:
    graph = transformer(120)
    solution = Auto(gap=0.01, time_limit_s=30).solve(
        graph, budget_bytes=int(0.75 * keep_all_bytes(graph))
    )
    assert graph.num_operators > 3_000
    assert solution.gap <= 0.01
