"""Persistent schedules of segments.

Valid, within the budget, as costly as the table says, and optimal where theory says what that is.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.core.schedule import Schedule, simulate
from remat.core.validate import validate
from remat.solvers.auto.minimum import minimum
from remat.solvers.baselines.revolve import Revolve
from remat.solvers.core.accounting import working_set_bytes
from remat.solvers.persistent.rotor import rotor_steps
from remat.solvers.persistent.segment_options import find_options
from remat.solvers.persistent.segmentation import Segmentation
from remat.tracers.synthetic import FAMILIES, chain, transformer
from tests.support.graphs import keep_all_bytes, random_training_graph


@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 100_000), share=st.sampled_from([0.2, 0.5, 0.8]))
def test_on_any_graph_the_steps_are_valid(seed: int, share: float) -> None:
    graph = random_training_graph(seed, 6, 12)
    floor, ceiling = working_set_bytes(graph), keep_all_bytes(graph)
    steps = rotor_steps(graph, int(floor + share * (ceiling - floor)))
    if steps is not None:
        assert not validate(graph, Schedule.from_steps(graph, steps))


# two have tests of their own, and names are not read
ELSEWHERE = {"two_regions", "random_layered_without_phases", "transformer_without_names"}
# a budget of the largest working set, at which hardly anything fits, is tried on these
AT_THE_LEAST = {"chain", "random_step", "zero_cost"}


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - ELSEWHERE))
def test_on_every_family_the_steps_fit(family: str) -> None:
    graph = FAMILIES[family]()
    floor, ceiling = working_set_bytes(graph), keep_all_bytes(graph)
    budgets = [(floor + ceiling) // 2, ceiling]
    if family in AT_THE_LEAST:
        budgets.insert(0, floor)
    found = {budget: rotor_steps(graph, budget) for budget in budgets}

    for budget, steps in found.items():
        assert (
            steps is None or simulate(graph, Schedule.from_steps(graph, steps)).peak_bytes <= budget
        )
    assert found[budgets[-1]] is not None


def test_a_forward_operator_of_no_segment_may_need_more_memory_at_first() -> None:
    graph = FAMILIES["random_layered_without_phases"]()
    steps = rotor_steps(graph, (minimum(graph).peak_bytes + keep_all_bytes(graph)) // 2)
    assert steps is not None
    assert not validate(graph, Schedule.from_steps(graph, steps))


def test_graphs_of_several_regions_are_not_planned() -> None:
    graph = FAMILIES["two_regions"]()
    assert rotor_steps(graph, keep_all_bytes(graph)) is None


def test_where_everything_fits_nothing_is_computed_again() -> None:
    graph = transformer(6)
    assert rotor_steps(graph, 2 * keep_all_bytes(graph)) == list(range(graph.num_operators))


@pytest.mark.parametrize("num_slots", [2, 3, 5])
def test_on_a_chain_it_costs_hardly_more_than_binomial_checkpointing(
    num_slots: int,
) -> None:
    """A segment's last value enters the next segment.

    It is computed once more for its own backward, where revolve still holds it.
    """
    graph = chain(30)
    revolve = simulate(
        graph, Schedule.from_steps(graph, next(iter(Revolve(num_slots).members(graph))))
    )
    steps = rotor_steps(graph, revolve.peak_bytes)
    assert steps is not None
    assert simulate(graph, Schedule.from_steps(graph, steps)).cost_s <= revolve.cost_s * 1.05


def test_a_segment_is_computed_from_what_enters_it_alone() -> None:
    graph = transformer(6)
    segments = Segmentation(graph, 12)
    assert 2 < len(segments.borders) <= 12
    assert segments.borders[-1] == segments.num_forward - 1

    for first in range(len(segments.borders)):
        begin = segments.borders[first - 1] + 1 if first else 0
        assert all(
            op >= begin
            for op in segments.closure(segments.entering[first + 1], segments.entering[first])
        )

    assert [op for backward in reversed(segments.backward) for op in backward] == list(
        range(segments.num_forward, graph.num_operators)
    )


def test_identical_layers_share_options_that_cost_more_the_less_they_hold() -> None:
    graph = transformer(12)
    segments = Segmentation(graph, 48)
    options = find_options(segments, keep_all_bytes(graph))
    single = [options[s, s] for s in range(len(segments.borders))]
    assert len({tuple(way.cost_s for way in ways) for ways in single}) < len(single) / 2
    for ways in options.values():
        assert all(a.peak_bytes < b.peak_bytes and a.cost_s > b.cost_s for a, b in pairwise(ways))


def test_stopped_at_once_it_finds_nothing() -> None:
    graph = transformer(6)
    assert rotor_steps(graph, keep_all_bytes(graph), should_stop=lambda: True) is None
