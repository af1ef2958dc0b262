"""Exact recombination: valid, exact, and never costlier than the best of its parts."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.validate import validate
from remat.solvers.auto.minimum import minimum
from remat.solvers.search.neighbourhood_solve import recomputations
from remat.solvers.search.recombination import Recombination
from remat.solvers.search.restarts import Restarts
from remat.tracers.synthetic import random_layered, random_step, two_regions, unet

FAMILIES = {
    "layered": lambda seed: random_layered(9, seed=seed),
    "step": lambda seed: random_step(12, seed=seed),
    "regions": lambda seed: two_regions(3 + seed % 3),
}


def cost_s(graph: Graph, steps: np.ndarray) -> float:
    return simulate(graph, Schedule.from_steps(graph, steps.tolist())).cost_s


@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), family=st.sampled_from(sorted(FAMILIES)), share=st.floats(0, 1))
def test_it_costs_no_more_than_any_of_its_parts(seed: int, family: str, share: float) -> None:
    graph = FAMILIES[family](seed)
    # the model counts snapshots as soon as something could need them
    assume(not graph.arrays.is_snapshot.any())

    least, ceiling = minimum(graph), simulate(graph, Schedule.keep_all(graph)).peak_bytes
    budget = int(least.peak_bytes + share * (ceiling - least.peak_bytes))
    restarts = Restarts(graph, budget_bytes=budget, seed=seed, moves=200)
    restarts.run([least.steps, range(graph.num_operators)])

    parts = [np.array(least.steps, np.int64), *(steps for _, steps in restarts.pool)]
    costliest = max(parts, key=lambda steps: cost_s(graph, steps))
    part = Recombination(graph, budget_bytes=budget).improve(costliest, parts, time_limit_s=20)

    if part is None:  # all of them recompute the same
        assert all(
            np.array_equal(recomputations(costliest), recomputations(other)) for other in parts
        )
        return

    assert part.is_finished
    assert (
        validate(graph, Schedule.from_steps(graph, part.steps.tolist()), budget_bytes=budget) == []
    )
    assert part.cost_s == cost_s(graph, part.steps)
    assert part.cost_s <= min(cost_s(graph, steps) for steps in parts) * (1 + 1e-7)


def test_what_was_tried_is_not_tried_again() -> None:
    graph = random_step(12, seed=3)
    least = np.array(minimum(graph).steps, np.int64)
    keep_all = np.arange(graph.num_operators)
    budget = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    recombination = Recombination(graph, budget_bytes=budget)

    first = recombination.improve(least, [keep_all], time_limit_s=20)
    assert first is not None
    assert first.cost_s == graph.cost_s
    assert recombination.improve(least, [keep_all], time_limit_s=20) is None


def test_ends_that_do_not_fit_are_recombined() -> None:
    """At the least budget most runs end a little above it, at a low cost.

    Naive: they are thrown away, and the cost stays at 1.573 times.
    """
    graph = unet(8)
    least = minimum(graph)
    restarts = Restarts(graph, budget_bytes=least.peak_bytes, moves=2_000)
    restarts.run([range(graph.num_operators), least.steps])
    assert restarts.pool[0][0] < 1.55 * graph.cost_s
