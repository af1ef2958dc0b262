"""Revolve against its closed form."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from remat.core.operators import Phase
from remat.solvers import make_solver
from remat.solvers.baselines.revolve import Revolve, advances, first_split
from remat.tracers.synthetic import chain
from tests.support.heuristics import UNLIMITED, check, keep_all
from tests.support.oracles import revolve_advances, revolve_closed_form


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
