"""Safe bounds: below every feasible point in exact arithmetic, whatever the multipliers.

They are tight with a solver's own multipliers.
"""

from __future__ import annotations

import math
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Status
from remat.solvers import make_solver
from remat.solvers.bounds.lazy_rows import LazyRows
from remat.solvers.bounds.window import WindowModel
from remat.solvers.checkmate.lp_rounding import lp_bound
from remat.solvers.lp.linear import Program
from remat.solvers.lp.safe_bound import (
    LinearProgram,
    branching_margin,
    is_surely_infeasible,
    safe_bound,
    safe_support,
)
from remat.tracers.synthetic import random_layered, random_step
from tests.support.oracles import brute_force, minimum_bytes


def random_program(seed: int) -> tuple[LinearProgram, np.ndarray]:
    """A program with numbers of very different sizes, and a point that is exactly feasible."""
    random = np.random.default_rng(seed)
    columns, rows = int(random.integers(1, 9)), int(random.integers(0, 7))
    point = random.integers(0, 2, columns).astype(np.float64)
    matrix = random.integers(-3, 4, (rows, columns)) * 10.0 ** random.integers(
        -9, 9, (rows, columns)
    )

    exact = [
        sum(Fraction(float(a)) * Fraction(float(x)) for a, x in zip(row, point, strict=True))
        for row in matrix
    ]

    slack = random.integers(0, 3, rows)
    low = np.array(
        [
            float(e) - abs(float(e)) * 1e-12 if s != 1 else -math.inf
            for e, s in zip(exact, slack, strict=True)
        ]
    )
    high = np.array(
        [
            float(e) + abs(float(e)) * 1e-12 if s != 2 else math.inf
            for e, s in zip(exact, slack, strict=True)
        ]
    )

    start = np.arange(rows + 1) * columns
    index = np.tile(np.arange(columns), rows)
    cost = random.integers(-5, 6, columns) * 10.0 ** random.integers(-6, 7, columns)
    program = LinearProgram(
        cost, np.zeros(columns), np.ones(columns), low, high, start, index, matrix.ravel()
    )
    return program, point


def exact_objective(program: LinearProgram, point: np.ndarray) -> Fraction:
    return sum(
        (Fraction(float(c)) * Fraction(float(x)) for c, x in zip(program.cost, point, strict=True)),
        Fraction(0),
    )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), spread=st.integers(-9, 9))
def test_no_feasible_point_is_below_it_whatever_the_multipliers(seed: int, spread: int) -> None:
    program, point = random_program(seed)
    multipliers = np.random.default_rng(seed + 1).normal(size=len(program.row_lower)) * 10.0**spread
    bound = safe_bound(program, multipliers)
    assert bound == -math.inf or Fraction(bound) <= exact_objective(program, point)
    assert not is_surely_infeasible(program, multipliers)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), spread=st.integers(-9, 9))
def test_as_a_function_of_some_columns_it_is_below_every_feasible_point_too(
    seed: int, spread: int
) -> None:
    program, point = random_program(seed)
    random = np.random.default_rng(seed + 1)
    multipliers = random.normal(size=len(program.row_lower)) * 10.0**spread
    columns = np.flatnonzero(random.random(len(point)) < 0.5)
    support = safe_support(program, program.cost, multipliers, columns)

    if support.constant > -math.inf:
        slope = [
            Fraction(float(a)) * Fraction(float(x))
            for a, x in zip(support.slope, point[columns], strict=True)
        ]
        assert Fraction(support.constant) + sum(slope, Fraction(0)) <= exact_objective(
            program, point
        )


def test_a_bound_at_fixed_columns_holds_for_all_their_values() -> None:
    """Minimises 3x + 2y + z with x + y + z >= 1, z <= 0.5 and a fixed y, then without x."""
    program = Program()
    columns = program.add_columns(np.array([3.0, 2.0, 1.0]))
    program.starts_from_last = True
    program.add_rows(columns[None], [1.0, 1.0, 1.0], lower=1.0)
    program.add_rows(columns[None, 2:], [1.0], upper=0.5)

    for y, value in ((0.0, 2.0), (0.25, 1.75), (0.0, 2.0), (0.5, 1.5), (1.0, 2.0)):
        program.fix(columns[1:2], np.array([y]))
        outcome = program.minimise(is_relaxed=True, time_limit_s=5)
        assert outcome.bound == pytest.approx(value)

        support = program.support(columns[1:2])
        assert support is not None
        assert support.at(np.array([y])) == pytest.approx(value)
        for other, least in ((0.0, 2.0), (0.25, 1.75), (0.5, 1.5), (1.0, 2.0)):
            assert support.at(np.array([other])) <= least + 1e-9

    program.add_rows(columns[None, :1], [1.0], upper=0.0)
    program.fix(columns[1:2], np.array([0.25]))
    assert program.minimise(is_relaxed=True, time_limit_s=5).is_infeasible

    ray = program.support(columns[1:2])
    assert ray is not None
    assert ray.is_ray
    assert ray.at(np.array([0.25])) > 0
    assert ray.at(np.array([0.5])) <= 1e-9


