"""Schedules from relaxed window models, with memory held back where earlier schedules did not fit.

A relaxation of the window model is solved in milliseconds and says what to keep. The schedule built
from it needs a little too much memory at a few operators, before which values are recomputed. That
much is taken off the budget at these operators alone (their *reserve*), and the relaxation is
solved again, from its last basis. Where a schedule fits, a part of all reserves is given back, so
the search moves along the edge of what fits. It proves nothing: with reserves the model is
not a relaxation.

Complexity per iteration: one relaxation and a few schedules, O(V + E) each. Source: this package's
own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from remat.solvers.bounds.lazy_rows import LazyRows
from remat.solvers.bounds.refinement import Refinement
from remat.solvers.core.accounting import Floats
from remat.solvers.core.interrupt import is_past

# Measured together, not one by one, on a traced step (DenseNet at 40 to 60 % of its peak).
_ITERATIONS, _MOST_FRUITLESS = 12, 5  # relaxations: in all; in a row without a cheaper schedule
_THRESHOLDS = 0.5, 0.05, 0.2, 0.8, 0.95  # schedules keep the values whose S exceeds this
_GIVEN_BACK = 0.3  # share of all reserves released where a schedule fits
_AFTER_NONE = 0.6  # share of all reserves that remains where the model has no point
_STEP = 0.3, 1.1  # range of the random share of the excess that goes into the reserve
_CREEP = 0.2  # share of the excess that goes into it at least


class Reserves:
    """The search over the present stages of a refinement."""

    def __init__(self, refinement: Refinement, *, seed: int = 0) -> None:
        """Prepares the search; nothing is solved yet."""
        self._refinement = refinement
        self._lazy: LazyRows = refinement.relaxation()
        self._lazy.model.program.starts_from_last = True
        self._random = np.random.default_rng(seed)

    def schedules(self, *, deadline: float) -> Iterator[list[int]]:
        """Yields schedules within the budget or near it.

        Ends when several relaxations in a row yield no cheaper schedule that fits.

        Args:
            deadline: in `time.perf_counter` seconds; most searches end earlier.
        """
        refinement, model = self._refinement, self._lazy.model
        best_s, fruitless = math.inf, 0

        for _ in range(_ITERATIONS):
            if is_past(deadline) or fruitless == _MOST_FRUITLESS:
                return

            before_s, fruitless = best_s, fruitless + 1
            point = self._lazy.solve(deadline=deadline, is_relaxed=True).point
            if point is None:
                model.set_reserve(model.reserve * _AFTER_NONE)
                continue

            has_fit, cheapest, failures = False, math.inf, dict[int, float]()
            for least in _THRESHOLDS:
                steps = refinement.steps_of(model, point, least)
                excess = refinement.failures(steps).worst
                cost_s = float(refinement.graph.arrays.cost_s[steps].sum())

                has_fit |= not excess
                if not excess:
                    best_s = min(best_s, cost_s)
                elif cost_s < cheapest:
                    cheapest, failures = cost_s, excess
                if not excess or least == _THRESHOLDS[0]:
                    yield steps

            fruitless = 0 if best_s < before_s else fruitless
            self._adapt(point, failures, has_fit=has_fit)

    def _adapt(self, point: Floats, failures: dict[int, float], *, has_fit: bool) -> None:
        """Raises the reserves by the excess of the cheapest schedule over the budget.

        Where another schedule fits, they rise by less.
        """
        model = self._lazy.model
        free = model.budget + model.reserve - self._usage(point)
        reserve = model.reserve * (1 - _GIVEN_BACK) if has_fit else model.reserve.copy()

        for v, excess in failures.items():
            wanted = free[v] + excess * self._random.uniform(*_STEP)
            reserve[v] = (
                max(reserve[v], wanted / 2)
                if has_fit
                else max(reserve[v] + _CREEP * excess, wanted)
            )
        model.set_reserve(reserve)

    def _usage(self, point: Floats) -> Floats:
        """Returns the model's largest memory at each operator over all windows, with reserves."""
        model = self._lazy.model
        usage = np.zeros(model.graph.num_operators)
        for window in model.windows:
            part = slice(*window)
            usage[part] = np.maximum(usage[part], model.usage(point, window))
        return usage
