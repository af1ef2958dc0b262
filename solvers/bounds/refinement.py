"""Adaptive refinement: window models with ever more stages, split where their schedules fail.

Start with the backward as one stage (`window`). Build the schedule of the model's point and
simulate it.

- Where it needs too much memory right before an original operator, while values are recomputed for
  it, that operator becomes a stage of its own.
- Where it needs too much at the operators themselves, because values computed once are held from
  use to use, the backward is cut there.
- Where it fits but costs more than the model says, the operator before which most is paid becomes a
  stage, in the stage where the difference is largest.

The next model has all unions of neighbouring stages as windows and, in stages of one operator,
moments (`transient_rows`). Where that is too large, only its relaxation is solved, with rounding
cuts (`rounding_cuts`). It has the stages of earlier models as windows too, as its bound could be
below theirs otherwise. Rows found before are kept. A cut or a stage of one operator is dropped
where the linear relaxation is as good without it; if it comes back, it stays.

Every model is a relaxation, so the best of the bounds counts. A known schedule's cost is the
cutoff: where the solver proves that no point is cheaper, that schedule is optimal. Refinement ends
where the schedule is as cheap as the bound, where a model was not solved within its limits, or at
`MAX_STAGES`, beyond which models are too large for HiGHS. Complexity: O(stages^2 (V + E)) rows per
model. Source: this package's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from itertools import pairwise

import numpy as np

from remat.core.graph import Graph
from remat.solvers.bounds.failures import Failures, repeated_s
from remat.solvers.bounds.lazy_rows import LazyRows
from remat.solvers.bounds.stages import KnownRows, Stages, State, Step
from remat.solvers.bounds.window import Window, WindowModel
from remat.solvers.core.accounting import Floats
from remat.solvers.core.interrupt import is_past
from remat.solvers.core.on_demand import forward_length, steps_on_demand
from remat.solvers.lp.linear import Outcome

# with 14 to 16 stages, models took so long in a prototype that bounds got worse (published graphs)
MAX_STAGES = 12
_ROUNDINGS = 5  # rounds of rounding cuts of a relaxation (published graphs)
# columns, roughly: of the largest models with integers (not measured), and of the largest
# relaxations (traced steps)
_MAX_COLUMNS, _MAX_RELAXED_COLUMNS = 60_000, 90_000
# columns, roughly; up to so many, all unions of stages are windows; no measurement is on record
_MAX_COLUMNS_OF_UNIONS = 15_000
# relative; of the first model, which only says where to cut, and of others (published graphs)
_FIRST_GAP, _GAP = 1e-3, 1e-5
# gap as a share of the distance from the best bound to the cutoff; a model that does not reach the
# cutoff only says where to cut (traced steps)
_ROUGH_SHARE = 0.02
_TOLERANCE = 1e-9  # relative; bounds that differ by less are equal; not tuned
_FEW_COLUMNS = 1_000  # a model this small is solved at once (published graphs)
# schedules keep the values whose S exceeds the first; where that schedule fits, the second gives a
# schedule that keeps more values, to see where it fails (traced steps)
_HALF, _LITTLE = 0.5, 0.05
# an excess at an operator is cut first if it is at least this share of the worst excess before one;
# no measurement is on record
_HELD_SHARE = 0.5


class Refinement:
    """The refinement of one budget's window models.

    Attributes:
        stages: of the next model; frozen, and replaced as a whole (`adopt`).
        known: the rows of earlier models.
        state: says whether there is a next model.
        best_s: the best bound of all models so far.
    """

    def __init__(self, graph: Graph, *, budget_bytes: int) -> None:
        """Starts with the forward and the backward as one stage each; nothing is solved yet."""
        self.graph, self.budget_bytes = graph, budget_bytes
        self.first = forward_length(graph)
        self.stages = Stages(self.first, graph.num_operators)
        self.known = KnownRows()
        self.state = State.OPEN if self.stages.boundaries else State.DONE
        self.best_s = -math.inf

        # stages of earlier relaxations; without them the next one may have a weaker bound
        self._wide: set[Window] = set()
        self._dropped: set[int] = set()
        self._decided_s = -math.inf  # no point of the present model is cheaper
        self._best_relaxed = (-math.inf, self.stages)  # bound, and over which stages

    def start_from(self, other: Refinement) -> None:
        """Takes over the rows and the best relaxation's stages of another refinement of the graph.

        The other may be for another budget. Nothing is taken over where it solved no relaxation.
        """
        bound_s, stages = other._best_relaxed
        if bound_s > -math.inf:
            self.stages, self.known, self._wide = stages, other.known.copy(), set(other._wide)

    def adopt(self, stages: Stages, bound_s: float = -math.inf) -> None:
        """Replaces the stages of the next model; `bound_s` is a bound found on the way to them."""
        self.stages = stages
        self.best_s = max(self.best_s, bound_s)

    @property
    def is_open(self) -> bool:
        """True where there is a next model."""
        return self.state in (State.OPEN, State.EXACT)

    @property
    def boundaries(self) -> list[int]:
        """Boundaries of the stages, without the forward; empty where there is no next model."""
        return self._boundaries(self.stages)

    def _boundaries(self, stages: Stages) -> list[int]:
        return stages.boundaries if self.is_open else []

    def num_columns(self, stages: Stages) -> int:
        """Returns the number of columns of the model over these stages."""
        return self._model(stages, is_relaxed=False).model.program.num_columns

    @property
    def is_over(self) -> bool:
        """True where nothing is left to refine, or refining would take too long."""
        stages = len(self.boundaries) - 1
        return not self.is_open or stages > MAX_STAGES or (stages > 1 and self.is_too_large(stages))

    @property
    def may_relax(self) -> bool:
        """True where the linear relaxation over the present stages is solved in reasonable time."""
        stages = len(self.boundaries) - 1
        return (
            self.is_open
            and stages <= MAX_STAGES
            and (stages == 1 or not self.is_too_large(stages, _MAX_RELAXED_COLUMNS))
        )

    def is_too_large(self, num_stages: int, most_columns: int = _MAX_COLUMNS) -> bool:
        """True where a model of `num_stages` stages is not solved in reasonable time."""
        return 2 * self.first * (num_stages + 1) > most_columns

    def _windows(self, boundaries: list[int], *, is_relaxed: bool, is_wide: bool) -> list[Window]:
        """Returns all unions of neighbouring stages.

        For large or relaxed models: only the stages, the whole backward and, where `is_wide`, the
        stages of earlier relaxations.
        """
        stages = list(pairwise(boundaries))
        if is_relaxed or self.first * len(stages) * (len(stages) + 1) > _MAX_COLUMNS_OF_UNIONS:
            wide = {(a, b) for a, b in self._wide if is_wide and {a, b} <= {*boundaries}}
            return sorted({*stages, *wide, (boundaries[0], boundaries[-1])})
        return [(a, b) for i, a in enumerate(boundaries) for b in boundaries[i + 1 :]]

    def _model(self, stages: Stages, *, is_relaxed: bool, most_roundings: int = 0) -> LazyRows:
        """Returns the model over these stages, with the known rows of its windows."""
        forward, boundaries = (0, self.first), self._boundaries(stages)
        is_wide = is_relaxed and most_roundings > 0
        windows = [forward, *self._windows(boundaries, is_relaxed=is_relaxed, is_wide=is_wide)]

        model = WindowModel(
            self.graph,
            windows,
            priced=[forward, *pairwise(boundaries)],
            budget_bytes=self.budget_bytes,
        )
        model.program.starts_from_last = is_wide

        return LazyRows(
            model,
            self.known.of(set(windows)),
            self.known.moments,
            most_roundings=most_roundings,
        )

    def relaxation(self) -> LazyRows:
        """Returns the model over the present stages with few windows, to be solved relaxed."""
        return self._model(self.stages, is_relaxed=True)

    def steps_of(self, model: WindowModel, point: Floats, least: float) -> list[int]:
        """Returns the schedule that keeps the values whose S exceeds `least` at `point`.

        The model has the present stages.
        """
        return self._steps(self._kept(model, point, least))

    def failures(self, steps: list[int]) -> Failures:
        """Returns where `steps` exceed the budget in the backward, and what they pay there."""
        return Failures.of(self.graph, steps, budget_bytes=self.budget_bytes, first=self.first)

    def solve(
        self,
        *,
        deadline: float,
        cutoff_s: float | None = None,
        is_relaxed: bool = False,
        is_rounded: bool = True,
    ) -> Step:
        """Solves the present model and prepares the next one.

        Args:
            deadline: in `time.perf_counter` seconds.
            cutoff_s: only cheaper points count; where there are none, the stages stay as they are,
                for a larger cutoff.
            is_relaxed: solves the linear relaxation. The stages stay as they are where a limit
                stopped the solver, or where two schedules fit: the one that keeps the values whose
                S exceeds `_HALF`, and the one that keeps those whose S exceeds `_LITTLE`.
            is_rounded: adds rounding cuts to a relaxation, which takes several times as long.
        """
        stages = list(pairwise(self.boundaries))
        roundings = _ROUNDINGS if is_rounded else 0
        lazy = self._model(self.stages, is_relaxed=is_relaxed, most_roundings=roundings)
        model = lazy.model
        cutoff = None if cutoff_s is None else model.objective(cutoff_s)
        gap = self._gap(len(stages), cutoff, model.objective(self.best_s))
        outcome = lazy.solve(
            deadline=deadline, relative_gap=gap, cutoff=cutoff, is_relaxed=is_relaxed
        )

        bound_s = model.bound_s(outcome)
        self._learn(lazy, stages, bound_s, is_relaxed=is_relaxed)
        if cutoff is not None and outcome.bound >= cutoff and not is_relaxed:
            self.state = self.state if bound_s > self._decided_s else State.DONE
            self._decided_s = bound_s
            return Step(bound_s, None, True)

        steps, kept = None, dict[int, list[int]]()
        if outcome.point is not None:
            kept = self._kept(model, outcome.point, _HALF)
            steps = self._steps(kept)
            if is_relaxed:
                self._cut_relaxation(model, outcome.point, steps, is_single=is_rounded)
            else:
                self._cut_model(model, outcome.point, steps, deadline)

        if not is_relaxed:
            self._close(outcome, gap, len(stages), deadline)
        return Step(bound_s, steps, outcome.is_finished, kept)

    def _learn(
        self, lazy: LazyRows, stages: list[Window], bound_s: float, *, is_relaxed: bool
    ) -> None:
        """Keeps what a solved model found: its rows, its bound, and a relaxation's stages."""
        self.known.take(lazy)
        self.best_s = max(self.best_s, bound_s)
        if is_relaxed:
            self._wide.update(stages)
            if bound_s > self._best_relaxed[0]:
                self._best_relaxed = bound_s, self.stages

    def _cut_relaxation(
        self, model: WindowModel, point: Floats, steps: list[int], *, is_single: bool
    ) -> None:
        """Cuts where the relaxation's schedule fails, else where one that keeps more fails."""
        boundaries = self.boundaries
        self._cut(steps, boundaries, None, is_single=is_single)
        if self.boundaries == boundaries:
            more = self.steps_of(model, point, _LITTLE)
            self._cut(more, boundaries, None, is_single=is_single)

    def _cut_model(
        self, model: WindowModel, point: Floats, steps: list[int], deadline: float
    ) -> None:
        """Cuts where the schedule of a model with integers fails, and drops what is of no use."""
        boundaries, before = self.boundaries, self.stages.singles | self.stages.cuts
        cost_s = self.graph.arrays.cost_s
        paid_s = [
            float(np.dot(cost_s, model.values_at(model.again[stage], point)))
            for stage in pairwise(boundaries)
        ]
        self.state = State.OPEN
        self._cut(steps, boundaries, paid_s, is_single=False)
        self._drop_useless(before, deadline)

    def _close(self, outcome: Outcome, gap: float, num_stages: int, deadline: float) -> None:
        """Decides whether there is a next model, after one with integers solved up to `gap`."""
        has_point = outcome.point is not None
        # the schedule costs what the model says; with a smaller gap the model may say more
        if has_point and self.state is State.DONE and gap > _GAP and outcome.is_finished:
            self.state = State.EXACT
        if not has_point or not (outcome.is_finished or num_stages == 1):
            self.state = State.CUT_SHORT if is_past(deadline) else State.DONE

    @staticmethod
    def _kept(model: WindowModel, point: Floats, least: float) -> dict[int, list[int]]:
        """Returns the values whose S exceeds `least` at `point`, by boundary."""
        return {boundary: values.tolist() for boundary, values in model.kept(point, least).items()}

    def _steps(self, kept: Mapping[int, Sequence[int]]) -> list[int]:
        """Returns the schedule that keeps these values at the present boundaries."""
        return steps_on_demand(
            self.graph, kept[self.first], later={b: kept[b] for b in self.boundaries[1:-1]}
        )

    def resume(self) -> None:
        """Reopens a refinement that only a deadline ended."""
        if self.state is State.CUT_SHORT:
            self.state = State.OPEN

    def return_to_best_relaxed(self) -> None:
        """Goes back to the stages whose linear relaxation gave the best bound.

        A relaxation over more stages can have a weaker bound.
        """
        if self._best_relaxed[0] > -math.inf:
            self.stages = self._best_relaxed[1]

    def _gap(self, num_stages: int, cutoff: float | None, best: float) -> float:
        """Returns the relative gap at which the solver may stop.

        A model that does not reach the cutoff need not be solved to the end.
        """
        if self.state is State.EXACT:
            return _GAP
        rough = (
            _ROUGH_SHARE * (cutoff - best) / cutoff
            if cutoff is not None and cutoff > max(best, 0)
            else 0.0
        )
        return max(_FIRST_GAP if num_stages == 1 else _GAP, min(rough, _ROUGH_SHARE))

    def _drop_useless(self, candidates: Set[int], deadline: float) -> None:
        """Drops cuts and singles without which the linear relaxation is as good, once each.

        Models with fewer stages are solved sooner.
        """
        if not self.is_open or self.num_columns(self.stages) <= _FEW_COLUMNS:
            return

        needed = self.relaxed_bound(deadline) * (1 - _TOLERANCE)
        if needed < 0:  # no time to compare
            return

        for is_single in (False, True):
            chosen = self.stages.singles if is_single else self.stages.cuts
            for item in sorted((chosen & candidates) - self._dropped):
                fewer = self.stages.without(item, is_single=is_single)
                if self.relaxed_bound(deadline, fewer) >= needed:
                    self.stages = fewer
                    self._dropped.add(item)

    def relaxed_bound(self, deadline: float, stages: Stages | None = None) -> float:
        """Returns the bound of the linear relaxation over stages, and keeps its rows.

        The stages are the present ones if not given, and stay. -inf where time ran out.
        """
        lazy = self._model(self.stages if stages is None else stages, is_relaxed=False)
        outcome = lazy.solve(deadline=deadline, is_relaxed=True)
        self.known.take(lazy)
        return lazy.model.bound_s(outcome) if outcome.is_finished else -math.inf

    def _cut(
        self,
        steps: list[int],
        boundaries: list[int],
        paid_s: list[float] | None,
        *,
        is_single: bool,
    ) -> None:
        """Splits stages where `steps` fail most; ends the refinement where no split is left.

        `paid_s` is what the model pays in each stage; without it, only memory over the budget
        counts as failing. With `is_single`, an operator over the budget becomes a stage instead of
        a cut, as rounding cuts are stronger on both sides of it.
        """
        failures = self.failures(steps)
        single, cut = failures.worst_single(boundaries), failures.worst_cut(boundaries)
        if cut >= 0 and failures.at[cut] >= _HELD_SHARE * failures.before.get(single, 0.0):
            stages = self.stages
            self.stages = stages.with_single(cut) if is_single else stages.with_cut(cut)
            return

        if paid_s is None and single < 0:
            return
        if paid_s is not None and not failures.worst:
            surplus = failures.surplus(boundaries, paid_s)
            single = max(surplus, key=lambda v: surplus[v], default=-1)

        if single < 0:
            self.state = State.DONE
        else:
            self.stages = self.stages.with_single(single)

    def cut_where_repeated(self, steps: list[int], boundaries: Sequence[int]) -> None:
        """Makes a stage of the operator before which `steps` pay most for repeated recomputations.

        A recomputation is repeated where the same stage recomputed its operator before; a window
        counts each operator once. Without any, the stages stay as the last model chose them.

        Args:
            steps: a schedule within the budget.
            boundaries: of the last model's stages.
        """
        known = {*boundaries}
        paid_s = repeated_s(self.graph, steps, known)
        inside = [v for v in paid_s if v >= self.first and not {v, v + 1} <= known]
        worst = max(inside, key=lambda v: (paid_s[v], v), default=-1)
        if worst >= 0 and paid_s[worst] > 0:
            self.stages = self.stages.within(known).with_single(worst)
