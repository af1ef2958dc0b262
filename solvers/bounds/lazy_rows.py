"""Solves a window model with few of its memory rows, added where a solution violates them.

First come the cheap rounds of the LP relaxation, then those with integers. Every outcome bounds the
full model, which has more rows. A round adds a few rows, apart from each other. A relaxation that
violates no row may get rounding cuts of its rows (`rounding_cuts`), for a few rounds as long as
these raise the bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np

from remat.solvers.bounds.transient_rows import MomentRows
from remat.solvers.bounds.window import Window, WindowModel
from remat.solvers.core.accounting import Floats
from remat.solvers.core.interrupt import is_past
from remat.solvers.lp.linear import Outcome
from remat.solvers.lp.rounding_cuts import rounded

# share of the budget; rows violated by less are not added, as HiGHS itself is no more exact
_TOLERANCE = 1e-6
# a prototype needed 21 of 5,000 rows on a graph of 10,001 operators; which one is not on record
_ROWS_PER_ROUND = 20
TOO_NEAR = 2  # operators; rows this close say nearly the same: a round adds one; not tuned
# share of the bound that a round of rounding cuts must gain for another round (published graphs)
_WORTH = 1e-4
_GAP = 1e-4  # relative, for models with integers; HiGHS's own default
MOST_NODES = 20_000  # of branch and bound; ends models before time limits do; round, not measured


class LazyRows:
    """A window model and the memory rows it has so far."""

    def __init__(
        self,
        model: WindowModel,
        rows: Iterable[tuple[Window, int]] = (),
        moments: Mapping[tuple[int, int], set[int]] = MappingProxyType({}),
        *,
        most_roundings: int = 0,
    ) -> None:
        """Adds the given rows and moments to the model.

        Args:
            model: without memory rows.
            rows: windows of the model, each with one of its operators.
            moments: (v, j) with their sets.
            most_roundings: rounds of rounding cuts that a relaxation gets.
        """
        self.model, self._most_roundings = model, most_roundings
        self.rows = set(rows)
        self.moments = [MomentRows(model, a) for a, b in model.windows if b == a + 1 and a > 0]

        for window, v in sorted(self.rows):
            model.add_memory_row(window, v)
        for (v, j), chosen in moments.items():
            for rows_of_window in self.moments:
                if rows_of_window.v == v:
                    rows_of_window.add(j, chosen)

    @property
    def sets(self) -> dict[tuple[int, int], set[int]]:
        """The moments so far: (v, j) with their sets."""
        return {
            (moments.v, j): chosen
            for moments in self.moments
            for j, (_, chosen) in moments.sets.items()
        }

    def solve(
        self,
        *,
        deadline: float,
        relative_gap: float = _GAP,
        is_relaxed: bool = False,
        node_limit: int = MOST_NODES,
        cutoff: float | None = None,
    ) -> Outcome:
        """Returns the last outcome's point, with the best bound.

        The point satisfies all memory rows if the solver finished below the cutoff. With a
        `cutoff` (the objective of a known schedule) the bound is at most the cutoff, and there may
        be no point. Models with integers are solved up to `relative_gap`, in `node_limit` nodes.
        `deadline` is in `time.perf_counter` seconds.
        """
        best = self._rounds(True, deadline, relative_gap, node_limit, -math.inf, cutoff)
        if is_relaxed or best.is_infeasible or not best.is_finished:
            return best
        return self._rounds(False, deadline, relative_gap, node_limit, best.bound, cutoff)

    def _rounds(
        self,
        is_relaxed: bool,
        deadline: float,
        relative_gap: float,
        node_limit: int,
        bound: float,
        cutoff: float | None,
    ) -> Outcome:
        roundings, before = self._most_roundings if is_relaxed else 0, -math.inf
        while True:
            left_s = deadline - time.perf_counter()
            if left_s <= 0:
                return Outcome(bound, None, False)

            outcome = self.model.program.minimise(
                is_relaxed=is_relaxed,
                time_limit_s=left_s,
                relative_gap=relative_gap,
                node_limit=node_limit,
                cutoff=cutoff,
            )

            bound = max(bound, outcome.bound)
            is_cut_off = cutoff is not None and bound >= cutoff
            if outcome.point is None or is_cut_off:
                return Outcome(bound, outcome.point, outcome.is_finished)

            is_more = self._add_violated(outcome.point, deadline) > 0
            if not is_more and roundings > 0 and _has_gained(outcome, before):
                roundings, before = roundings - 1, outcome.bound
                is_more = self._add_rounded(outcome.point)

            if not (is_more and outcome.is_finished):
                return Outcome(bound, outcome.point, outcome.is_finished)

    def _add_violated(self, point: Floats, deadline: float) -> int:
        """Adds the most violated rows, at least three operators apart, and returns how many."""
        limit = self.model.limit(point) + _TOLERANCE * self.model.budget
        found: list[tuple[float, Window, int]] = []
        for window in self.model.windows:
            usage = self.model.usage(point, window)
            found += [
                (float(usage[i]), window, window[0] + int(i)) for i in np.flatnonzero(usage > limit)
            ]
        found.sort(key=lambda item: -item[0])

        chosen: list[tuple[Window, int]] = []
        for _, window, v in found:
            is_apart = all(window != other or abs(v - u) > TOO_NEAR for other, u in chosen)
            if is_apart and (window, v) not in self.rows:
                chosen.append((window, v))
                self.rows.add((window, v))
                self.model.add_memory_row(window, v)
            if len(chosen) == _ROWS_PER_ROUND:
                break

        return len(chosen) + self._add_moments(point, deadline)

    def _add_rounded(self, point: Floats) -> bool:
        """Adds the rounding cuts that the point violates; False where there are none."""
        knapsacks = [
            *self.model.knapsacks,
            *(knapsack for moments in self.moments for knapsack in moments.knapsacks),
        ]
        cuts = [cut for knapsack in knapsacks for cut in rounded(knapsack, point)]
        for cut in cuts:
            self.model.program.add_row(cut.columns, cut.coefficients, upper=cut.upper)
        return bool(cuts)

    def _add_moments(self, point: Floats, deadline: float) -> int:
        """Adds the most violated moment of each window of one operator; returns how many.

        Returns at least 1 past the deadline, as windows left unchecked may have violated ones.
        """
        count = 0
        for moments in self.moments:
            for _, j in moments.violated(point, deadline=deadline)[:1]:
                moments.add_at(j, point)
                count += 1
        return max(count, int(is_past(deadline)))


def _has_gained(outcome: Outcome, before: float) -> bool:
    """Says whether a round raised the bound by enough for another round of rounding cuts."""
    return (
        outcome.is_finished
        and outcome.bound > -math.inf
        and outcome.bound - before > _WORTH * abs(outcome.bound)
    )
