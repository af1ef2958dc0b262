"""Checkpoints of two levels.

Their schedules are valid, keep few values at the forward's end, and have lower peaks than one level
where the loss leaves little room.
"""

from __future__ import annotations

import pytest

from remat.core.errors import SolverError
from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.validate import validate
from remat.solvers.baselines.chen import ChenGreedy
from remat.solvers.baselines.two_level import Nested
from remat.tracers.synthetic import chain, transformer
from tests.support.graphs import with_a_crowded_loss


def lowest_peak(graph: Graph, family: ChenGreedy | Nested) -> int:
    return min(
        simulate(graph, Schedule.from_steps(graph, list(steps))).peak_bytes
        for steps in family.members(graph)
    )


@pytest.mark.parametrize("graph", [chain(24), transformer(6)], ids=["chain", "transformer"])
def test_its_schedules_are_valid_and_differ(graph: Graph) -> None:
    members = [tuple(steps) for steps in Nested().members(graph)]
    assert len(set(members)) >= 5
    for steps in members:
        assert not validate(graph, Schedule.from_steps(graph, list(steps)))


def test_where_the_loss_leaves_little_room_two_levels_need_less_than_one() -> None:
    graph = with_a_crowded_loss(chain(36))
    assert lowest_peak(graph, Nested()) < lowest_peak(graph, ChenGreedy())


def test_a_stage_is_computed_again_once_per_level() -> None:
    graph = chain(36)
    times = [
        max(steps.count(op) for op in range(graph.num_forward))
        for steps in map(list, Nested().members(graph))
    ]
    assert max(times) == 3  # in the forward, for the run of segments, for its own segment


def test_a_forward_without_stages_is_refused() -> None:
    with pytest.raises(SolverError, match="sequence of stages"):
        list(
            Nested().members(Graph.from_arrays([1] * 4, [1] * 4, [(0, 2), (1, 2), (0, 3), (1, 3)]))
        )
