"""Techniques that raise the bound: prices, relaxations, window models, stages, Benders.

Every bound holds for all schedules of the fixed order. Node limits end models before time limits
do, so with one thread a seed gives one answer.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass
from typing import ClassVar, final

from remat.core.schedule import keep_all_peak
from remat.solvers.auto.minimum import peak_bound
from remat.solvers.auto.starting import evict, offer_with_margins
from remat.solvers.auto.technique import VERY_WIDE_GAP, WIDE_GAP, Solve, Technique
from remat.solvers.bounds.benders import raise_bound
from remat.solvers.bounds.dyadic_windows import MOST_FORWARD
from remat.solvers.bounds.lagrangian import HOPELESS, Lagrangian
from remat.solvers.bounds.stage_selection import scout, scout_crowded
from remat.solvers.core.incumbent import Search
from remat.solvers.core.interrupt import is_past
from remat.solvers.search.greedy_eviction import is_compiled

# seconds for each window model before there is a good schedule (published graphs)
_FIRST_MODELS_LIMIT_S = 12.0
# of the cost, as `Auto.gap`; even for a smaller gap, models aim at this first: that there is no
# point below a cutoff is proved sooner than which point is best (published graphs)
_USUAL_GAP = 0.005
# share of the keep-all cost; more than the 1e-6 that bounds lose to tolerances (`window`)
_CUTOFF_MARGIN = 2e-6


def cutoff_s(solve: Solve) -> float | None:
    """Returns the bound that would close the gap (at first 0.5 %); None without a schedule.

    A model proves that it has no point below this cutoff faster than it finds its best point.
    """
    search = solve.search
    if search.cost_s is None:
        return None

    is_near = search.cost_s - search.bound_s <= _USUAL_GAP * search.cost_s
    gap = solve.gap if is_near else max(solve.gap, _USUAL_GAP)
    return min(search.cost_s, search.cost_s * (1 - gap) + _CUTOFF_MARGIN * solve.graph.cost_s)


def refine(solve: Solve, *, deadline: float = math.inf, is_relaxed: bool = False) -> None:
    """Solves the next window model: raises the bound and offers its schedule.

    Args:
        solve: its refinement has the present stages.
        deadline: in `time.perf_counter` seconds; by default that of a first model.
        is_relaxed: solves only the linear relaxation.
    """
    search, refinement = solve.search, solve.refinement
    if search.is_over or (not refinement.may_relax if is_relaxed else refinement.is_over):
        return

    first_s = min(_FIRST_MODELS_LIMIT_S, search.left_s / 2)
    deadline = deadline if deadline < math.inf else time.perf_counter() + first_s
    is_rounded = solve.has("rounding-cuts") and (not is_relaxed or search.is_within(VERY_WIDE_GAP))
    step = refinement.solve(
        deadline=deadline, cutoff_s=cutoff_s(solve), is_relaxed=is_relaxed, is_rounded=is_rounded
    )

    if step.bound_s == math.inf:
        refute(search)
        return
    search.raise_bound(step.bound_s)
    if step.steps is not None and not search.offer(step.steps) and solve.is_large and is_compiled():
        with search.by("eviction"):
            evict(search, step.kept)  # on small graphs, search finds better schedules


def refute(search: Search) -> None:
    """Tries to prove that no schedule fits, in half of the time left."""
    keep_all = keep_all_peak(search.graph)
    least = peak_bound(search.graph, keep_all, time_limit_s=search.left_s / 2, is_relaxed=False)
    if least > search.budget_bytes:
        search.refute()


@final
@dataclass(frozen=True, kw_only=True)
class Prices(Technique):
    """Prices for memory: a bound and schedules in near-linear time (`lagrangian`).

    Attributes:
        share: of the time left (tuned on traced steps).
    """

    name: ClassVar[str] = "prices"

    share: float = 0.4

    def applies(self, solve: Solve) -> bool:
        """True on large graphs."""
        return solve.is_large

    def run(self, solve: Solve) -> None:
        """Raises the bound, then offers spliced schedules."""
        search = solve.search
        lagrangian = Lagrangian(solve.graph, budget_bytes=search.budget_bytes)
        deadline = time.perf_counter() + search.left_s * self.share
        search.raise_bound(lagrangian.raise_bound(deadline=deadline))

        if search.bound_s > HOPELESS * solve.graph.cost_s:
            refute(search)
        if search.is_infeasible:
            return

        for steps in lagrangian.schedules(deadline=deadline):
            search.offer(steps)
            if search.is_over:
                return


@final
@dataclass(frozen=True, kw_only=True)
class Relaxations(Technique):
    """Refined linear relaxations of large graphs, while schedules don't fit or the gap is wide.

    Tuned on traced steps.

    Attributes:
        most, most_if_wide: limit on the relaxations, in general and while the gap is very wide.
        fruitless_work: ends once the number of relaxations in a row without a better bound, times
            the number of operators, reaches this.
        share: of the time left, for each relaxation.
        crowded_share: of the time left, for stages around the operators that leave least room.
    """

    name: ClassVar[str] = "relaxations"

    most: int = 12
    most_if_wide: int = 6
    fruitless_work: int = 3_500
    share: float = 0.7
    crowded_share: float = 0.4

    def applies(self, solve: Solve) -> bool:
        """True on large graphs."""
        return solve.is_large

    def run(self, solve: Solve) -> None:
        """Raises the bound and offers schedules until relaxations improve neither."""
        search, refinement = solve.search, solve.refinement
        fruitless, crowded_s = 0, -math.inf

        for count in range(self.most):
            stages, best_s = refinement.boundaries, refinement.best_s
            if solve.has("margins") and not search.is_within(WIDE_GAP):
                with search.by("margins"):  # in a narrower gap annealing finds better schedules
                    offer_with_margins(search, refinement)

            deadline = time.perf_counter() + self.share * search.left_s
            refine(solve, deadline=deadline, is_relaxed=True)
            if search.is_infeasible:
                return

            if count == 0:
                crowded_s = self._crowded_s(solve)
            fruitless = 0 if refinement.best_s > best_s else fruitless + 1
            work = fruitless * solve.graph.num_operators
            is_last = fruitless > 0 and (
                refinement.best_s == crowded_s or work >= self.fruitless_work
            )
            is_wide = not search.is_within(VERY_WIDE_GAP)

            if count > 0 and search.steps is not None and not is_wide:
                refinement.cut_where_repeated(search.steps, stages)
            has_ended = search.is_over or refinement.boundaries == stages or is_last
            if has_ended or (is_wide and count + 1 == self.most_if_wide):
                break

        refinement.return_to_best_relaxed()

    def _crowded_s(self, solve: Solve) -> float:
        """Returns the bound from stages around the operators that leave least room.

        -inf where they are not tried.
        """
        search = solve.search
        if search.is_over or search.is_within(_USUAL_GAP) or not solve.has("stage-selection"):
            return -math.inf

        deadline = time.perf_counter() + self.crowded_share * search.left_s
        bound_s = scout_crowded(solve.refinement, deadline=deadline)
        if bound_s < math.inf:  # an infinite one is left to the next model and `refute`
            with search.by("stage-selection"):
                search.raise_bound(bound_s)
        return bound_s


@final
@dataclass(frozen=True, kw_only=True)
class FirstModel(Technique):
    """The window model over the forward and the backward, solved as a MILP."""

    name: ClassVar[str] = "window"

    def applies(self, solve: Solve) -> bool:
        """True where the backward is still one stage."""
        return len(solve.refinement.boundaries) == 2

    def run(self, solve: Solve) -> None:
        """Raises the bound and offers the schedule built from the model's point."""
        refine(solve)