def test_the_solvers_own_multipliers_make_it_tight() -> None:
    program = Program()
    columns = program.add_columns(np.array([3.0, 2.0, 1.0]))
    program.add_rows(columns[None, :], [1.0, 1.0, 1.0], lower=1.5)
    outcome = program.minimise(is_relaxed=True, time_limit_s=5)
    assert outcome.is_finished
    assert outcome.bound == pytest.approx(2.0, abs=1e-9)
    assert outcome.bound <= 2.0


def test_an_infeasible_program_is_proved_infeasible() -> None:
    program = Program()
    columns = program.add_columns(np.ones(2))
    program.add_rows(columns[None, :], [1.0, 1.0], lower=3.0)
    assert program.minimise(is_relaxed=True, time_limit_s=5).is_infeasible
    assert program.minimise(is_relaxed=False, time_limit_s=5).is_infeasible


def test_a_negative_cost_without_an_upper_limit_has_no_bound() -> None:
    program = LinearProgram(
        np.array([1.0]),
        np.zeros(1),
        np.array([math.inf]),
        np.zeros(0),
        np.zeros(0),
        np.zeros(1, int),
        np.zeros(0, int),
        np.zeros(0),
    )
    assert safe_bound(program, np.zeros(0)) == pytest.approx(0.0)

    free_fall = LinearProgram(
        np.array([-1.0]), *(getattr(program, n) for n in list(program.__dataclass_fields__)[1:])
    )
    assert safe_bound(free_fall, np.zeros(0)) == -math.inf


def test_the_margin_of_branching_grows_with_the_columns() -> None:
    assert branching_margin(np.zeros(1000), np.ones(1000), 1e-6, 1.0) == pytest.approx(1e-4 + 1e-6)
    assert branching_margin(np.zeros(1), np.array([math.inf]), 1e-6, 100.0) == pytest.approx(
        1e-5 + 1e-6
    )


def scaled(graph: Graph, cost_factor: float, size_factor: int) -> Graph:
    """The same graph in other units, in which a solver's tolerances mean something else."""
    from dataclasses import replace

    values = tuple(replace(v, size_bytes=v.size_bytes * size_factor) for v in graph.values)
    operators = tuple(
        replace(
            op, cost_s=op.cost_s * cost_factor, workspace_bytes=op.workspace_bytes * size_factor
        )
        for op in graph.operators
    )
    return replace(graph, values=values, operators=operators)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    share=st.floats(0, 1),
    cost_factor=st.sampled_from([1e-9, 1 / 3, 1.0, 1e9 / 7]),
    size_factor=st.sampled_from([1, 10**6 + 3, 10**11 + 7]),
)
def test_no_brute_force_optimum_is_below_a_bound_in_any_unit(
    seed: int, share: float, cost_factor: float, size_factor: int
) -> None:
    """The budget has no byte to spare, so that a byte of tolerance would show."""
    plain = (
        random_layered(6, seed=seed, width=2, is_training=False)
        if seed % 2
        else random_step(3 + seed % 4, seed=seed)
    )

    graph = scaled(plain, cost_factor, size_factor)
    floor, ceiling = minimum_bytes(plain), simulate(plain, Schedule.keep_all(plain)).peak_bytes
    budget = int(floor + share * (ceiling - floor))
    best = brute_force(plain, budget)
    assert best is not None
    best_s = best * cost_factor

    windows = [
        (a, b) for a in (0, 2, plain.num_operators) for b in (2, plain.num_operators) if a < b
    ]
    priced = (
        [(0, 2), (2, plain.num_operators)]
        if plain.num_operators > 2
        else [(0, plain.num_operators)]
    )
    windows = sorted({*windows, *priced})

    for is_relaxed in (True, False):
        model = WindowModel(graph, windows, priced=priced, budget_bytes=budget * size_factor)
        bound_s = model.bound_s(
            LazyRows(model).solve(deadline=time.perf_counter() + 10, is_relaxed=is_relaxed)
        )
        assert bound_s <= best_s * (1 + 1e-12)
    assert lp_bound(graph, budget * size_factor) <= best_s * (1 + 1e-12)

    for name in ("auto", "milp", "lp-rounding"):
        solution = make_solver(name, time_limit_s=2.0).solve(
            graph, budget_bytes=budget * size_factor
        )
        assert solution.status is not Status.INFEASIBLE
        assert solution.lower_bound_s <= best_s * (1 + 1e-12)
        if solution.status is Status.OPTIMAL:
            assert solution.cost_s <= best_s * (1.005 + 1e-9 if name == "auto" else 1 + 2e-7)
