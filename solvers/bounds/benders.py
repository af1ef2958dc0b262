"""Benders decomposition: one small model of what is kept and recomputed, cut by many finer models.

No single window model sees where all recomputations of a tight schedule need their memory: with
many stages it is too large to be solved with integers, and its linear relaxation splits
recomputations over the stages (`window`). So only the *coarse* model, with the backward as one
window, has integers, and each *finer* model is a linear program that shares two groups of columns
with it:

    S[f, i]  value i is kept over the forward's end f
    R[w, j]  operator j is recomputed in the backward w at least once

At a point x of these, the finer model's duals bound the cost from below by an affine function of x,
valid for all 0 <= x <= 1 (`safe_bound`, with safe rounding). Where the finer model is infeasible at
x, its dual ray gives an affine function that must not be positive. Such a *cut* is a row of the
coarse model. All finer models are relaxations of the same schedules, so every cut holds for every
schedule, and so does the bound of the coarse model with any cuts.

1. Relaxed: solve the coarse model; cut at a point between its own and the mean of those before
   (which converges faster; Ben-Ameur and Neto, "Acceleration of cutting-plane and column generation
   algorithms", 2007), then at its own; repeat until the bound hardly rises.
2. With integers: solve the coarse model to a share of the gap, cut at its point, repeat. If no
   finer model cuts the point off, further ones are generated: with pairs of the stages that cut
   most, then with stages of neighbouring operators.

Memory rows of all models get rounding cuts (`rounding_cuts`). They tell the finer models, which
have no integers, that values are held as a whole. Few finer models are active at one budget; those
whose cuts are not tight for a while are solved less often.

At first, each finer model has one stage of one operator, and these are spread evenly over the
backward; one more has a few even stages (`dyadic_windows`). A known schedule's cost bounds the
column e, the cost of a schedule beyond the first recomputation of each operator.

The bound is better than refinement's where memory is short at many places far apart, and weaker
where several stages are needed at once in one finer model. The relaxation shows early which case it
is.
Complexity: the coarse model has some five columns per forward operator; each cut is a linear
program of about four times as many. Source: Benders, "Partitioning procedures for solving
mixed-variables programming problems", 1962; the models are this package's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

import numpy as np

from remat.core.graph import Graph
from remat.solvers.bounds.dyadic_windows import MOST_FORWARD, even_stages
from remat.solvers.bounds.lazy_rows import MOST_NODES, LazyRows
from remat.solvers.bounds.stages import Stages
from remat.solvers.bounds.window import Window, WindowModel
from remat.solvers.core.accounting import Floats, Ints
from remat.solvers.core.incumbent import Search
from remat.solvers.core.interrupt import is_past
from remat.solvers.core.on_demand import forward_length, steps_on_demand
from remat.solvers.lp.linear import Program
from remat.solvers.lp.safe_bound import Support

# Measured together, not one by one, on published graphs (U-Net at 8 GB, ResNet-50 at 5 GB). The
# tolerances `_VIOLATION`, `_SLACK` and `_TIGHT` were not tuned.
_SPREAD = 50  # finer models with one stage of one operator, to begin with
_MOST_COLUMNS = 9_000  # of a finer model
_LEAST_STAGES = 4  # of the finer model with even stages
# least violation of a cut: of the objective (1e-6 of the cost of keeping everything), or of a ray's
# largest coefficient
_VIOLATION = 1e-3
_SLACK = 1e-9  # share of a cut's coefficients, which are rounded once when they are scaled
# the relaxed rounds end when the last five together close less than this share of the gap
_ROUNDS, _GAIN = 5, 0.03
# share of the gap by which the relaxation may be below a known bound before it has cuts
_BEHIND_AT_FIRST = 1.0
_BEHIND = 0.3  # the same, with cuts; integers can make up for as much
_ROUNDINGS = 3  # rounds of rounding cuts each time a program is solved
# a finer model without a tight cut at more than four points in a row is solved at every fourth
_IDLE = 4
_REST = 5  # rounds that a finer model is skipped after it gave no cut
_SHARE = 0.25  # share of the gap to which the coarse model is solved
_LEAST_SHARE = 0.02  # the same, where no finer model cuts any more
_TIGHT = 1e-6  # of a cut's largest coefficient
_NEW = 12  # finer models generated at a point that no finer model cuts off
_PAIRED = 5  # number of stages, those that cut most, whose pairs are tried


class _Finer:
    """A window model whose relaxation is solved with the columns of the coarse model fixed."""

    def __init__(
        self,
        graph: Graph,
        stages: Sequence[Window],
        windows: Collection[Window],
        *,
        budget_bytes: int,
    ) -> None:
        first, end = stages[0][0], stages[-1][1]
        model = WindowModel(
            graph,
            sorted({(0, first), (first, end), *windows, *stages}),
            priced=[(0, first), *stages],
            budget_bytes=budget_bytes,
        )
        model.program.starts_from_last = True

        self.lazy, self.program = LazyRows(model, most_roundings=_ROUNDINGS), model.program
        self.shared = _shared(model, first, end)
        self.cuts = 0
        self.rests = 0
        self.idle = 0  # points of the relaxation in a row at which none of its cuts is tight

    def cut(self, point: Floats, deadline: float) -> Support | None:
        """Returns the cut at `point`; None where time ran out."""
        self.program.fix(self.shared, point)
        outcome = self.lazy.solve(deadline=deadline, is_relaxed=True)
        return self.program.support(self.shared) if outcome.is_finished else None


def _shared(model: WindowModel, first: int, end: int) -> Ints:
    """Returns the columns that all models share: S at the forward's end, R of the backward."""
    kept, again = model.keep[first], model.again[first, end]
    return np.concatenate([kept[kept >= 0], again[again >= 0]])


