"""The relaxation of one leaf of a tree: a window model with some branching variables fixed.

It also says which variables to branch on and which stages to add (`branch_and_refine`). One model
serves all leaves with its windows: the fixed variables change from leaf to leaf; memory rows,
moments and rounding cuts hold for all and remain. Branching variables are columns that every
schedule has at 0 or 1, so branching loses none. Complexity: that of `window` to build the model; a
relaxation starts from the last one's basis. Source: this package's own.
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

# how many stages that read something undecided are tried before those that schedules ask for, and
# how many variables are considered for them
_FIRST_UNDECIDED, _MOST_UNDECIDED = 3, 40
_ROUNDINGS = 2
_LEAST_WEIGHT = 1e-5  # of a variable: its bytes in budgets times its distance from 0 or 1
HALF, _LITTLE = 0.5, 0.05  # schedules keep the values whose S exceeds this


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """A branching variable: S of a value at a boundary, or R of an operator in a window.

    Attributes:
        first: the boundary of S, or the first boundary of R's window.
        last: the last boundary of R's window; -1 for S.
        index: of the value or the operator.
    """

    first: int
    last: int
    index: int


def boundaries_of(windows: Collection[Window]) -> list[int]:
    """Returns all boundaries of some windows, in order."""
    return sorted({boundary for window in windows for boundary in window})


def unions_of(boundaries: Sequence[int], width: int) -> set[Window]:
    """Returns the unions of up to `width` neighbouring stages."""
    return {(a, b) for i, a in enumerate(boundaries) for b in boundaries[i + 1 : i + 1 + width]}


class LeafModel:
    """The relaxation with some windows, for all leaves that have these.

    Attributes:
        windows: of the model, without the forward.
    """

    def __init__(self, refinement: Refinement, windows: Collection[Window]) -> None:
        """Builds the model with these windows and the rows known so far."""
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
        """All branching variables with their columns and weights (bytes, in budgets)."""
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
        """Returns the fractional branching variables of `point`, the largest first."""
        choices, columns, weights = self._choices
        weight = weights * np.minimum(point[columns], 1 - point[columns])
        order = np.argsort(-weight, kind="stable")
        return [choices[k] for k in order[: int((weight > _LEAST_WEIGHT).sum())].tolist()]

    def solve(self, fixed: Mapping[Choice, float], *, rounds: int, deadline: float) -> Outcome:
        """Solves the relaxation with `fixed`, adding memory rows in at most `rounds` rounds."""
        found = {self._column(choice): value for choice, value in fixed.items()}
        found.pop(-1, None)  # variables of values that nothing reads later have no column
        self.model.program.fix(np.array(list(found), np.int64), np.array(list(found.values())))
        outcome = self._lazy.solve(deadline=deadline, is_relaxed=True, most_rounds=rounds)
        self._refinement.known.take(self._lazy)
        return outcome

    def _column(self, choice: Choice) -> int:
        if choice.last < 0:
            return int(self.model.kept_columns(choice.first)[choice.index])
        return int(self.model.again[choice.first, choice.last][choice.index])

    def steps(self, point: Floats, least: float) -> list[int]:
        """Returns the schedule that keeps the values whose S exceeds `least` at `point`."""
        kept = {
            boundary: values.tolist() for boundary, values in self.model.kept(point, least).items()
        }
        later = {boundary: kept[boundary] for boundary in self.boundaries[1:-1]}
        return steps_on_demand(self._refinement.graph, kept[self.boundaries[0]], later=later)

    def asked_for(self, point: Floats, fixed: Collection[Choice]) -> list[tuple[int, ...]]:
        """Returns the boundaries of further stages to try, the most promising first.

        These are stages that read a value whose variables are fixed or fractional, and those that
        the schedule of `point` asks for.
        """
        again = [self.model.values_at(self.model.again[stage], point) for stage in self._stages]
        paid_s = [float(np.dot(self._refinement.graph.arrays.cost_s, stage)) for stage in again]
        failed = [
            self._refinement.failures(self.steps(point, least)).asked_for(self.boundaries, paid_s)
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
        """Returns the first reader of each variable's values, as stages that the model lacks."""
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
