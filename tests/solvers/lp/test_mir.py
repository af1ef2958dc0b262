"""Mixed-integer rounding: no 0/1 point that fits is cut off, and fractional ones are."""

from __future__ import annotations

import itertools
import time
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.solvers.bounds.lazy_rows import LazyRows
from remat.solvers.bounds.window import WindowModel
from remat.solvers.core.on_demand import forward_length
from remat.solvers.lp.rounding_cuts import Knapsack, rounded
from remat.tracers.synthetic import random_layered
from tests.support.graphs import budget_between, optimum, random_training_graph


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    sizes=st.lists(
        st.one_of(st.integers(-40, 40), st.sampled_from([-(2**40), 2**39, 2**40 + 1])),
        min_size=1,
        max_size=8,
    ),
    share=st.floats(0, 1),
    seed=st.integers(0, 10_000),
)
def test_a_fitting_point_is_never_cut_off(sizes: list[int], share: float, seed: int) -> None:
    low, high = sum(min(size, 0) for size in sizes), sum(max(size, 0) for size in sizes)
    upper = int(low + share * (high - low))
    rng = np.random.default_rng(seed)
    point = np.where(
        rng.random(len(sizes)) < 0.4, rng.random(len(sizes)), rng.integers(0, 2, len(sizes))
    )

    for cut in rounded(
        Knapsack(np.arange(len(sizes)), np.array(sizes), upper, rng.permutation(len(sizes))), point
    ):
        assert float(cut.coefficients @ point[cut.columns]) > cut.upper
        for bits in itertools.product((0, 1), repeat=len(sizes)):
            if sum(size * bit for size, bit in zip(sizes, bits, strict=True)) <= upper:
                assert float(cut.coefficients @ np.array(bits)[cut.columns]) <= cut.upper


def test_a_fraction_of_a_large_value_is_cut_off() -> None:
    (cut,) = rounded(
        Knapsack(np.arange(4), np.array([4, 4, 4, 1]), 9, np.arange(4)),
        np.array([1.0, 1.0, 0.25, 0.0]),
    )
    assert cut.columns.tolist() == [0, 1, 2]
    np.testing.assert_allclose(cut.coefficients, 1)
    np.testing.assert_allclose(cut.upper, 2)  # two of them fit, with or without the small one


def test_values_cheap_to_drop_are_left_out_of_a_cut() -> None:
    """The last value fits once 3 of 20 bytes are dropped.

    If the cut counted the first operator's 2 bytes, dropping them would satisfy it.
    """
    sizes, written = np.array([2, 6, 6, 6]), np.array([0, 2, 3, 1])
    plain, few = rounded(Knapsack(np.arange(4), sizes, 17, written), np.array([1.0, 1.0, 1.0, 0.5]))
    assert 0 in plain.columns.tolist()
    assert few.columns.tolist() == [1, 2, 3]
    np.testing.assert_allclose(few.upper, 2)  # of the three large ones


def test_a_point_with_nothing_fractional_is_left_alone() -> None:
    assert (
        rounded(Knapsack(np.arange(2), np.array([3, 5]), 4, np.arange(2)), np.array([1.0, 1.0]))
        == []
    )


def relaxed_bound_s(graph: Graph, budget: int, stages: int, most_roundings: int) -> float:
    first, end = forward_length(graph), graph.num_operators
    boundaries = np.linspace(first, end, stages + 1).astype(int).tolist()
    windows = [(a, b) for i, a in enumerate(boundaries) for b in boundaries[i + 1 :]]
    priced = [(0, first), *pairwise(boundaries)]

    model = WindowModel(graph, sorted({(0, first), *windows}), priced=priced, budget_bytes=budget)
    model.program.starts_from_last = True
    return model.bound_s(
        LazyRows(model, most_roundings=most_roundings).solve(
            deadline=time.perf_counter() + 60, is_relaxed=True
        )
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 100_000),
    share=st.sampled_from([0.0, 0.25, 0.5, 0.75]),
    stages=st.integers(1, 3),
)
def test_no_bound_with_cuts_is_above_the_optimum(seed: int, share: float, stages: int) -> None:
    graph = random_training_graph(seed, 4, 7)
    budget = budget_between(graph, share)
    best = optimum(graph, budget)
    assert relaxed_bound_s(graph, budget, stages, 10) <= best.cost_s * (1 + 1e-9)


def test_cuts_raise_the_bound_of_a_relaxation() -> None:
    graph = random_layered(40, seed=0, is_training=True)
    budget = simulate(graph, Schedule.keep_all(graph)).peak_bytes * 45 // 100
    plain, cut = (relaxed_bound_s(graph, budget, 2, most) - graph.cost_s for most in (0, 10))
    assert cut > 1.01 * plain
