"""What practitioners use: cheap operators, attention or blocks again; PyTorch's knapsack."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.core.errors import SolverError
from remat.core.graph import Graph
from remat.core.solution import Solution
from remat.solvers import make_solver
from remat.solvers.baselines.per_block import block_of
from remat.solvers.baselines.pytorch_knapsack import PyTorchKnapsack, dp_knapsack, ilp_knapsack
from remat.tracers.synthetic import chain, diamond, random_layered, transformer, unet
from tests.support.heuristics import UNLIMITED, check, keep_all, seeds


def recomputed(graph: Graph, solution: Solution) -> set[str]:
    assert solution.schedule is not None
    steps = solution.schedule.steps
    return {graph.operators[i].name for i in steps if steps.count(i) > 1}


def test_recompute_cheap_never_repeats_a_matrix_product() -> None:
    graph = transformer(3)
    repeated = recomputed(
        graph, make_solver("recompute-cheap").solve(graph, budget_bytes=UNLIMITED)
    )

    assert {name.split(".")[-1] for name in repeated} <= {
        "norm1",
        "softmax",
        "dropout",
        "1",
        "add1",
        "add2",
        "embed",
    }
    assert {"blocks.0.attn.softmax", "blocks.2.mlp.1"} <= repeated


def test_recompute_cheap_without_targets_decides_by_cost() -> None:
    graph = diamond(6)  # branches cost 5 and 1, tops and joins 1 and 2
    solution = make_solver("recompute-cheap").solve(
        graph, budget_bytes=int(0.8 * keep_all(graph)[0])
    )
    costs = {graph.operators[int(name)].cost_s for name in recomputed(graph, solution)}
    assert solution.is_solved
    assert costs <= {1.0, 2.0}


def test_recompute_attention_repeats_the_inside_of_attention_only() -> None:
    graph = transformer(3)
    solution = make_solver("recompute-attention").solve(graph, budget_bytes=UNLIMITED)
    assert recomputed(graph, solution) == {
        f"blocks.{i}.attn.{name}" for i in range(3) for name in ("scores", "softmax", "dropout")
    }
    assert solution.peak_bytes < keep_all(graph)[0]


def test_recompute_attention_finds_modules_where_there_are_no_targets() -> None:
    graph = transformer(2)
    graph = replace(graph, operators=tuple(replace(op, target="") for op in graph.operators))
    names = recomputed(
        graph, make_solver("recompute-attention").solve(graph, budget_bytes=UNLIMITED)
    )
    assert {"blocks.0.attn.softmax", "blocks.1.attn.scores"} <= names
    assert all(".attn." in name for name in names)


def test_recompute_attention_says_why_it_finds_nothing() -> None:
    with pytest.raises(SolverError, match="names its target or its module"):
        make_solver("recompute-attention").solve(chain(5), budget_bytes=UNLIMITED)

    graph = transformer(1)
    fused = {"aten._softmax.default": "aten._scaled_dot_product_flash_attention.default"}
    graph = replace(
        graph,
        operators=tuple(
            replace(op, target=fused.get(op.target, op.target)) for op in graph.operators
        ),
    )

    with pytest.raises(SolverError, match="fused kernels"):
        make_solver("recompute-attention").solve(graph, budget_bytes=UNLIMITED)


def test_per_block_keeps_the_stream_between_blocks_and_repeats_their_inside() -> None:
    graph = transformer(4)
    solution = make_solver("per-block").solve(graph, budget_bytes=UNLIMITED)
    names = recomputed(graph, solution)
    assert {f"blocks.{i}.attn.qkv" for i in range(4)} <= names
    assert not {"embed", "loss", "blocks.0.add2"} & names
    assert solution.peak_bytes < 0.8 * keep_all(graph)[0]


def test_a_block_that_runs_twice_is_two_segments() -> None:
    graph = chain(12)
    forward = [f"shared.{i // 3 % 2}" for i in range(12)]  # 0 0 0 1 1 1 0 0 0 1 1 1
    graph = replace(
        graph,
        operators=tuple(
            replace(op, module=forward[i] if i < 12 else "") for i, op in enumerate(graph.operators)
        ),
    )

    solution = make_solver("per-block").solve(graph, budget_bytes=UNLIMITED)
    assert recomputed(graph, solution) == {"0", "1", "3", "4", "6", "7", "9", "10"}


def test_blocks_in_stages_set_the_depth_and_a_sequential_in_a_block_does_not() -> None:
    graph = transformer(2)
    one_depth = make_solver("per-block").solve(graph, budget_bytes=UNLIMITED)
    assert {"blocks.0.attn.qkv", "blocks.0.mlp.0", "blocks.0.mlp.1"} <= recomputed(graph, one_depth)

    graph = chain(12)
    nested = [f"stages.{i // 6}.blocks.{i // 3 % 2}" for i in range(12)]
    graph = replace(
        graph,
        operators=tuple(
            replace(op, module=nested[i] if i < 12 else "") for i, op in enumerate(graph.operators)
        ),
    )

    inner = make_solver("per-block").solve(graph, budget_bytes=UNLIMITED)
    assert recomputed(graph, inner) == {"0", "1", "3", "4", "6", "7", "9", "10"}


def test_per_block_needs_blocks() -> None:
    assert block_of("model.layers.3.mlp.0", 1) == "model.layers.3"
    assert block_of("model.layers.3.mlp.0", 2) == "model.layers.3.mlp.0"
    assert block_of("model.layers.3.mlp.0", 5) == "model.layers.3.mlp.0"
    with pytest.raises(SolverError, match="numbered blocks"):
        make_solver("per-block").solve(unet(2), budget_bytes=UNLIMITED)


@settings(deadline=None, max_examples=25)
@given(count=st.integers(1, 12), fraction=st.floats(0, 1), seed=seeds)
def test_both_knapsacks_fit_and_the_exact_one_is_best(
    count: int, fraction: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    units = random.integers(1, 50, count)
    share, cost_s = units / units.sum(), random.integers(0, 10, count).astype(float)

    chosen = {
        name: list(items(fraction))
        for name, items in (
            ("dp", dp_knapsack(share, cost_s)),
            ("ilp", ilp_knapsack(share, cost_s, 10.0)),
        )
    }

    best = max(
        cost_s[list(s)].sum() for s in _subsets(count) if share[list(s)].sum() <= fraction + 1e-9
    )
    assert cost_s[chosen["ilp"]].sum() == pytest.approx(best)
    assert share[chosen["ilp"]].sum() <= fraction + 1e-6
    assert share[chosen["dp"]].sum() <= fraction + (count + 1) / 10_000

    tighter = max(
        cost_s[list(s)].sum()
        for s in _subsets(count)
        if share[list(s)].sum() <= fraction - (count + 1) / 10_000 or not s
    )
    assert cost_s[chosen["dp"]].sum() >= tighter - 1e-9


def _subsets(count: int) -> list[list[int]]:
    return [[i for i in range(count) if mask >> i & 1] for mask in range(2**count)]


def test_our_knapsack_saves_what_pytorchs_own_saves() -> None:
    knapsack = pytest.importorskip(
        "torch._functorch._activation_checkpointing.knapsack",
        reason="this PyTorch keeps its knapsack elsewhere",
    )

    random = np.random.default_rng(0)
    size, cost_s = random.integers(1, 1000, 40), random.random(40)
    ours = dp_knapsack(size / size.sum(), cost_s)
    for fraction in (0.1, 0.5, 0.83):
        _, saved, _ = knapsack.dp_knapsack((size / size.sum()).tolist(), cost_s.tolist(), fraction)
        assert sorted(ours(fraction)) == saved


def test_knapsack_variants_trade_and_stay_within_the_byte_budget() -> None:
    graph = random_layered(40, seed=3)
    peak_bytes, cost_s = keep_all(graph)
    budget_bytes = int(0.9 * peak_bytes)
    for solver in (PyTorchKnapsack(), PyTorchKnapsack(method="ilp")):
        solution = solver.solve(graph, budget_bytes=budget_bytes)
        check(graph, solution, budget_bytes)
        assert solution.cost_s > cost_s
