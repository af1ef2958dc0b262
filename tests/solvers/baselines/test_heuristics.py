"""Every heuristic on every graph family, closed forms on chains, each method's promises."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.core.errors import SolverError
from remat.core.graph import Graph
from remat.core.operators import Phase
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution, Status
from remat.core.validate import validate
from remat.solvers import make_solver
from remat.solvers.baselines.articulation import articulation_points
from remat.solvers.baselines.per_block import block_of
from remat.solvers.baselines.pytorch_knapsack import PyTorchKnapsack, dp_knapsack, ilp_knapsack
from remat.solvers.baselines.revolve import Revolve, advances, first_split
from remat.solvers.core.on_demand import forward_length, steps_on_demand, values_always_kept
from remat.tracers.synthetic import (
    FAMILIES,
    chain,
    chain_with_skips,
    diamond,
    random_layered,
    random_step,
    star,
    training_step,
    transformer,
    unet,
)
from tests.support.oracles import (
    brute_force,
    revolve_advances,
    revolve_closed_form,
    sqrt_peak_bound,
)

UNLIMITED = 2**62
GENERAL = (
    "keep-all",
    "ap-sqrt",
    "ap-greedy",
    "linear-sqrt",
    "linear-greedy",
    "recompute-cheap",
    "pytorch-knapsack",
)
CHAINS_ONLY = ("revolve",)
STAGES_ONLY = ("chen-sqrt", "chen-greedy")
NAMED_ONLY = ("recompute-attention", "per-block")
HEURISTICS = (*GENERAL, *STAGES_ONLY, *CHAINS_ONLY, *NAMED_ONLY)
SEGMENTS = ("chen-sqrt", "chen-greedy", "ap-sqrt", "ap-greedy", "linear-sqrt", "linear-greedy")
# the same schedules whatever the budget
FIXED_FAMILIES = tuple(name for name in HEURISTICS if name != "pytorch-knapsack")
seeds = st.integers(0, 2**32 - 1)


def keep_all(graph: Graph) -> tuple[int, float]:
    simulation = simulate(graph, Schedule.keep_all(graph))
    return simulation.peak_bytes, simulation.cost_s


@functools.cache
def family(name: str) -> Graph:
    return FAMILIES[name]()


def solve(name: str, graph: Graph, budget_bytes: int) -> Solution | None:
    """The solution, or None if the graph is outside the class of a method not in `GENERAL`."""
    try:
        return make_solver(name).solve(graph, budget_bytes=budget_bytes)
    except SolverError:
        assert name not in GENERAL
        return None


def check(graph: Graph, solution: Solution, budget_bytes: int) -> None:
    """The solution is valid, fits, and its numbers are the simulator's."""
    assert solution.schedule is not None
    assert validate(graph, solution.schedule, budget_bytes=budget_bytes) == []
    simulation = simulate(graph, solution.schedule)
    assert (solution.peak_bytes, solution.cost_s) == (simulation.peak_bytes, simulation.cost_s)
    assert solution.lower_bound_s <= solution.cost_s
    assert solution.minimum_bytes <= solution.peak_bytes <= budget_bytes
    assert (solution.status is Status.OPTIMAL) == (solution.cost_s <= graph.cost_s * (1 + 1e-9))


