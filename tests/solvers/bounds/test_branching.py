"""The tree of branches that keep a value or compute it again.

No schedule falls between its leaves, and no bound is above the optimum.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.solvers.auto import raising
from remat.solvers.auto.minimum import minimum
from remat.solvers.auto.reuse import Shared
from remat.solvers.auto.solver import Auto
from remat.solvers.bounds.branch_and_refine import Branching, raise_bound_by_branching
from remat.solvers.bounds.leaf_relaxation import Choice, boundaries_of
from remat.solvers.bounds.leaves import refined_windows
from remat.solvers.bounds.refinement import Refinement
from remat.solvers.bounds.stages import State
from remat.solvers.core.incumbent import Search
from remat.solvers.core.on_demand import forward_length
from remat.tracers.synthetic import random_layered
from tests.support.graphs import budget_between, optimum, random_training_graph

GRAPH = random_layered(16, seed=0, is_training=True)
TIGHT = minimum(GRAPH).peak_bytes


def tree_of(graph: Graph, budget: int, single: int | None = None) -> Branching:
    refinement = Refinement(graph, budget_bytes=budget)
    if single is not None:
        operator = refinement.first + single % (graph.num_operators - refinement.first)
        refinement.stages = refinement.stages.with_single(operator)
    return Branching(refinement)


def grow(tree: Branching, cutoff_s: float, rounds: int) -> list[float]:
    """The tree's bound after each round."""
    found: list[float] = []
    while not tree.is_over and len(found) < rounds:
        tree.work(deadline=time.perf_counter() + 60, cutoff_s=cutoff_s)
        found.append(tree.bound_s())
    return found


def value_of(graph: Graph, steps: list[int], choice: Choice) -> float:
    """The value of a choice in a schedule, from its steps alone."""
    first_run = {op: position for position, op in reversed(list(enumerate(steps)))}
    begin = first_run[choice.first - 1] + 1
    if choice.last >= 0:
        end = first_run[choice.last - 1] + 1
        return float(
            any(
                op == choice.index and position > first_run[op]
                for position, op in enumerate(steps[:end])
                if position >= begin
            )
        )
    writer = next(
        op for op, operator in enumerate(graph.operators) if choice.index in operator.writes
    )
    if writer not in steps[:begin]:
        return 0.0
    for op in steps[begin:]:
        if choice.index in graph.operators[op].reads:
            return 1.0
        if op == writer:
            return 0.0
    return float(choice.index in graph.outputs)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 100_000),
    share=st.sampled_from([0.0, 0.01, 0.25, 0.5]),
    above=st.sampled_from([0.95, 1.0, 1.03]),
    single=st.integers(0, 99),
)
def test_no_bound_is_above_the_optimum_and_its_schedule_is_in_one_leaf(
    seed: int, share: float, above: float, single: int
) -> None:
    graph = random_training_graph(seed, 5, 9)
    budget = budget_between(graph, share)
    best = optimum(graph, budget)
    assert best.schedule is not None
    tree, steps = (
        tree_of(graph, budget, single if single % 2 else None),
        [int(op) for op in best.schedule.steps],
    )
    while not tree.is_over:
        grow(tree, best.cost_s * above, 1)
        assert tree.bound_s() <= best.cost_s * (1 + 1e-9)
        if above > 1:
            leaves = [
                leaf
                for _, _, leaf in tree.leaves
                if all(value_of(graph, steps, c) == value for c, value in leaf.fixed.items())
            ]
            assert len(leaves) == 1
            if tree.num_leaves > 12:
                break


def test_a_finished_tree_mostly_proves_the_optimum() -> None:
    """On graphs whose first relaxation is below the optimum."""
    opened = closed = 0
    for seed in range(25):
        graph = random_training_graph(seed, 5, 8)
        budget = minimum(graph).peak_bytes
        best = optimum(graph, budget)
        found = grow(tree_of(graph, budget), best.cost_s, 60)
        if Refinement(graph, budget_bytes=budget).relaxed_bound(
            time.perf_counter() + 60
        ) < best.cost_s * (1 - 1e-5):
            opened += 1
            closed += found[-1] >= best.cost_s * (1 - 1e-5)
    assert opened >= 10
    assert closed >= 0.7 * opened


@pytest.fixture(scope="module")
def grown() -> tuple[Branching, list[float]]:
    """A tree of sixteen rounds, shared by several tests, and its bound after each round."""
    tree = tree_of(GRAPH, TIGHT)
    return tree, grow(tree, 2 * GRAPH.cost_s, 16)


def test_it_rises_above_refined_relaxations_and_never_falls(
    grown: tuple[Branching, list[float]],
) -> None:
    _, found = grown
    assert found == sorted(found)
    refinement = Refinement(GRAPH, budget_bytes=TIGHT)
    refined = [
        refinement.solve(deadline=time.perf_counter() + 20, is_relaxed=True).bound_s
        for _ in range(4)
    ]
    assert found[-1] > max(refined)


def test_each_leaf_is_refined_by_itself(grown: tuple[Branching, list[float]]) -> None:
    tree, _ = grown
    windows = {leaf.windows for _, _, leaf in tree.leaves}
    assert len(windows) > 1
    assert any(leaf.fixed for _, _, leaf in tree.leaves)


