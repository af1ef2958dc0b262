"""Large neighbourhood search: free a part of a schedule, solve that part as a MILP, repeat.

Solutions are accepted once the simulator confirms them. Other names: large neighbourhood search
(Shaw, 1998), a matheuristic; related to local branching. A neighbourhood is a set of free pairs
(operator, stage): the operator may or may not be recomputed in that stage (`neighbourhood_model`).
The kinds of neighbourhood take turns:

- values: the operators of a range of the graph, in every stage where values that they read or write
  begin or end
- halves: two such ranges of half the width
- mixed: a wider range, in about half of these stages
- stages: a range of stages, with every operator that could be useful there
- shifted: a range of operators as in values, and every recomputation nearby may move by a few
  stages: when two distant values are exchanged, others must make room (on U-Net at 7 GB, only this
  kind lowered the cost from 196,599 to 196,567)

Each kind's width grows while its models are solved to the end and shrinks where a limit stops them.
Equal costs are accepted. Limits are numbers of nodes; time is only a cap, so a seed gives one
answer. It proves nothing, as only each part is solved to optimality.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.solvers.core.accounting import Bools, Ints
from remat.solvers.search.neighbourhood_solve import GROW, SHRINK, solve_part
from remat.solvers.search.sequence import region_spans
from remat.solvers.search.slots import events_of, stages_of

# Measured together, not one by one, on published graphs (U-Net at 5 and 7 GB).
_MAX_NODES = 60  # of branch and bound, for one part
_MAX_PAIRS = 1_500  # free at most, roughly, in stages and in shifts
_SOLVE_LIMIT_S = 10.0  # seconds for one part, by default
_SHIFT = 8  # stages by which a recomputation may move


class Kind(IntEnum):
    """The kind of a neighbourhood: what it frees."""

    VALUES = 0
    HALVES = 1
    MIXED = 2
    STAGES = 3
    SHIFTED = 4


# operators, or stages where the kind is `STAGES`
_FIRST_WIDTHS = {
    Kind.VALUES: 16.0,
    Kind.HALVES: 16.0,
    Kind.MIXED: 24.0,
    Kind.STAGES: 6.0,
    Kind.SHIFTED: 14.0,
}


@dataclass(frozen=True)
class _Incumbent:
    """A schedule, and its reads and writes (events), sorted by value and then by step."""

    steps: Ints
    cost_s: float
    stage: Ints  # of each step
    value: Ints  # of each event
    event_stage: Ints
    is_write: Bools
    is_last: Bools  # the value is not read again before it is written again


class Neighbourhood:
    """Exact search on one graph under one budget."""

    def __init__(self, graph: Graph, budget_bytes: int, seed: int = 0) -> None:
        """Prepares the search; nothing runs yet."""
        self._graph = graph
        self._budget_bytes = budget_bytes
        self._random = np.random.default_rng(seed)
        self._width = dict(_FIRST_WIDTHS)
        self._spans = region_spans(graph)
        self._may = ~graph.arrays.is_pinned & (np.diff(graph.arrays.write_start) > 0)
        self._read_by_operator = [set(parents) for parents in graph.parents_of]

    def improve(
        self,
        steps: Sequence[int],
        *,
        max_rounds: int,
        should_stop: Callable[[], bool] | None = None,
        time_limit_s: float = _SOLVE_LIMIT_S,
    ) -> list[int]:
        """Returns steps within the budget that cost no more than `steps`.

        Args:
            steps: a valid sequence within the budget.
            max_rounds: number of parts to solve.
            should_stop: polled between rounds.
            time_limit_s: cap on each round.

        Raises:
            ValueError: `steps` do not fit the budget.
        """
        current = self._look_at(np.asarray(steps, np.int64))
        peak_bytes = simulate(
            self._graph, Schedule.from_steps(self._graph, current.steps.tolist())
        ).peak_bytes
        if peak_bytes > self._budget_bytes:
            raise ValueError(
                f"the steps hold {peak_bytes:,} bytes and the budget is "
                f"{self._budget_bytes:,}; give steps that fit"
            )

        for index in range(max_rounds):
            if should_stop is not None and should_stop():
                break
            kind = Kind(index % len(Kind))
            free = self._choose(kind, current)
            if len(free):
                current = self.solve(current, free, kind=kind, time_limit_s=time_limit_s)
        return [int(op) for op in current.steps]

    def _look_at(self, steps: Ints) -> _Incumbent:
        simulation = simulate(self._graph, Schedule.from_steps(self._graph, steps.tolist()))
        with_end = np.append(steps, self._graph.num_operators)
        stage = stages_of(with_end)
        value, slot, is_write = events_of(self._graph, with_end)
        is_last = np.append((value[1:] != value[:-1]) | is_write[1:], True)
        return _Incumbent(steps, simulation.cost_s, stage, value, stage[slot], is_write, is_last)

    def solve(
        self, current: _Incumbent, free: Ints, *, kind: Kind, time_limit_s: float
    ) -> _Incumbent:
        """Returns the best schedule with only the pairs `free` changed, or `current`."""
        part = solve_part(
            self._graph,
            current.steps,
            free,
            budget_bytes=self._budget_bytes,
            max_nodes=_MAX_NODES,
            time_limit_s=time_limit_s,
        )

        self._width[kind] *= GROW if part.is_finished else SHRINK
        return self._look_at(part.steps) if part.steps is not current.steps else current

    def _choose(self, kind: Kind, current: _Incumbent) -> Ints:
        """Returns the pairs of a random neighbourhood."""
        width = max(int(self._width[kind]), 2)
        if kind is Kind.STAGES:
            return self._pairs_in_stages(current, width)

        candidates = self._candidates(current)
        if len(candidates) == 0:
            return np.zeros((0, 2), np.int64)

        parts = (width // 2, width // 2) if kind is Kind.HALVES else (width,)
        operators = np.unique(np.concatenate([self._range(candidates, part) for part in parts]))
        stages = self._stages_of_interest(current, operators)
        if kind is Kind.MIXED:
            stages = self._range(stages, max(len(stages) // 2, 1))

        pairs = self._pairs(current, operators, stages)
        return (
            np.unique(np.concatenate([pairs, self._shifts(current, pairs)]), axis=0)
            if kind is Kind.SHIFTED
            else pairs
        )

    def _range(self, items: Ints, width: int) -> Ints:
        first = int(self._random.integers(-(width // 2), max(len(items) - width // 2, 1)))
        return items[max(first, 0) : max(first + width, 1)]

    def _candidates(self, current: _Incumbent) -> Ints:
        """Returns the recomputable operators whose values are read later than in the next stage."""
        late = np.zeros(self._graph.num_operators, np.bool_)
        reads = ~current.is_write
        producer = self._graph.arrays.producer[current.value[reads]]
        late[producer[current.event_stage[reads] > producer + 1]] = True
        return np.flatnonzero(late & self._may)

    def _stages_of_interest(self, current: _Incumbent, operators: Ints) -> Ints:
        """Returns the stages that matter to `operators`.

        In these stages, values that they write are computed or read, or values that they read begin
        or end.
        """
        arrays = self._graph.arrays
        is_mine = np.zeros(self._graph.num_operators, np.bool_)
        is_mine[operators] = True
        is_written = is_mine[np.maximum(arrays.producer, 0)] & (arrays.producer >= 0)
        is_read = np.zeros(len(is_written), np.bool_)
        is_read[arrays.read[np.repeat(is_mine, np.diff(arrays.read_start))]] = True

        chosen = is_written[current.value] | (
            is_read[current.value] & (current.is_write | current.is_last)
        )
        return np.unique(current.event_stage[chosen])

    def _pairs(self, current: _Incumbent, operators: Ints, stages: Ints) -> Ints:
        """Returns the pairs of `operators` x `stages` that are allowed and have a later reader."""
        count = self._graph.num_operators
        last = np.full(count, -1)
        reads = ~current.is_write
        np.maximum.at(
            last, self._graph.arrays.producer[current.value[reads]], current.event_stage[reads]
        )

        mine = set(operators.tolist())
        for operator in operators[::-1].tolist():
            for parent in self._read_by_operator[operator] & mine:
                last[parent] = max(last[parent], last[operator])

        op, stage = (array.ravel() for array in np.meshgrid(operators, stages))
        is_kept = (stage <= last[op]) & self._is_allowed(op, stage)
        return np.stack([op[is_kept], stage[is_kept]], axis=1)

    def _shifts(self, current: _Incumbent, pairs: Ints) -> Ints:
        """Returns pairs that shift the recomputations near `pairs` by up to `_SHIFT` stages."""
        if len(pairs) == 0:
            return pairs

        is_again = np.ones(len(current.steps), np.bool_)
        is_again[np.unique(current.steps, return_index=True)[1]] = False
        stage = current.stage[:-1]
        near = np.flatnonzero(
            is_again & (pairs[:, 1].min() - _SHIFT <= stage) & (stage <= pairs[:, 1].max() + _SHIFT)
        )
        if len(near) > _MAX_PAIRS // (2 * _SHIFT + 1):
            near = self._range(near, _MAX_PAIRS // (2 * _SHIFT + 1))

        op, to = (
            np.repeat(current.steps[near], 2 * _SHIFT + 1),
            (stage[near, None] + np.arange(-_SHIFT, _SHIFT + 1)).ravel(),
        )
        is_kept = (to <= self._graph.num_operators) & self._is_allowed(op, to)
        return np.stack([op[is_kept], to[is_kept]], axis=1)

    def _is_allowed(self, op: Ints, stage: Ints) -> Bools:
        """True where pins and regions allow recomputing an operator in a stage."""
        span = self._spans[op]
        is_inside = ((span[:, 0] < stage) & (stage <= span[:, 1])) | (
            (span[:, 2] < stage) & (stage <= span[:, 3])
        )
        return np.asarray(self._may[op] & (op < stage) & is_inside, np.bool_)

    def _pairs_in_stages(self, current: _Incumbent, width: int) -> Ints:
        """Returns the pairs of a range of stages.

        Their operators are those whose values are read or computed there, and their ancestors.
        """
        first = int(self._random.integers(1, self._graph.num_operators + 1))
        inside = (first <= current.event_stage) & (current.event_stage < first + width)

        queue = np.unique(self._graph.arrays.producer[current.value[inside]]).tolist()
        chosen = set(queue)
        while queue and len(chosen) * width < _MAX_PAIRS:
            for parent in self._read_by_operator[queue.pop(0)] - chosen:
                chosen.add(parent)
                queue.append(parent)

        stages = np.arange(first, min(first + width, self._graph.num_operators + 1))
        return self._pairs(current, np.array(sorted(chosen), np.int64), stages)
