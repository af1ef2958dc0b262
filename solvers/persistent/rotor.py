"""The cheapest persistent schedule of a chain of segments, by dynamic programming over memory held.

Other names: rotor; optimal checkpointing of heterogeneous chains. With several ways to run a
segment's backward it is what Rockmate and HiRemate solve.
Papers: O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova, "Optimal checkpointing for
heterogeneous chains: how to train deep neural networks with limited memory", Inria RR-9302, 2019;
J. Zhao et al., "Rockmate", ICML 2023.
Optimal: among *persistent* schedules of the segments (what is stored stays until its backward), up
to the grid of memory amounts and the segments' options; not among all schedules.
Complexity: O(L^3 M) for L segments and M amounts of memory; a second for L = 64 and M = 512.
Imperfections: finding the options takes most of the time, less where layers are identical. Values
that the forward computes for no later segment are not counted where the last option runs, so a
schedule may need a little more than the budget. Graphs of several regions are not supported.

Notation of the paper, with h the memory held below segment s, including what enters s:

    C(s, t, h)  the least cost of running the backward of the segments t, t - 1, ..., s; the min of
                - the options of s .. t whose peak fits
                - for a q with s < q <= t: the forward of s .. q - 1, C(q, t, h + what enters q),
                  C(s, q - 1, h)
                - the forward of s that keeps what its backward reads, C(s + 1, t, h + that), the
                  backward of s
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from remat.core.graph import Graph
from remat.core.schedule import keep_all_peak
from remat.solvers.core.accounting import Floats, Ints
from remat.solvers.core.interrupt import is_past
from remat.solvers.persistent.segment_options import Options, find_options
from remat.solvers.persistent.segmentation import Part, Segmentation

# with these, filling the table takes a second (traced steps)
_MOST_SEGMENTS = 64
_AMOUNTS = 512  # distinct amounts of memory held, at most
# how a state is run; any other number is the segment that the forward advances to first
_BY_OPTION, _BY_KEEPING, _NOT_AT_ALL = 0, -1, -2


def rotor_steps(
    graph: Graph,
    budget_bytes: int,
    *,
    options_s: float = math.inf,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[int] | None:
    """Returns the steps of the cheapest persistent schedule for a budget; None where there is none.

    It may need a little more than the budget: simulate it.

    Args:
        graph: any graph; one of several regions gives None.
        budget_bytes: resident bytes included.
        options_s: seconds to look for options, those of single segments first.
        should_stop: a true answer ends the search, without a schedule.
    """
    if len({op.region for op in graph.operators}) > 1:
        return None

    segmentation = Segmentation(graph, _MOST_SEGMENTS)
    deadline = time.perf_counter() + options_s
    options = find_options(
        segmentation, budget_bytes, should_stop=lambda: is_past(deadline) or should_stop()
    )
    table = _Table(segmentation, options, budget_bytes)
    table.fill(should_stop)
    return _Writer(segmentation, options, table).steps() if table.is_possible else None


class _Table:
    """C(s, t, h) for all s, t and h, and how each is reached.

    Attributes:
        how: the way each state is run; shape (L, L, M + 1).
        option: the number of the option, where one runs the state.
        more: memory of what enters q beyond what enters s, in amounts; shape (L, L), indexed s, q.
        kept: memory of what a segment's backward reads beyond what enters it, in amounts; shape
            (L,).
    """

    def __init__(self, segments: Segmentation, options: Options, budget_bytes: int) -> None:
        self._segments, self._budget_bytes = segments, budget_bytes
        count = len(segments.borders)
        least = min(
            (option.peak_bytes for ways in options.values() for option in ways),
            default=budget_bytes,
        )

        entering = segments.entering[:count]
        self._added = np.array(
            [[segments.size_of(later - earlier) for later in entering] for earlier in entering],
            np.int64,
        )
        kept = np.array([_kept_bytes(segments, s) for s in range(count)], np.int64)

        room, common = (
            max(budget_bytes - least, 1),
            int(np.gcd.reduce([*self._added.ravel(), *kept])),
        )
        # amounts are exact where the common divisor of all sizes allows it
        self._unit = common if common * _AMOUNTS >= room else room / _AMOUNTS
        self._held = np.arange(int(room / self._unit) + 1) * self._unit  # bytes of each amount

        self.more, self.kept = self._amounts(self._added), self._amounts(kept)
        self._advance = [_forward(segments, s, segments.entering[s + 1]) for s in range(count)]
        self._keep = [_forward(segments, s, segments.kept(s)) for s in range(count)]
        self._keep_peak = [_backward_peak(segments, s) for s in range(count)]

        self._cost = np.full((count, count, len(self._held)), np.inf)
        self.how = np.full(self._cost.shape, _NOT_AT_ALL)
        self.option = np.full(self._cost.shape, -1)
        self._take_options(options)

    def fill(self, should_stop: Callable[[], bool]) -> None:
        """Computes all costs, unless it is stopped."""
        for t in range(len(self._advance)):
            for s in range(t - 1, -1, -1):
                if should_stop():
                    return
                self._advance_first(s, t)
                self._keep_first(s, t)

    @property
    def is_possible(self) -> bool:
        """True where some schedule fits."""
        return bool(np.isfinite(self._cost[0, -1, 0]))

    def _amounts(self, size: Ints) -> Ints:
        return np.ceil(size / self._unit - 1e-9).astype(np.int64)

    def _take_options(self, options: Options) -> None:
        for (s, t), ways in options.items():
            for number, way in enumerate(ways):
                better = (self._held + way.peak_bytes <= self._budget_bytes) & (
                    way.cost_s < self._cost[s, t]
                )
                self._cost[s, t, better], self.how[s, t, better], self.option[s, t, better] = (
                    way.cost_s,
                    _BY_OPTION,
                    number,
                )

    def _advance_first(self, s: int, t: int) -> None:
        """Offers the ways that advance to a q after s, run the backward t .. q, then q - 1 .. s."""
        later, amounts = np.arange(s + 1, t + 1), np.arange(len(self._held))
        index = amounts + self.more[s, later][:, None]
        cost = np.take_along_axis(self._cost[later, t], np.minimum(index, amounts[-1]), 1)
        cost[index > amounts[-1]] = np.inf
        cost += (
            np.cumsum([one.cost_s for one in self._advance[s:t]])[:, None]
            + self._cost[s, later - 1]
        )

        transient = [self._transient(one, t) for one in self._advance[s:t]] + self._added[s, s:t]
        cost[np.maximum.accumulate(transient)[:, None] + self._outside(t) > self._budget_bytes] = (
            np.inf
        )

        best = np.argmin(cost, 0)
        self._offer(s, t, cost[best, amounts], later[best])

    def _keep_first(self, s: int, t: int) -> None:
        """Offers the way that keeps what the backward of s reads and runs it after t .. s + 1."""
        most = len(self._held) - 1
        index = np.arange(most + 1) + self.kept[s]
        fits = (index <= most) & (self._held + self._keep_peak[s] <= self._budget_bytes)
        fits &= self._outside(t) + self._transient(self._keep[s], t) <= self._budget_bytes
        cost = self._keep[s].cost_s + self._cost[s + 1, t, np.minimum(index, most)]
        self._offer(s, t, np.where(fits, cost, np.inf), np.full(most + 1, _BY_KEEPING))

    def _outside(self, t: int) -> Floats:
        return np.asarray(self._held + self._segments.outside_bytes[t], np.float64)

    def _transient(self, forward: _Forward, t: int) -> int:
        """Returns the bytes that a forward needs on the way to segment t's backward.

        The way to the last segment is the first run; ways to others are recomputations.
        """
        return forward.first_bytes if t == len(self._advance) - 1 else forward.again_bytes

    def _offer(self, s: int, t: int, cost: Floats, how: Ints) -> None:
        better = cost < self._cost[s, t]
        self._cost[s, t, better], self.how[s, t, better] = cost[better], how[better]


class _Forward(NamedTuple):
    """The forward of a segment up to some targets.

    Its cost, and the bytes that it needs beyond what enters the segment.
    """

    cost_s: float
    again_bytes: int
    first_bytes: int  # in the first run, which computes all of the segment


def _forward(segments: Segmentation, segment: int, targets: frozenset[int]) -> _Forward:
    begin, entering = (
        segments.borders[segment - 1] + 1 if segment else 0,
        segments.entering[segment],
    )
    again, first = (
        segments.closure(targets, entering),
        list(range(begin, segments.borders[segment] + 1)),
    )

    again_bytes, first_bytes = (
        _peak_bytes(part) - segments.size_of(part.entering)
        for part in (segments.part(operators, entering | targets) for operators in (again, first))
    )
    return _Forward(float(segments.graph.arrays.cost_s[again].sum()), again_bytes, first_bytes)


def _backward_peak(segments: Segmentation, segment: int) -> int:
    """Returns the peak of a segment's backward with all its reads in memory.

    Memory held for earlier segments is not counted.
    """
    part = segments.part_of_backward(segment, segment)
    return segments.outside_bytes[segment] - segments.size_of(part.entering) + _peak_bytes(part)


def _peak_bytes(part: Part) -> int:
    return keep_all_peak(part.graph)


def _kept_bytes(segments: Segmentation, segment: int) -> int:
    """Returns the bytes kept for a segment's backward beyond what enters the segment.

    Values that also enter the next segment count twice, as its options may assume that they are
    freed.
    """
    entering, twice = (
        segments.entering[segment],
        segments.entering[segment + 1].intersection(segments.needed(segment, segment)),
    )
    return segments.size_of(segments.kept(segment) - entering) + segments.size_of(twice - entering)


@dataclass(frozen=True, slots=True)
class _State:
    """Segments whose backward is to be run, and the amount of memory and values held below them."""

    first: int
    last: int
    amount: int
    held: frozenset[int]


class _Writer:
    """Writes the steps of a table's cheapest schedule."""

    def __init__(self, segmentation: Segmentation, options: Options, table: _Table) -> None:
        self._segments, self._options, self._table = segmentation, options, table
        self._steps: list[int] = []
        self._num_begun = 0  # operators computed at least once
        self._available: set[int] = set()

    def steps(self) -> list[int]:
        """Returns the steps of the whole training step."""
        self._run(_State(0, len(self._segments.borders) - 1, 0, frozenset()))
        return [*self._steps, *range(self._num_begun, self._segments.graph.num_operators)]

    def _run(self, state: _State) -> None:
        """Writes the backward of a state's segments, and the forward operators that it needs."""
        s, t, table, entering = state.first, state.last, self._table, self._segments.entering
        how = int(table.how[s, t, state.amount])

        if how == _BY_OPTION:
            for op in self._options[s, t][table.option[s, t, state.amount]].steps:
                self._write(op)
        elif how == _BY_KEEPING:
            kept = state.held | self._segments.kept(s)
            self._compute(kept, kept)
            self._run(_State(s + 1, t, state.amount + int(table.kept[s]), kept))

            self._compute(self._segments.needed(s, s), kept)
            for op in self._segments.backward[s]:
                self._write(op)
        else:
            held = state.held | entering[how]
            self._compute(held, held)
            self._run(_State(how, t, state.amount + int(table.more[s, how]), held))

            self._available &= state.held
            self._run(_State(s, how - 1, state.amount, state.held))

        self._available &= state.held

    def _compute(self, targets: frozenset[int] | set[int], kept: frozenset[int] | set[int]) -> None:
        """Writes the operators that compute the targets, then drops all but `kept`."""
        for op in self._segments.closure(targets, self._available):
            self._write(op)
            self._available.update(self._segments.graph.operators[op].writes)
        self._available &= kept

    def _write(self, operator: int) -> None:
        """Writes a step, preceded by all earlier operators that were never computed."""
        if operator >= self._num_begun:
            self._steps += range(self._num_begun, operator)
            self._num_begun = operator + 1
        self._steps.append(operator)
