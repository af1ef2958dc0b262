"""The relaxation of one leaf of a tree (`branch_and_refine`).

A window model with some decisions taken, and which others or stages it asks for.

A model serves all leaves that have its windows: what is fixed changes from one to the other, memory
rows, moments and cuts by rounding hold for all and remain. Decisions are columns of the model that
every schedule has at 0 or 1, so fixing one both ways loses none. Complexity: that of `window` to
build it; a relaxation goes on from the last one's basis. Source: this package's own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from remat.solvers.bounds.lazy_rows import LazyRows
from remat.solvers.bounds.refinement import Refinement
from remat.solvers.bounds.window import Window, WindowModel
from remat.solvers.core.accounting import Floats, Ints
from remat.solvers.core.on_demand import steps_on_demand
from remat.solvers.lp.linear import Outcome

# stages that read something undecided, before those that schedules ask for and in all
_FIRST_UNDECIDED, _MOST_UNDECIDED = 3, 40
_ROUNDINGS = 2
_LEAST_WEIGHT = 1e-5  # of the budget, times how far from 0 and 1 a choice is
HALF, _LITTLE = 0.5, 0.05  # schedules keep what the point keeps more of


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """A decision every schedule takes one way or the other.

    Attributes:
        first: the boundary where a value is in memory or not, or the first of a window's.
        last: the window's other boundary in which an operator is computed again or not; -1 for a
            value.
        index: of the value, or the operator.
    """

    first: int
    last: int
    index: int


def boundaries_of(windows: Collection[Window]) -> list[int]:
    """Where stages begin and end."""
    return sorted({boundary for window in windows for boundary in window})


def unions_of(boundaries: Sequence[int], width: int) -> set[Window]:
    """The unions of up to so many neighbouring stages."""
    return {(a, b) for i, a in enumerate(boundaries) for b in boundaries[i + 1 : i + 1 + width]}


class LeafModel:
    """The relaxation over some stages, for the leaves that have these.

    Attributes:
        windows: of the model, without the forward.
    """

    def __init__(self, refinement: Refinement, windows: Collection[Window]) -> None:
        """Builds the model with these windows, and the rows found so far."""
        self._refinement, self.windows = refinement, windows
        self.boundaries = boundaries_of(windows)
        stages = list(pairwise(self.boundaries))
        self._forward, self._stages = (0, self.boundaries[0]), stages
        budget_bytes = refinement.budget_bytes
        self.model = WindowModel(
            refinement.graph,
            sorted({self._forward, *self.windows}),
            priced=[self._forward, *stages],
            budget_bytes=budget_bytes,
        )
        self.model.program.starts_from_last = True
        known = refinement.known
        self._lazy = LazyRows(
            self.model, known.of(windows), known.moments, most_roundings=_ROUNDINGS
        )

    @cached_property
    def _choices(self) -> tuple[list[Choice], Ints, Floats]:
        """All choices with their columns and weights, the bytes in question in budgets."""
        choices, columns, weights = list[Choice](), list[Ints](), list[Floats]()
        kept = [
            ((boundary, -1), of_value, self.model.accounting.size)
            for boundary, of_value in self.model.keep.items()
        ]
        again = [
            (window, self.model.again[window], self.model.accounting.own)
            for window in sorted(self.windows)
        ]
        for (first, last), column, weight in kept + again:
            there = np.flatnonzero(column >= 0)
            choices += [Choice(first, last, index) for index in there.tolist()]
            columns.append(column[there])
            weights.append(weight[there] / self.model.budget)
        return choices, np.concatenate(columns), np.concatenate(weights)

    def undecided(self, point: Floats) -> list[Choice]:
        """Returns the choices that `point` leaves in between, the largest first."""
        choices, columns, weights = self._choices
        weight = weights * np.minimum(point[columns], 1 - point[columns])
        order = np.argsort(-weight, kind="stable")
        return [choices[k] for k in order[: int((weight > _LEAST_WEIGHT).sum())].tolist()]

    def solve(self, fixed: Mapping[Choice, float], *, rounds: int, deadline: float) -> Outcome:
        """Returns the relaxation's bound and point, once memory rows were added in at most so many
        rounds.
        """
        found = {self._column(choice): value for choice, value in fixed.items()}
        found.pop(-1, None)  # of values that nothing reads later
        self.model.program.fix(np.array(list(found), np.int64), np.array(list(found.values())))
        outcome = self._lazy.solve(deadline=deadline, is_relaxed=True, most_rounds=rounds)
        self._refinement.known.take(self._lazy)
        return outcome

    def _column(self, choice: Choice) -> int:
        if choice.last < 0:
            return int(self.model.kept_columns(choice.first)[choice.index])
        return int(self.model.again[choice.first, choice.last][choice.index])

    def steps(self, point: Floats, least: float) -> list[int]:
        """The schedule that keeps what `point` keeps more than `least` of."""
        kept = {
            boundary: values.tolist() for boundary, values in self.model.kept(point, least).items()
        }
        later = {boundary: kept[boundary] for boundary in self.boundaries[1:-1]}
        return steps_on_demand(self._refinement.graph, kept[self.boundaries[0]], later=later)

    def asked_for(self, point: Floats, fixed: Collection[Choice]) -> list[tuple[int, ...]]:
        """Returns the boundaries of further stages, those first that say most.

        The stages where something is read that is fixed, or half kept or computed again, and what
        the schedule of `point` asks for.
        """
        again = [self.model.values_at(self.model.again[stage], point) for stage in self._stages]
        paid_s = [float(np.dot(self._refinement.graph.arrays.cost_s, stage)) for stage in again]
        failed = [
            self._refinement.asked_for(self.steps(point, least), self.boundaries, paid_s)
            for least in (HALF, _LITTLE)
        ]
        undecided = self._reading(
            [*reversed(list(fixed)), *self.undecided(point)[:_MOST_UNDECIDED]]
        )
        return list(
            dict.fromkeys(
                [
                    *undecided[:_FIRST_UNDECIDED],
                    *failed[0],
                    *failed[1],
                    *undecided[_FIRST_UNDECIDED:],
                ]
            )
        )

    def _reading(self, choices: Iterable[Choice]) -> list[tuple[int, int]]:
        """The operators as stages of their own, none yet, that are first to read what each of the
        choices keeps or computes again.
        """
        read, reader = self.model.graph.arrays.read, self.model.accounting.reader
        found = list[int]()
        for choice in choices:
            for value in (
                [choice.index]
                if choice.last < 0
                else self.model.graph.operators[choice.index].writes
            ):
                readers = reader[(read == value) & (reader >= choice.first)]
                found += [int(readers.min())] if len(readers) else []
        return [(v, v + 1) for v in found if not {v, v + 1} <= set(self.boundaries)]