def test_a_refined_leaf_bounds_no_less(grown: tuple[Branching, list[float]]) -> None:
    """Up to 2 %: a model gets only some of the moment rows and cuts that its points violate."""
    tree, _ = grown
    for _, _, leaf in tree.leaves[:4]:
        before = relaxed(tree, leaf.windows, leaf.fixed)
        for v in range(forward_length(GRAPH), GRAPH.num_operators, 5):
            windows = refined_windows(leaf.windows, (v, v + 1))
            assert windows >= leaf.windows
            assert {v, v + 1} <= set(boundaries_of(windows))
            assert relaxed(tree, windows, leaf.fixed) >= 0.98 * before


def relaxed(
    tree: Branching, windows: frozenset[tuple[int, int]], fixed: Mapping[Choice, float]
) -> float:
    """The relaxation's bound once no memory row is violated."""
    return tree._model(windows).solve(fixed, rounds=200, deadline=time.perf_counter() + 60).bound


def test_stages_that_read_a_fixed_or_half_kept_value_are_asked_for(
    grown: tuple[Branching, list[float]],
) -> None:
    """Values have other indices than the operators that write them."""
    tree, _ = grown
    checked = 0
    for _, _, leaf in tree.leaves:
        model = tree._model(leaf.windows)
        point = model.solve(leaf.fixed, rounds=200, deadline=time.perf_counter() + 60).point
        if point is None or not leaf.fixed:
            continue
        asked = model.asked_for(point, leaf.fixed)
        assert len(set(asked)) == len(asked)
        last = list(leaf.fixed)[-1]
        values = [last.index] if last.last < 0 else GRAPH.operators[last.index].writes
        readers = [
            v
            for v in range(last.first, GRAPH.num_operators)
            if set(values) & set(GRAPH.operators[v].reads)
        ]
        if readers and not {readers[0], readers[0] + 1} <= set(model.boundaries):
            assert (readers[0], readers[0] + 1) in asked[:3]
            checked += 1
    assert checked


def test_the_first_stages_are_chosen_from_the_whole_backward() -> None:
    """The stage with the largest bound is among them, whatever a schedule would ask for."""
    tree = Branching(Refinement(GRAPH, budget_bytes=TIGHT))
    first = forward_length(GRAPH)
    grow(tree, 2 * GRAPH.cost_s, 1)
    (_, _, leaf), *others = tree.leaves
    assert not others
    chosen = set(boundaries_of(leaf.windows)) - {first, GRAPH.num_operators}
    bounds = {
        v: relaxed(tree, refined_windows(frozenset({(first, GRAPH.num_operators)}), (v, v + 1)), {})
        for v in range(first, GRAPH.num_operators)
    }
    assert max(bounds, key=lambda v: bounds[v]) in chosen


def test_without_time_nothing_is_lost_or_claimed() -> None:
    tree = tree_of(GRAPH, TIGHT)
    grow(tree, 2 * GRAPH.cost_s, 3)
    before, bound_s = [leaf.fixed for _, _, leaf in tree.leaves], tree.bound_s()
    assert tree.work(deadline=time.perf_counter() - 1, cutoff_s=2 * GRAPH.cost_s) is None
    assert sorted(map(str, (leaf.fixed for _, _, leaf in tree.leaves))) == sorted(map(str, before))
    assert tree.bound_s() == bound_s
    assert not tree.is_over


def test_where_refinement_has_ended_there_is_no_tree() -> None:
    refinement = Refinement(GRAPH, budget_bytes=TIGHT)
    refinement.state = State.DONE
    tree = Branching(refinement)
    assert tree.is_over
    assert tree.bound_s() == -math.inf


def test_the_tree_ends_where_it_is_too_large() -> None:
    tree = Branching(Refinement(GRAPH, budget_bytes=TIGHT), most_leaves=5)
    grow(tree, 2 * GRAPH.cost_s, 100)
    assert tree.is_over
    assert tree.num_leaves <= 7


@pytest.mark.parametrize(("limit_s", "is_grown"), [(5.0, False), (60.0, True)])
def test_a_tree_is_grown_where_the_limit_leaves_time_for_it(
    monkeypatch: pytest.MonkeyPatch, limit_s: float, is_grown: bool
) -> None:
    """With less, as for a point of a curve, only stages chosen by their bound are used."""
    grown = list[Search]()
    monkeypatch.setattr(
        raising, "raise_bound_by_branching", lambda search, *_, **__: grown.append(search)
    )
    search = Search(GRAPH, budget_bytes=TIGHT, gap=0.0, time_limit_s=limit_s)
    assert search.offer(minimum(GRAPH).steps)
    assert not search.is_within(0.05)
    before_s = search.bound_s
    solve = Auto(gap=0.0).begin(search, Shared(GRAPH)).for_bounds(1.0 / limit_s)
    for technique in raising.BOUNDING:
        technique(solve)

    assert bool(grown) is is_grown
    assert search.bound_s > before_s


def test_the_bound_of_a_search_is_raised_only_with_a_cutoff() -> None:
    search = Search(GRAPH, budget_bytes=TIGHT, gap=0.0, time_limit_s=20)
    refinement = Refinement(GRAPH, budget_bytes=TIGHT)
    before_s = search.bound_s
    raise_bound_by_branching(search, refinement, lambda: None, deadline=time.perf_counter() + 5)
    assert search.bound_s == before_s
    raise_bound_by_branching(
        search, refinement, lambda: 2 * GRAPH.cost_s, deadline=time.perf_counter() + 5
    )
    assert before_s < search.bound_s <= minimum_cost_s()


def minimum_cost_s() -> float:
    """The cost of the schedule of the least budget, which fits."""
    return simulate(GRAPH, Schedule.from_steps(GRAPH, minimum(GRAPH).steps)).cost_s
