"""Bytes and costs that moves update equal those of a new layout, however many the moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.core.graph import Graph
from remat.core.operators import Operator, Phase, Value
from remat.core.schedule import Schedule, simulate
from remat.solvers.auto.minimum import minimum
from remat.solvers.core.accounting import Ints
from remat.solvers.free_order.solver import OrderSearch
from remat.solvers.search import annealing
from remat.solvers.search.annealing import Chunk, LocalSearch, Round, anneal
from remat.solvers.search.moves import MAX_CHANGES
from remat.solvers.search.sequence import (
    BLOCK,
    HELD,
    LEAST,
    MOST,
    OVER,
    ROOM,
    SLOT,
    State,
    bytes_held,
    steps_of,
)
from remat.solvers.search.timeline import lay_out
from remat.tracers.synthetic import random_step
from tests.support.graphs import keep_all_bytes

Move = Callable[[State, np.random.Generator], None]


def moves_of(local: LocalSearch, hot: float, count: int = 1) -> Move:
    """Makes `count` moves, each accepted or undone."""

    def move(state: State, random: np.random.Generator) -> None:
        chunk = Chunk(
            iterations=count,
            hot=hot,
            cold=hot,
            patience=count,
            scale=1.0,
            draws=random.random(1 << 12),
            journal=np.zeros((MAX_CHANGES, 2), np.int64),
            weight=local.weight,
            best_slot=state.slots[SLOT].copy(),
            best=np.array([np.inf, np.inf]),
        )

        local.loop(state, chunk, *local.arguments)

    return move


def check(
    first: State, steps: Sequence[int] | Ints, move: Move, num_moves: int, seed: int = 0
) -> Ints:
    """Checks the state after every move, and returns the last sequence."""
    state, end, random = (
        lay_out(first, np.asarray(steps, np.int64)),
        len(first.operators) - 1,
        np.random.default_rng(seed),
    )

    for _ in range(num_moves):
        move(state, random)
        fresh = lay_out(first, steps_of(state.slots[SLOT], end))
        held, expected = (bytes_held(s.slots)[s.slots[SLOT] >= 0] for s in (state, fresh))
        assert held.tolist() == expected.tolist()
        assert state.sums[OVER] == np.maximum(bytes_held(state.slots) - state.sums[ROOM], 0).sum()
        assert_bounds_hold(state.slots)
        assert state.costs[-1] == pytest.approx(fresh.costs[-1])
    return steps_of(state.slots[SLOT], end)


def assert_bounds_hold(slots: Ints) -> None:
    starts = np.arange(0, slots.shape[1], BLOCK)
    assert (slots[MOST, : len(starts)] >= np.maximum.reduceat(slots[HELD], starts)).all()
    assert (slots[LEAST, : len(starts)] <= np.minimum.reduceat(slots[HELD], starts)).all()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    num_operators=st.integers(8, 60),
    is_free=st.booleans(),
    share=st.sampled_from((0.8, 0.4, 0.0)),
)
def test_bytes_stay_exact_whatever_a_graph_has(
    seed: int, num_operators: int, is_free: bool, share: float
) -> None:
    """Some operators overwrite a snapshot, which takes memory only if a reader is recomputed.

    All, some or none of the slots of a block are within the budget.
    """
    graph = random_step(num_operators, seed=seed)
    budget, steps = int(share * keep_all_bytes(graph)), np.arange(graph.num_operators)

    if is_free:
        order = OrderSearch(graph, budget_bytes=budget, seed=seed, order_chance=0.5)
        local, steps = order.local, order.marked(steps)
    else:
        local = LocalSearch(graph, budget_bytes=budget, seed=seed)
    check(local.state, steps, moves_of(local, 10.0), 300)


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5, 0.3, 0.2, 0.1])
def test_bytes_stay_exact_over_many_blocks(share: float) -> None:
    """Changes over a thousand slots take whole blocks above the budget, and back."""
    graph = random_step(300, seed=1)
    local = LocalSearch(graph, budget_bytes=int(share * keep_all_bytes(graph)), seed=1)
    check(local.state, np.arange(graph.num_operators), moves_of(local, 10.0), 1_000)


def test_a_move_with_too_many_changes_to_record_is_cut_short() -> None:
    """Removing one recomputation makes four hundred others useless.

    Undone or not, the move leaves the sequence consistent.
    """
    count = 400
    values = tuple(Value(f"v{i}", 8) for i in range(count + 2))
    forward = [Operator(f"op{i}", 1.0, (), (i,)) for i in range(count)]
    join = Operator("join", 1.0, tuple(range(count)), (count,))
    use = Operator("use", 1.0, (count,), (count + 1,), phase=Phase.BACKWARD)
    graph = Graph(values, (*forward, join, use), outputs=(count + 1,))

    local = LocalSearch(graph, budget_bytes=keep_all_bytes(graph), seed=0)
    steps = [*range(count + 1), *range(count + 1), count + 1]
    left = [
        len(check(local.state, steps, moves_of(local, 1e3, 300), 3, seed)) for seed in range(20)
    ]
    assert min(left) < len(steps) - 200


@pytest.mark.parametrize("seed", [1, 37, 59])
def test_the_least_budget_is_found_where_operators_overwrite_snapshots(seed: int) -> None:
    graph = random_step(30, seed=seed)
    found = minimum(graph)
    assert simulate(graph, Schedule.from_steps(graph, found.steps)).peak_bytes == found.peak_bytes


def test_every_run_of_a_repeated_operator_is_laid_out() -> None:
    """Naive: there is room for a dozen runs; the least schedules of deep networks have more."""
    graph = random_step(12, seed=0)
    operator = next(
        index for index, op in enumerate(graph.operators) if op.is_recomputable and op.reads == ()
    )
    steps = [*range(graph.num_operators), *[operator] * 29]

    state = lay_out(
        LocalSearch(graph, budget_bytes=keep_all_bytes(graph), seed=0).state, np.array(steps)
    )
    assert steps_of(state.slots[SLOT], graph.num_operators).tolist() == steps


@pytest.mark.parametrize("is_close", [True, False])
def test_a_close_search_comes_back_to_what_fits(
    is_close: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So hot that every move is accepted: only a close search comes back to what fits."""
    over = []

    def recorded(state: State, chunk: Chunk) -> int:
        over.append(int(state.sums[OVER]))
        return anneal(state, chunk)

    graph = random_step(30, seed=4)
    least = minimum(graph)
    monkeypatch.setattr(annealing, "_PATIENCE", 10)
    local = LocalSearch(graph, budget_bytes=least.peak_bytes, seed=0, loop=recorded)
    local.run(np.array(least.steps), Round(1_000, 1e6, 1e6, is_close=is_close), chunk=100)
    assert len(over) >= 10
    assert any(over) != is_close