def has_short_forward(solve: Solve) -> bool:
    """True on graphs whose forward is so short that there is time for many small models."""
    return solve.refinement.first <= MOST_FORWARD


@final
@dataclass(frozen=True, kw_only=True)
class StageSelection(Technique):
    """Stages chosen by the bound that they give (`stage_selection`), where the gap is wide.

    Attributes:
        share: of the time for bounds (tuned on traced steps).
    """

    name: ClassVar[str] = "stage-selection"

    share: float = 0.4

    def applies(self, solve: Solve) -> bool:
        """True where the gap is wide."""
        return not solve.search.is_within(WIDE_GAP)

    def run(self, solve: Solve) -> None:
        """Raises the bound, and leaves the stages to the models that follow."""
        bound_s = scout(solve.refinement, deadline=solve.span.at(self.share))
        # an infinite bound is left to the models that follow and `refute`
        if bound_s < math.inf:
            solve.search.raise_bound(bound_s)


@final
@dataclass(frozen=True, kw_only=True)
class Refinements(Technique):
    """Window models with ever more stages, until the gap is closed.

    Tuned on published graphs, except for the number of models, which was not measured.

    Attributes:
        gives_way: stops for Benders decomposition once the gap is narrow and its share is over.
        narrow_gap: as a fraction of the cost; `Decomposition` begins at the same one.
        share, most_s: it gives way after this share of the time for bounds, or after this many
            seconds if that is earlier.
        most_of_a_model_s: time limit of one model in a narrow gap, in seconds.
        models_without_clock: models after which it gives way in single-threaded solves.
    """

    name: ClassVar[str] = "refinement"

    gives_way: bool = False
    narrow_gap: float = 0.02
    share: float = 0.25
    most_s: float = 15.0
    most_of_a_model_s: float = 30.0
    models_without_clock: int = 5

    def run(self, solve: Solve) -> None:
        """Raises the bound and offers the schedule of each model."""
        search, refinement, span = solve.search, solve.refinement, solve.span
        took_s, model_s = 0.0, self._model_s(solve)
        for count in itertools.count():
            is_narrow = self.gives_way and search.is_within(self.narrow_gap)
            if is_narrow and self._is_late(solve, count, took_s):
                break
            if search.is_over or refinement.is_over or is_past(span.at(1.0)):
                break

            before = time.perf_counter()
            refine(solve, deadline=span.begin_s + (model_s if is_narrow else span.seconds))
            took_s = time.perf_counter() - before

        if self.gives_way:
            refinement.resume()

    def _model_s(self, solve: Solve) -> float:
        half_s = solve.span.seconds / 2
        return min(half_s, self.most_of_a_model_s) if solve.by_clock else half_s

    def _is_late(self, solve: Solve, count: int, took_s: float) -> bool:
        """True where the next model, taking as long as the last, would end after the share."""
        if not solve.by_clock:
            return count >= self.models_without_clock
        enough_s = min(self.share * solve.span.seconds, self.most_s)
        return is_past(solve.span.begin_s + enough_s - took_s)


@final
@dataclass(frozen=True, kw_only=True)
class Decomposition(Technique):
    """Benders decomposition: many small models at once (`benders`), where the gap is narrow.

    Attributes:
        narrow_gap: as a fraction of the cost (tuned on published graphs).
    """

    name: ClassVar[str] = "benders"

    narrow_gap: float = 0.02

    def applies(self, solve: Solve) -> bool:
        """True on graphs with a short forward, in a narrow gap."""
        return has_short_forward(solve) and solve.search.is_within(self.narrow_gap)

    def run(self, solve: Solve) -> None:
        """Raises the bound as far as it can."""
        raise_bound(solve.search, lambda _: cutoff_s(solve), deadline=solve.span.at(1.0))


BOUNDING: tuple[Technique, ...] = (
    StageSelection(),
    Refinements(gives_way=True, when=has_short_forward),
    Decomposition(),
    Refinements(),
)
