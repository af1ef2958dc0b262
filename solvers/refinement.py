"""Adaptive refinement: window models with ever more stages, each a bound, cut where the schedules built from them fail.

Start with the backward as one stage (`window`). Build the schedule of the model's point and simulate it. Where it needs
too much memory, make the original operator before which it overflows most a stage of its own; where it fits but costs
more than the model says, the one before which it pays most beyond it. The next model has all unions of neighbouring
stages as windows and, in stages of one operator, moment rows (`moments`). Memory rows found before are kept.

Every model is a relaxation, so the best of the bounds counts. A known schedule's cost cuts the search off: where the
solver proves that no point is cheaper, that schedule is optimal. Ends where the schedule is as cheap as the bound, where
a model was not solved within its limits, or at `MAX_STAGES`, beyond which HiGHS drowns.
Complexity: O(stages^2 (V + E)) rows a model. Source: this package's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..graph import Graph
from ..schedule import Schedule, simulate
from .lazy_rows import LazyRows
from .on_demand import forward_length, steps_on_demand
from .window import Window, WindowModel

MAX_STAGES = 12
_MAX_COLUMNS = 40_000
_FIRST_GAP = 1e-3  # of the first model, which only says where to cut
_GAP = 1e-5
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Step:
    """What one model gave.

    Attributes:
        bound_s: no schedule of the fixed order costs less; `inf` where the model has no point below the cutoff.
        steps: the schedule of its point, within the budget or not; None where it left none.
        is_finished: False where a limit stopped the solver.
    """

    bound_s: float
    steps: list[int] | None
    is_finished: bool


class Refinement:
    """The stages so far, and the rows that bound in earlier models."""

    def __init__(self, graph: Graph, *, budget_bytes: int) -> None:
        """Starts with the forward and the backward as one stage each; nothing is solved yet."""
        self.graph, self.budget_bytes = graph, budget_bytes
        self.first = forward_length(graph)
        self.boundaries = [self.first, graph.num_operators] if 0 < self.first < graph.num_operators else []
        self.rows: set[tuple[Window, int]] = set()

    @property
    def is_over(self) -> bool:
        """True where there is nothing to refine, or not in reasonable time."""
        stages = len(self.boundaries) - 1
        columns = stages * (stages + 1) // 2 * 2 * self.first
        return not self.boundaries or stages > MAX_STAGES or (stages > 1 and columns > _MAX_COLUMNS)

    def solve(self, *, deadline: float, cutoff_s: float | None = None) -> Step:
        """Solves the present model and prepares the next one.

        Args:
            deadline: of `time.perf_counter`, in seconds.
            cutoff_s: cost of a known schedule; points that are not cheaper are of no interest.
        """
        stages = list(pairwise(self.boundaries))
        windows = [(a, b) for i, a in enumerate(self.boundaries) for b in self.boundaries[i + 1 :]]
        forward = (0, self.first)
        model = WindowModel(self.graph, [forward, *windows], priced=[forward, *stages], budget_bytes=self.budget_bytes)
        lazy = LazyRows(model, self.rows)
        gap = _FIRST_GAP if len(stages) == 1 else _GAP
        outcome = lazy.solve(deadline=deadline, relative_gap=gap, cutoff=None if cutoff_s is None else model.objective(cutoff_s))
        self.rows = lazy.rows
        steps, bound_s = None, model.bound_s(outcome)
        if outcome.point is not None:
            kept = {boundary: values.tolist() for boundary, values in model.kept(outcome.point).items()}
            steps = steps_on_demand(self.graph, kept[self.first], later={b: kept[b] for b in self.boundaries[1:-1]})
            paid = [float(np.dot(self.graph.arrays.cost_s, model.values_at(model.again[stage], outcome.point))) for stage in stages]
            self._cut(steps, paid)
        if outcome.point is None or not (outcome.is_finished or len(stages) == 1):
            self.boundaries = []
        return Step(bound_s, steps, outcome.is_finished)

    def _cut(self, steps: list[int], paid_s: list[float]) -> None:
        """Makes the operator where `steps` fail most a stage; ends where they don't, or no cut is left."""
        excess, extra_s = self._failures(steps)
        splittable = [v for v in excess if not self._is_single(v)]
        worst = max(splittable, key=lambda v: excess[v], default=-1)
        if not excess:
            surplus = {}
            for (a, b), paid in zip(pairwise(self.boundaries), paid_s, strict=True):
                inside = {v: cost for v, cost in extra_s.items() if a <= v < b}
                if inside and b > a + 1 and sum(inside.values()) > paid + _TOLERANCE * self.graph.cost_s:
                    surplus[max(inside, key=lambda v: inside[v])] = sum(inside.values()) - paid
            worst = max(surplus, key=lambda v: surplus[v], default=-1)
        if worst < 0:
            self.boundaries = []
        else:
            self.boundaries = sorted({*self.boundaries, worst, worst + 1})

    def _is_single(self, v: int) -> bool:
        return v in self.boundaries and v + 1 in self.boundaries

    def _failures(self, steps: list[int]) -> tuple[dict[int, float], dict[int, float]]:
        """Returns bytes over the budget, and cost of recomputations, by the original operator of the backward they lead to."""
        held = simulate(self.graph, Schedule.from_steps(self.graph, steps)).bytes_at
        excess: dict[int, float] = {}
        extra_s: dict[int, float] = {}
        seen: set[int] = set()
        over, cost_s = 0.0, 0.0
        for position, op in enumerate(steps):
            over = max(over, float(held[position]) - self.budget_bytes)
            if op in seen:
                cost_s += self.graph.operators[op].cost_s
                continue
            seen.add(op)
            if op >= self.first:
                if over > 0:
                    excess[op] = over
                if cost_s > 0:
                    extra_s[op] = cost_s
            over, cost_s = 0.0, 0.0
        return excess, extra_s
