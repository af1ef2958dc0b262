"""The window model.

Its bound is never above the exact optimum, whatever its stages, and counts what snapshots need.
"""

from __future__ import annotations

import random
import time
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.core.graph import Graph
from remat.core.operators import Operator, Phase, Value, ValueKind
from remat.core.schedule import Schedule, simulate
from remat.solvers.auto.minimum import minimum
from remat.solvers.bounds.lazy_rows import LazyRows
from remat.solvers.bounds.window import WindowModel
from tests.support.oracles import brute_force


def with_snapshots(seed: int, length: int) -> Graph:
    """A chain forward and back.

    Some operators of the forward read a snapshot, taken at the very start or right before them.
    """
    rng = random.Random(seed)
    values, snapshots, chain, read_back = (
        [Value("input", 0, kind=ValueKind.INPUT)],
        list[Operator](),
        list[Operator](),
        list[set[int]](),
    )

    last, is_early = 0, rng.random() < 0.5
    for layer in range(length):
        reads = [last]
        if rng.random() < 0.7:
            values.append(Value(f"state_{layer}", rng.choice([2, 8, 20])))
            snapshot = Operator(
                f"snapshot_{layer}", 0.0, (), (len(values) - 1,), pinned="state", is_snapshot=True
            )
            (snapshots if is_early else chain).append(snapshot)
            reads.append(len(values) - 1)

        values.append(Value(f"hidden_{layer}", rng.choice([1, 3, 5])))
        chain.append(
            Operator(
                f"layer_{layer}", float(rng.choice([1, 3, 8])), tuple(reads), (len(values) - 1,)
            )
        )
        read_back.append({last, len(values) - 1})
        last = len(values) - 1

    for layer in reversed(range(length)):
        values.append(Value(f"gradient_{layer}", rng.choice([1, 3, 6])))
        reads = [last, *sorted(read_back[layer] - {last})]
        chain.append(
            Operator(f"back_{layer}", 1.0, tuple(reads), (len(values) - 1,), phase=Phase.BACKWARD)
        )
        last = len(values) - 1
    return Graph(tuple(values), (*snapshots, *chain), (last,))


def bound_s(graph: Graph, budget_bytes: int, boundaries: tuple[int, ...]) -> float:
    """The bound of the integer model whose windows are all unions of these stages."""
    stages = list(pairwise((0, *boundaries, graph.num_operators)))
    windows = sorted(combinations((0, *boundaries, graph.num_operators), 2))
    model = WindowModel(graph, windows, priced=stages, budget_bytes=budget_bytes)
    return model.bound_s(LazyRows(model).solve(deadline=time.perf_counter() + 20))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 100_000), share=st.sampled_from([0.0, 0.2, 0.5]), data=st.data())
def test_no_bound_is_above_the_optimum_with_snapshots(
    seed: int, share: float, data: st.DataObject
) -> None:
    graph = with_snapshots(seed, 3)
    floor, ceiling = (
        minimum(graph).peak_bytes,
        simulate(graph, Schedule.keep_all(graph)).peak_bytes,
    )
    budget = int(floor + share * (ceiling - floor))
    inside = st.integers(1, graph.num_operators - 1)
    boundaries = tuple(sorted({graph.num_forward, *data.draw(st.lists(inside, max_size=5))}))

    best = brute_force(graph, budget)
    assert best is not None
    assert bound_s(graph, budget, boundaries) <= best * (1 + 1e-9)


@pytest.mark.parametrize(("snapshot_bytes", "cheapest"), [(0, 1.0), (1, 1.0), (2, 8.0)])
def test_a_snapshot_takes_memory_where_its_reader_is_computed_again(
    snapshot_bytes: int, cheapest: float
) -> None:
    """4 bytes are free where the backward begins.

    They hold one of two values of 3 bytes, and what the other needs to be computed again.
    """
    sizes = {
        "input": 0,
        "state": snapshot_bytes,
        "cheap": 3,
        "expensive": 3,
        "loss": 10,
        "gradient": 1,
        "of_cheap": 1,
        "of_expensive": 1,
    }

    values = tuple(
        Value(name, size, kind=ValueKind.INPUT if name == "input" else ValueKind.INTERMEDIATE)
        for name, size in sizes.items()
    )

    back = Phase.BACKWARD
    operators = (
        Operator("snapshot", 0.0, (), (1,), pinned="state", is_snapshot=True),
        Operator("cheap", 1.0, (0, 1), (2,)),
        Operator("expensive", 8.0, (0,), (3,)),
        Operator("loss", 1.0, (0,), (4,)),
        Operator("back", 1.0, (4,), (5,), phase=back),
        Operator("of_cheap", 1.0, (5, 2), (6,), phase=back),
        Operator("of_expensive", 1.0, (6, 3), (7,), phase=back),
    )

    graph, budget = Graph(values, operators, (7,)), 15
    expected = graph.cost_s + cheapest
    assert brute_force(graph, budget) == expected
    assert bound_s(graph, budget, (4, 5)) == pytest.approx(expected, rel=1e-5)