def _add(program: Program, row: Floats, upper: float) -> None:
    """Adds the row `row @ x <= upper`, given by the coefficients of all columns."""
    columns = np.flatnonzero(row)
    program.add_row(columns, row[columns], upper=upper)


class Benders:
    """The coarse model of a graph, and the finer models that cut it.

    Attributes:
        best_s: the best lower bound so far on all schedules of the fixed order; -inf at first.
        is_over: True where there is nothing to bound, no finer model cuts any more, or the bound is
            too far below the known one.
    """

    def __init__(self, graph: Graph, *, budget_bytes: int, cost_s: float) -> None:
        """Builds the models; nothing is solved yet.

        Args:
            graph: any graph.
            budget_bytes: resident bytes included.
            cost_s: of a known schedule.
        """
        self.graph, self.budget_bytes, self._known_s = graph, budget_bytes, cost_s
        self.first, self.end = forward_length(graph), graph.num_operators
        self.best_s = -math.inf
        self.is_over = not 0 < self.first <= MOST_FORWARD or self.end - self.first < 2
        self._is_relaxed, self._share = True, _SHARE
        self._finer: dict[tuple[int, ...], _Finer] = {}
        if not self.is_over:
            self._build()

    def _build(self) -> None:
        self._rows: set[tuple[Window, int]] = set()
        # coefficients of all columns of the coarse model, upper side
        self._cuts: list[tuple[Floats, float]] = []
        self._makers: list[_Finer] = []  # the finer model of each cut
        # cuts that the model with integers has because its points violated them
        self._tight: set[int] = set()

        self._coarse = self._coarse_model()
        self._coarse.model.program.starts_from_last = True

        spacing = max(1, -(-(self.end - self.first) // _SPREAD))
        for v in range(self.first, self.end, spacing):
            self._add_finer((v,))
        self._add_even()

    def _coarse_model(self) -> LazyRows:
        """Returns the coarse model without cuts; its last column is e."""
        forward, backward = (0, self.first), (self.first, self.end)
        model = WindowModel(
            self.graph,
            [forward, backward],
            priced=[forward, backward],
            budget_bytes=self.budget_bytes,
        )

        lazy = LazyRows(model, self._rows, most_roundings=_ROUNDINGS)
        self._shared = _shared(model, self.first, self.end)

        most = max(model.objective(self._known_s), _VIOLATION)
        # e, as a share of its upper bound
        model.program.add_columns(np.array([most]), is_integer=False)
        self._paid = model.program.costs
        return lazy

    def _add_finer(self, operators: tuple[int, ...]) -> _Finer | None:
        """Adds the finer model with these operators as stages and all unions as windows.

        None where it exists already or is too large.
        """
        boundaries = Stages(self.first, self.end, frozenset(operators)).boundaries
        stages = list(pairwise(boundaries))
        windows = [(a, b) for i, a in enumerate(boundaries) for b in boundaries[i + 1 :]]
        if operators in self._finer or self._columns_of(windows) > _MOST_COLUMNS:
            return None
        self._finer[operators] = _Finer(self.graph, stages, windows, budget_bytes=self.budget_bytes)
        return self._finer[operators]

    def _columns_of(self, windows: Collection[Window]) -> int:
        """Returns the approximate number of columns of a model with these windows."""
        return 2 * self.first * len(windows)

    def _add_even(self) -> None:
        """Adds the finer model with as many even stages as its size allows."""
        length = 1
        while length * _LEAST_STAGES <= self.end - self.first:
            stages, windows = even_stages(self.first, self.end, length)
            if self._columns_of(windows) <= _MOST_COLUMNS:
                self._finer[()] = _Finer(
                    self.graph, stages, windows, budget_bytes=self.budget_bytes
                )
                return

            length *= 2

    def solve(
        self, *, deadline: float, cutoff_s: float, known_s: float = -math.inf
    ) -> list[int] | None:
        """Raises `best_s`; returns the schedule of the coarse model's point, if it has one.

        The first call solves the relaxation with all its cuts, each later call the coarse model
        with integers once. The schedule may exceed the budget.

        Args:
            deadline: in `time.perf_counter` seconds.
            cutoff_s: only cheaper points count.
            known_s: a known bound; the method gives up where the relaxation stays so far below it
                that integers will not make up for it.
        """
        model, before_s = self._coarse.model, self.best_s
        cutoff = model.objective(cutoff_s)
        known = max(model.objective(known_s), 0.0)

        point = (
            self._relax(deadline, cutoff, known)
            if self._is_relaxed
            else self._branch(deadline, cutoff)
        )

        self._is_relaxed = False
        self.is_over |= point is None and self.best_s <= before_s
        return (
            None
            if point is None
            else steps_on_demand(self.graph, model.kept(point)[self.first].tolist())
        )

    def _relax(self, deadline: float, cutoff: float, known: float) -> Floats | None:
        """Cuts the relaxation until its bound hardly rises; returns its last point."""
        gap = max(self._coarse.model.objective(self._known_s) - known, 0.0)
        mean, bounds, point = np.zeros(0), [-math.inf] * _ROUNDS, None

        while not is_past(deadline):
            outcome = self._coarse.solve(deadline=deadline, is_relaxed=True)
            self._raise(outcome.bound)
            if outcome.point is None or not (outcome.is_finished and outcome.bound > -math.inf):
                break

            point = outcome.point
            if not len(mean) and outcome.bound < known - _BEHIND_AT_FIRST * gap:
                self.is_over = True
                break

            own = self._at(point)
            mean = own if not len(mean) else (mean + own) / 2
            bounds.append(outcome.bound)
            self._note_idle(point)

            is_cut, _ = self._cut(point, [(mean + own) / 2, own], deadline)
            gained = bounds[-1] - bounds[-1 - _ROUNDS]
            self.is_over |= bounds[-1] + gained < known - _BEHIND * gap
            if self.is_over or not is_cut or gained < _GAIN * (cutoff - bounds[-1]):
                break
        return point

    def _note_idle(self, point: Floats) -> None:
        """Counts for how many points in a row each finer model has had no tight cut."""
        tight = {id(self._makers[k]) for k in self._cuts_at(point, -_TIGHT)}
        for finer in self._finer.values():
            finer.idle = 0 if id(finer) in tight else finer.idle + 1

    def _branch(self, deadline: float, cutoff: float) -> Floats | None:
        """Solves the coarse model with integers, cuts at its point, and returns the point.

        The model has the cuts that are tight in the relaxation, a small part of all, and those that
        its earlier points violated.
        """
        relaxed = self._coarse.solve(deadline=deadline, is_relaxed=True)
        self._raise(relaxed.bound)
        if relaxed.point is None or not relaxed.is_finished:
            return None

        self._rows |= self._coarse.rows
        lazy = self._coarse_model()
        for k in sorted(self._tight | self._cuts_at(relaxed.point, -_TIGHT)):
            _add(lazy.model.program, *self._cuts[k])

        gap = (
            self._share
            * max(cutoff - lazy.model.objective(self.best_s), 0.0)
            / max(cutoff, _VIOLATION)
        )
        outcome = lazy.solve(
            deadline=deadline, relative_gap=gap, node_limit=MOST_NODES, cutoff=cutoff
        )
        self._rows |= lazy.rows
        self._raise(outcome.bound)

        if outcome.point is None or outcome.bound >= cutoff:
            return None
        if violated := self._cuts_at(outcome.point, _TIGHT) - self._tight:
            self._tight |= violated
            return outcome.point

        own = self._at(outcome.point).round()
        is_cut, is_refuted = self._cut(outcome.point, [own], deadline, cutoff)
        if not is_refuted:
            is_cut |= self._extend(outcome.point, own, deadline, cutoff)
        if not is_cut:
            self.is_over = self._share <= _LEAST_SHARE and outcome.is_finished
            self._share = max(self._share / 3, _LEAST_SHARE)
        return outcome.point

    def _cuts_at(self, point: Floats, least: float) -> set[int]:
        """Returns the cuts whose left side at `point` exceeds their upper side by over `least`.

        Cuts are scaled to a largest coefficient of 1. A negative `least` includes tight cuts.
        """
        return {
            k
            for k, (row, upper) in enumerate(self._cuts)
            if float(np.dot(row, point)) > upper + least
        }

    def _raise(self, bound: float) -> None:
        """Raises `best_s` to a bound on the objective, at most that of the known schedule.

        The bound is infinite where no point is below the cutoff.
        """
        model = self._coarse.model
        self.best_s = max(self.best_s, model.bound_s_of(min(bound, model.objective(self._known_s))))

    def _at(self, point: Floats) -> Floats:
        """Returns the values of the shared columns at `point`."""
        return np.clip(point[self._shared], 0.0, 1.0)

    def _cut(
        self, point: Floats, places: Sequence[Floats], deadline: float, cutoff: float = math.inf
    ) -> tuple[bool, bool]:
        """Adds each finer model's cut at the first of `places` where `point` violates the cut.

        Returns:
            Whether a cut was added; whether one proves that `point` costs at least `cutoff`.
        """
        best: float | None = None
        is_relaxed = len(places) > 1

        for finer in self._finer.values():
            if is_relaxed and (finer.rests or (finer.idle > _IDLE and finer.idle % _IDLE)):
                finer.rests = max(finer.rests - 1, 0)
                continue

            if is_past(deadline):
                break
            value = self._cut_with(finer, point, places, deadline)
            best = value if best is None or (value is not None and value > best) else best
        return best is not None, best is not None and best >= cutoff

    def _cut_with(
        self, finer: _Finer, point: Floats, places: Sequence[Floats], deadline: float
    ) -> float | None:
        """Adds a cut of one finer model.

        Returns the cut's bound at `point`; None where `point` violates none of its cuts.
        """
        own, paid = self._at(point), float(np.dot(self._paid, point))
        for place in places:
            support = finer.cut(place, deadline)
            if support is None or not math.isfinite(support.constant):
                continue

            scale = float(np.abs(support.slope).max(initial=0.0)) if support.is_ray else 1.0
            value = support.at(own)
            if value > (0.0 if support.is_ray else paid) + _VIOLATION * scale:
                self._add_cut(support)
                self._makers.append(finer)
                finer.cuts, finer.rests = finer.cuts + 1, 0
                return math.inf if support.is_ray else value

        finer.rests = _REST
        return None

    def _add_cut(self, support: Support) -> None:
        """Adds the row slope @ x - (paid cost) <= -constant; without the paid cost for a ray."""
        row = np.zeros(len(self._paid)) if support.is_ray else -self._paid
        row[self._shared] += support.slope
        slack = _SLACK * (abs(support.constant) + float(np.abs(row).sum()))
        scale = float(np.abs(row).max(initial=0.0)) or 1.0
        self._cuts.append((row / scale, (slack - support.constant) / scale))
        _add(self._coarse.model.program, *self._cuts[-1])

    def _extend(self, point: Floats, own: Floats, deadline: float, cutoff: float) -> bool:
        """Adds finer models until one proves that `point` costs at least `cutoff`.

        Returns whether any of them cuts the point off.
        """
        is_cut = False
        for operators in self._candidates()[:_NEW]:
            finer = None if is_past(deadline) else self._add_finer(operators)
            value = None if finer is None else self._cut_with(finer, point, [own], deadline)
            is_cut |= value is not None
            if value is not None and value >= cutoff:
                break
        return is_cut

    def _candidates(self) -> list[tuple[int, ...]]:
        """Returns the stages of further finer models.

        Pairs of the stages that cut most come first, then neighbours of stages.
        """
        best = sorted(
            (key for key in self._finer if len(key) == 1), key=lambda key: -self._finer[key].cuts
        )
        pairs = [tuple(sorted({*a, *b})) for k, b in enumerate(best[:_PAIRED]) for a in best[:k]]
        beside = [
            (v + d,) for (v,) in best for d in (1, -1, 2, -2) if self.first <= v + d < self.end
        ]
        return [key for key in dict.fromkeys([*pairs, *beside]) if key not in self._finer]


def raise_bound(
    search: Search, cutoff_s: Callable[[Search], float | None], *, deadline: float
) -> None:
    """Raises the bound of a search as far as the method can, and offers schedules to it.

    The schedules are those of the coarse model's points. A search without a schedule is left as it
    is.
    """
    known_s = search.cost_s
    if known_s is None:
        return

    benders = Benders(search.graph, budget_bytes=search.budget_bytes, cost_s=known_s)
    while not (search.is_over or benders.is_over or is_past(deadline)):
        steps = benders.solve(
            deadline=deadline, cutoff_s=cutoff_s(search) or known_s, known_s=search.bound_s
        )
        search.raise_bound(benders.best_s)
        if steps is not None:
            search.offer(steps)