@pytest.mark.parametrize("graph_name", FAMILIES)
@pytest.mark.parametrize("name", HEURISTICS)
def test_every_heuristic_is_valid_on_every_family_and_kind_of_budget(
    name: str, graph_name: str
) -> None:
    graph = family(graph_name)
    unlimited = solve(name, graph, UNLIMITED)
    if unlimited is None:
        return
    check(graph, unlimited, UNLIMITED)

    least = unlimited.minimum_bytes
    for budget_bytes in (least, least + 1, (least + unlimited.peak_bytes) // 2):
        solution = make_solver(name).solve(graph, budget_bytes=budget_bytes)
        check(graph, solution, budget_bytes)

    below = make_solver(name).solve(graph, budget_bytes=least - 1)
    if name in FIXED_FAMILIES:
        assert below.status is Status.NO_SOLUTION
        assert (below.schedule, below.minimum_bytes, below.lower_bound_s) == (
            None,
            least,
            graph.cost_s,
        )
    else:
        # a bisection may find what the grid missed
        assert below.status is Status.NO_SOLUTION or below.peak_bytes < least


def test_every_heuristic_solves_some_family() -> None:
    for name in HEURISTICS:
        assert any(solve(name, family(graph_name), UNLIMITED) for graph_name in FAMILIES)


@pytest.mark.parametrize("name", FIXED_FAMILIES)
@pytest.mark.parametrize(
    "graph_name", ["chain", "chain_with_skips", "random_layered", "transformer"]
)
def test_more_budget_never_costs_more(name: str, graph_name: str) -> None:
    graph = family(graph_name)
    unlimited = solve(name, graph, UNLIMITED)
    if unlimited is None:
        return
    budgets = np.linspace(unlimited.minimum_bytes, keep_all(graph)[0] + 1, 8).astype(int).tolist()
    costs = [make_solver(name).solve(graph, budget_bytes=budget).cost_s for budget in budgets]
    assert costs == sorted(costs, reverse=True)


@settings(deadline=None, max_examples=30)
@given(graph=st.builds(random_step, st.integers(0, 20), seed=seeds))
def test_general_heuristics_are_valid_on_random_graphs(graph: Graph) -> None:
    for name in HEURISTICS:
        solution = solve(name, graph, UNLIMITED)
        if solution is not None:
            check(graph, solution, UNLIMITED)


@settings(deadline=None, max_examples=25)
@given(graph=st.builds(random_step, st.integers(1, 6), seed=seeds))
def test_no_heuristic_beats_brute_force(graph: Graph) -> None:
    for name in HEURISTICS:
        unlimited = solve(name, graph, UNLIMITED)
        if unlimited is None:
            continue

        solution = make_solver(name).solve(graph, budget_bytes=unlimited.minimum_bytes)
        optimum = brute_force(graph, unlimited.minimum_bytes)
        assert optimum is not None
        assert optimum <= solution.cost_s


@pytest.mark.parametrize("name", FIXED_FAMILIES)
def test_scaling_sizes_and_budget_changes_nothing(name: str) -> None:
    for graph_name in ("chain", "random_layered", "transformer"):
        graph = family(graph_name)
        scaled = replace(
            graph,
            values=tuple(replace(v, size_bytes=v.size_bytes * 7) for v in graph.values),
            operators=tuple(
                replace(op, workspace_bytes=op.workspace_bytes * 7) for op in graph.operators
            ),
        )

        budget_bytes = int(0.8 * keep_all(graph)[0])
        one, other = solve(name, graph, budget_bytes), solve(name, scaled, 7 * budget_bytes)
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert (one.cost_s, one.peak_bytes * 7) == (other.cost_s, other.peak_bytes)


# the published heuristics really trade compute for memory


@pytest.mark.parametrize("name", [*SEGMENTS, "revolve"])
@pytest.mark.parametrize("has_phases", [True, False])
def test_a_chain_at_sixty_percent_costs_more_and_holds_less(name: str, has_phases: bool) -> None:
    graph = chain(36, has_phases=has_phases)
    peak_bytes, cost_s = keep_all(graph)
    solution = make_solver(name).solve(graph, budget_bytes=int(0.6 * peak_bytes))
    check(graph, solution, int(0.6 * peak_bytes))
    assert solution.cost_s > cost_s


@pytest.mark.parametrize("length", [4, 9, 25, 36, 100, 400])
@pytest.mark.parametrize("name", ["chen-sqrt", "ap-sqrt", "linear-sqrt"])
def test_sqrt_segments_hold_two_square_roots_for_less_than_one_more_forward(
    name: str, length: int
) -> None:
    graph = chain(length)
    solution = make_solver(name).solve(graph, budget_bytes=UNLIMITED)
    peak_bytes, cost_s = keep_all(graph)
    assert solution.peak_bytes <= sqrt_peak_bound(length)
    assert cost_s < solution.cost_s < cost_s + length
    assert solution.peak_bytes < peak_bytes or length == 4


@pytest.mark.parametrize("method", ["chen", "ap", "linear"])
def test_greedy_costs_hardly_more_than_sqrt_on_a_chain(method: str) -> None:
    graph = chain(64)
    sqrt = make_solver(f"{method}-sqrt").solve(graph, budget_bytes=UNLIMITED)
    greedy = make_solver(f"{method}-greedy").solve(graph, budget_bytes=sqrt.peak_bytes + 1)
    assert greedy.is_solved
    assert greedy.cost_s <= sqrt.cost_s + 8


def test_every_segment_method_solves_a_residual_network() -> None:
    graph = diamond(12)
    peak_bytes, cost_s = keep_all(graph)
    for name in SEGMENTS:
        solution = make_solver(name).solve(graph, budget_bytes=int(0.75 * peak_bytes))
        assert solution.is_solved
        assert solution.cost_s > cost_s


def test_methods_for_sequences_refuse_other_graphs() -> None:
    with pytest.raises(SolverError, match="sequence of stages"):
        make_solver("chen-sqrt").solve(
            Graph.from_arrays([1] * 4, [1] * 4, [(0, 2), (1, 2), (0, 3), (1, 3)]),
            budget_bytes=UNLIMITED,
        )
    with pytest.raises(SolverError, match="chain; '3' reads '0'"):
        make_solver("revolve").solve(chain_with_skips(9), budget_bytes=UNLIMITED)


def test_under_a_long_skip_only_the_linear_order_finds_a_schedule() -> None:
    length = 30
    parents = [[i - 1] if i else [] for i in range(length - 1)] + [[0, length - 2]]
    graph = training_step(parents, [1.0] * length, [1] * length)
    peak_bytes, _ = keep_all(graph)
    budget_bytes = int(0.6 * peak_bytes)

    assert (
        make_solver("ap-greedy").solve(graph, budget_bytes=budget_bytes).status
        is Status.NO_SOLUTION
    )
    assert (
        make_solver("chen-greedy").solve(graph, budget_bytes=budget_bytes).status
        is Status.NO_SOLUTION
    )
    assert make_solver("linear-greedy").solve(graph, budget_bytes=budget_bytes).is_solved


# revolve against its closed form


@pytest.mark.parametrize("num_slots", range(1, 8))
def test_revolve_counts_are_the_binomials(num_slots: int) -> None:
    for num_values in range(1, 41):
        assert (
            advances(num_values, num_slots)
            == revolve_closed_form(num_values, num_slots)
            == revolve_advances(num_values, num_slots)
        )


@pytest.mark.parametrize("num_slots", range(2, 7))
def test_revolve_splits_are_optimal(num_slots: int) -> None:
    for num_values in range(2, 41):
        split = first_split(num_values, num_slots)
        assert 1 <= split < num_values
        rest = revolve_advances(num_values - split, num_slots - 1) + revolve_advances(
            split, num_slots
        )
        assert split + rest == revolve_advances(num_values, num_slots)


@pytest.mark.parametrize("length", [1, 2, 5, 10, 36])
def test_revolve_computes_exactly_as_many_forward_operators_as_the_closed_form(length: int) -> None:
    graph = chain(length)
    num_values = length + 2  # the layers, the loss, and the start, which is always there

    for num_slots in range(1, num_values + 1):
        solution = Revolve(num_slots=num_slots).solve(graph, budget_bytes=UNLIMITED)
        assert solution.schedule is not None
        forward = sum(graph.operators[i].phase is Phase.FORWARD for i in solution.schedule.steps)
        assert forward == revolve_closed_form(num_values, num_slots)
        # slots without the start, a value and its gradient, the next value and its gradient
        assert solution.peak_bytes <= num_slots + 3


def test_revolve_needs_logarithmically_many_slots() -> None:
    graph = chain(200)
    solution = make_solver("revolve").solve(graph, budget_bytes=2 * math.ceil(math.log2(200)))
    assert solution.is_solved
    assert solution.cost_s < 3 * graph.cost_s


def test_revolve_passes_pinned_operators() -> None:
    graph = chain(20)
    graph = replace(
        graph,
        operators=tuple(
            replace(op, pinned="effect" if i in (0, 7, 13) else "")
            for i, op in enumerate(graph.operators)
        ),
    )

    solution = Revolve(num_slots=2).solve(graph, budget_bytes=UNLIMITED)
    check(graph, solution, UNLIMITED)
    assert solution.cost_s > graph.cost_s
    assert solution.peak_bytes < keep_all(graph)[0]


# the builder


def test_values_that_cannot_be_computed_again_are_kept() -> None:
    graph = transformer(2)
    kept = values_always_kept(graph)
    for op in graph.operators:
        is_bound = op.is_snapshot or bool(op.pinned) or not set(op.writes).isdisjoint(graph.outputs)
        assert all((value in kept) == is_bound for value in op.writes)
    assert all(v in kept for v, value in enumerate(graph.values) if value.is_resident)


def test_values_that_cross_regions_are_kept() -> None:
    graph = family("two_regions")
    crossing = {
        v
        for v, users in enumerate(graph.users_of)
        if {graph.operators[u].region for u in users} == {0, 1}
    }

    assert crossing
    assert crossing <= values_always_kept(graph)


@settings(deadline=None, max_examples=60)
@given(graph=st.builds(random_step, st.integers(1, 25), seed=seeds), seed=seeds)
def test_on_demand_computes_every_operator_at_most_twice(graph: Graph, seed: int) -> None:
    random = np.random.default_rng(seed)
    steps = steps_on_demand(graph, {v for v in range(len(graph.values)) if random.random() < 0.4})
    assert max(map(steps.count, steps)) <= 2
    assert validate(graph, Schedule.from_steps(graph, steps)) == []
    assert steps_on_demand(graph, range(len(graph.values))) == list(range(graph.num_operators))


def test_the_end_of_the_forward_is_found_without_phases() -> None:
    for length in (1, 2, 9, 36):
        assert forward_length(chain(length, has_phases=False)) in (length, length + 1)
        assert forward_length(chain(length)) == length + 1
    assert forward_length(family("empty")) == 0


def test_articulation_points_of_known_graphs_are_found() -> None:
    assert articulation_points([[1], [0, 2], [1]]) == {1}
    assert articulation_points([[1, 2], [0, 2], [0, 1]]) == set()
    assert articulation_points([[1, 2, 3], [0], [0], [0]]) == {0}
    assert articulation_points([[1, 2], [0, 2], [0, 1, 3], [2, 4, 5], [3, 5], [3, 4], []]) == {2, 3}


@settings(deadline=None, max_examples=60)
@given(num_nodes=st.integers(1, 12), density=st.floats(0, 0.5), seed=seeds)
def test_articulation_points_are_those_whose_removal_disconnects(
    num_nodes: int, density: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    adjacent = np.triu(random.random((num_nodes, num_nodes)) < density, 1)
    adjacent |= adjacent.T
    neighbours = [np.flatnonzero(row).tolist() for row in adjacent]

    def num_components(nodes: set[int]) -> int:
        count, left = 0, set(nodes)
        while left:
            stack, count = [left.pop()], count + 1
            while stack:
                found = left & set(neighbours[stack.pop()])
                left -= found
                stack += found
        return count

    everything = set(range(num_nodes))
    before = num_components(everything)
    expected = {node for node in everything if num_components(everything - {node}) > before}
    assert articulation_points(neighbours) == expected


# the practitioners' methods


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


# PyTorch's knapsack


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


def test_no_method_lowers_the_peak_of_a_star() -> None:
    graph = star(6)
    for name in GENERAL:
        solution = make_solver(name).solve(graph, budget_bytes=UNLIMITED)
        assert solution.peak_bytes == keep_all(graph)[0]
