"""Ways to run the backward of a few segments, each with its memory and cost.

An *option* is a schedule of the part of the step that recomputes some segments, from the values
that enter them, and runs their backward. The cheapest keeps everything that it recomputes; ones of
lower peak come from greedy eviction and annealing, under a few budgets. Parts that differ only in
names, such as those of identical layers, share one set of options.

Source: J. Zhao et al., "Rockmate: an efficient, fast, automatic and generic tool for
re-materialization in PyTorch", ICML 2023, where an integer program finds the options of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.solvers.core.accounting import working_set_bytes
from remat.solvers.persistent.segmentation import Segmentation
from remat.solvers.search.annealing import COLD, LocalSearch, Round
from remat.solvers.search.greedy_eviction import Rule, steps_with_eviction

# Measured together, not one by one, on traced steps (BERT, ViT-L, DenseNet) at their least budgets.
MOST_SEGMENTS_TOGETHER = 4  # in an option
_NUM_BUDGETS = 8  # for each part, from its own peak down to its working set
_MOVES = 2_000  # of annealing for each part and budget
_HOT = 1e-2  # first temperature, as a share of the cost of keeping everything
_MAX_FACTOR = 4.0  # greedy eviction gives up beyond this multiple of operators and of cost
# limit on the operators of all distinct parts, some seconds of work: a multiple of the graph's, or
# this many if that is more
_PARTS_SHARE, _FEW_OPERATORS = 2.0, 1_500
_RULES = Rule.LARGE, Rule.CHEAP


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run the backward of a few segments.

    Attributes:
        peak_bytes: peak of the whole step, less what is held for earlier segments.
        cost_s: cost of its forward operators, and of the backward operators that it repeats.
        steps: operators of the whole graph.
    """

    peak_bytes: int
    cost_s: float
    steps: tuple[int, ...]


# by first and last segment; the lowest peak first, each cheaper than the one before
Options = dict[tuple[int, int], list[Option]]


def find_options(
    segmentation: Segmentation,
    budget_bytes: int,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> Options:
    """Returns the options of up to `MOST_SEGMENTS_TOGETHER` segments in a row.

    Args:
        segmentation: of any graph.
        budget_bytes: no option exceeds it.
        should_stop: a true answer ends the search, which begins with single segments; options not
            found by then are missing.
    """
    finder, options = _Finder(segmentation, budget_bytes, should_stop), Options()
    for num_together in range(1, MOST_SEGMENTS_TOGETHER + 1):
        if not finder.is_over:
            options |= finder.options(num_together)
    return options


class _Finder:
    """Finds the options of one graph's segments under one budget, within a limit on work."""

    def __init__(
        self, segmentation: Segmentation, budget_bytes: int, should_stop: Callable[[], bool]
    ) -> None:
        self._segmentation, self._budget_bytes, self._should_stop = (
            segmentation,
            budget_bytes,
            should_stop,
        )
        self._num_operators = 0  # of the parts so far

    @property
    def is_over(self) -> bool:
        most = max(_PARTS_SHARE * self._segmentation.graph.num_operators, _FEW_OPERATORS)
        return self._num_operators > most or self._should_stop()

    def options(self, num_together: int) -> Options:
        """Returns the options of `num_together` segments in a row; none past the limit on work."""
        segments = self._segmentation
        spans = [
            (first, first + num_together - 1)
            for first in range(len(segments.borders) - num_together + 1)
        ]

        parts = {span: segments.part_of_backward(*span) for span in spans}
        kinds = {span: _kind(part.graph) for span, part in parts.items()}
        outside = {
            span: segments.outside_bytes[span[1]] - segments.size_of(part.entering)
            for span, part in parts.items()
        }

        room: dict[Hashable, int] = {}
        for span, kind in kinds.items():
            room[kind] = max(room.get(kind, 0), self._budget_bytes - outside[span])

        ways: dict[Hashable, list[Option]] = {}
        found = Options()
        for span, part in parts.items():
            kind = kinds[span]
            if kind not in ways:
                ways[kind] = self._ways(part.graph, room[kind])

            once_s = sum(
                segments.graph.operators[op].cost_s
                for op in part.operators[1:]
                if op >= segments.num_forward
            )

            found[span] = [
                Option(
                    way.peak_bytes + outside[span],
                    way.cost_s - once_s,
                    tuple(part.operators[step] for step in way.steps if step),
                )
                for way in ways[kind]
            ]
        return found

    def _ways(self, graph: Graph, room_bytes: int) -> list[Option]:
        """Returns a part's ways, none past the limit on work; counts its operators as work."""
        found = [] if self.is_over else _ways(graph, room_bytes, self._should_stop)
        self._num_operators += graph.num_operators
        return found


def _kind(graph: Graph) -> Hashable:
    """Returns a key that is equal for parts with the same options."""
    operators = tuple(
        (op.cost_s, op.reads, op.writes, op.workspace_bytes, op.phase, bool(op.pinned), op.reuses)
        for op in graph.operators
    )
    return operators, tuple((value.size_bytes, value.kind) for value in graph.values), graph.outputs


def _ways(graph: Graph, room_bytes: int, should_stop: Callable[[], bool]) -> list[Option]:
    """Returns schedules of a part within `room_bytes`: the lowest peak first, then ever cheaper."""
    found = [_option(graph, range(graph.num_operators))]
    least, most = working_set_bytes(graph), min(found[0].peak_bytes, room_bytes)
    for budget in np.linspace(most, least, _NUM_BUDGETS + 1).astype(int).tolist():
        if budget < found[0].peak_bytes and not should_stop():
            found += _ways_within(graph, budget)

    front: list[Option] = []
    for option in sorted(found, key=lambda option: (option.peak_bytes, option.cost_s)):
        if option.peak_bytes <= room_bytes and (not front or option.cost_s < front[-1].cost_s):
            front.append(option)
    return front


def _ways_within(graph: Graph, budget_bytes: int) -> list[Option]:
    """Returns what greedy eviction and annealing find within one budget."""
    evicted = (
        steps_with_eviction(graph, budget_bytes, rule, max_factor=_MAX_FACTOR) for rule in _RULES
    )
    found = [_option(graph, steps.tolist()) for steps in evicted if steps is not None]

    local = LocalSearch(graph, budget_bytes=budget_bytes, seed=0)
    start = (
        min(found, key=lambda option: option.cost_s).steps if found else range(graph.num_operators)
    )
    local.run(np.asarray(start), Round(_MOVES, _HOT, COLD))
    if local.best_steps is not None:
        found.append(_option(graph, local.best_steps.tolist()))
    return found


def _option(graph: Graph, steps: Sequence[int]) -> Option:
    simulation = simulate(graph, Schedule.from_steps(graph, list(steps)))
    return Option(simulation.peak_bytes, simulation.cost_s, tuple(steps))
