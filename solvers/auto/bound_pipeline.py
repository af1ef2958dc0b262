"""Raising the bound of a search.

Relaxations while schedules are dear, then models with integers until the gap is closed.

1. On large graphs prices for memory (`lagrangian`), then relaxed refinement (`refinement`), whose
   schedules are offered, with memory in reserve where they failed (`memory_margins`) or mended by
   eviction. Where the first of these leave a gap, stages around the operators that leave least room
   (`stage_selection`) are the next, then those before which the best schedule computes again what
   it did before.
2. On small graphs, where the gap is wide, stages chosen by what they bound, and where it stays
   wide, or was very wide, a tree of leaves with stages of their own (`branch_and_refine`).
3. Refinement; on small graphs, where the gap is narrow after its first models, many small models at
   once (`benders`).

Every bound is of all schedules of the fixed order. Models are cut by nodes before time, so that
with one thread a seed gives one answer.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.solvers.auto.minimum import peak_bound
from remat.solvers.auto.starting_schedules import offer_evicted, offer_with_reserves
from remat.solvers.bounds.benders import raise_bound
from remat.solvers.bounds.branch_and_refine import MOST_LEAVES, raise_bound_by_branching
from remat.solvers.bounds.dyadic_windows import MOST_FORWARD
from remat.solvers.bounds.lagrangian import HOPELESS, Lagrangian
from remat.solvers.bounds.refinement import Refinement
from remat.solvers.bounds.stage_selection import scout, scout_crowded
from remat.solvers.core.incumbent import Search
from remat.solvers.core.interrupt import is_past

_FIRST_MODELS_LIMIT_S = 12.0  # of each window model before there is a good schedule
# where stages are chosen by what they bound, and a tree is grown
_WIDE_GAP, _VERY_WIDE_GAP = 0.02, 0.05
# where Benders decomposition is tried, once a refined model that takes as long as the last would
# not be solved before:
_NARROW_GAP = 0.02
_SHARE_BEFORE_BENDERS, _MOST_BEFORE_BENDERS_S = 0.25, 15.0  # of the time for bounds, and at most
_MOST_OF_A_MODEL_S = 30.0  # when the model that is then solved gives way; before half of the time
_MODELS_BEFORE_BENDERS = 5  # in place of the share, with one thread
_LEAST_TO_BRANCH_S = 12.0  # of the limit
# of the tree, with one thread, which then goes by them and not by the clock
_LEAVES_WITHOUT_CLOCK = 40
_SCOUTING_SHARE = 0.4  # of the time for bounds
_USUAL_GAP = 0.005
# of the cost of keeping everything: what bounds are rounded down by, and more
_CUTOFF_MARGIN = 2e-6
_LEAST_OPERATORS_TO_PRICE = 500
_MOST_RELAXATIONS, _RELAXATIONS_IF_WIDE = 12, 6  # where the gap is not very wide, and where it is
_FRUITLESS_WORK = 3_500  # operators in all relaxations in a row that bound less than those before
_RELAXATION_SHARE = 0.7  # of the time left, for each relaxation of a large graph
_PRICING_SHARE = 0.4  # of the time


def is_small(graph: Graph) -> bool:
    """True where models with integers are solved soon, and neither prices nor relaxations are
    needed first.
    """
    return graph.num_operators < _LEAST_OPERATORS_TO_PRICE


@dataclass(frozen=True)
class Bounding:
    """What raises the bound of one search.

    Attributes:
        search: whose bound is raised, and which is offered the schedules found on the way.
        refinement: of its graph and budget.
        gap: where the search ends.
        by_clock: one stage gives way to the next by the time it took; else by the number of models.
    """

    search: Search
    refinement: Refinement
    gap: float
    by_clock: bool

    def price(self) -> bool:
        """Takes bound and schedules of large graphs from prices for memory.

        False where the budget is proved infeasible.
        """
        search = self.search
        if is_small(search.graph):
            return True
        lagrangian = Lagrangian(search.graph, budget_bytes=search.budget_bytes)
        deadline = time.perf_counter() + search.left_s * _PRICING_SHARE
        search.raise_bound(lagrangian.raise_bound(deadline=deadline))
        if search.bound_s > HOPELESS * search.graph.cost_s and self._is_infeasible():
            return False
        for steps in lagrangian.schedules(deadline=deadline):
            search.offer(steps)
            if search.is_over:
                break
        return True

    def relax(self) -> bool:
        """Refines linear relaxations of large graphs while schedules don't fit or are dear.

        False where infeasibility is proved.
        """
        search, refinement = self.search, self.refinement
        if is_small(search.graph):
            return True
        fruitless, scouted_s = 0, -math.inf
        for count in range(_MOST_RELAXATIONS):
            stages, best_s = refinement.boundaries, refinement.best_s
            if not search.is_within(_WIDE_GAP):  # else annealing finds better ones
                offer_with_reserves(search, refinement)
            if not self.refine(
                deadline=time.perf_counter() + _RELAXATION_SHARE * search.left_s, is_relaxed=True
            ):
                return False
            if count == 0 and not (search.is_over or search.is_within(_USUAL_GAP)):
                scouted_s = scout_crowded(
                    refinement, deadline=time.perf_counter() + _SCOUTING_SHARE * search.left_s
                )
                if scouted_s < math.inf:  # else the next model says it, and that is looked into
                    search.raise_bound(scouted_s)
            fruitless = 0 if refinement.best_s > best_s else fruitless + 1
            is_last = fruitless > 0 and (
                refinement.best_s == scouted_s
                or fruitless * search.graph.num_operators >= _FRUITLESS_WORK
            )
            is_wide = not search.is_within(_VERY_WIDE_GAP)
            if count > 0 and search.steps is not None and not is_wide:
                refinement.cut_where_repeated(search.steps, stages)
            if (
                search.is_over
                or refinement.boundaries == stages
                or is_last
                or (is_wide and count + 1 == _RELAXATIONS_IF_WIDE)
            ):
                break
        refinement.return_to_best_relaxed()
        return True

    def refine(self, *, deadline: float = math.inf, is_relaxed: bool = False) -> bool:
        """Raises the bound and offers a schedule by the next model.

        False where the budget is proved infeasible.
        """
        search, refinement = self.search, self.refinement
        if search.is_over or (not refinement.may_relax if is_relaxed else refinement.is_over):
            return True
        first_s = min(_FIRST_MODELS_LIMIT_S, search.left_s / 2)
        deadline = deadline if deadline < math.inf else time.perf_counter() + first_s
        is_rounded = not is_relaxed or search.is_within(_VERY_WIDE_GAP)
        step = refinement.solve(
            deadline=deadline, cutoff_s=self._cutoff_s, is_relaxed=is_relaxed, is_rounded=is_rounded
        )
        if step.bound_s == math.inf:
            return not self._is_infeasible()
        search.raise_bound(step.bound_s)
        if step.steps is not None and not search.offer(step.steps) and not is_small(search.graph):
            offer_evicted(search, step.kept)  # small graphs find better ones by search
        return True

    def run(self, share: float) -> None:
        """Raises the bound until the gap is closed, nothing is left to refine, or that share of the
        time left is over.

        Where the gap is wide on a small graph, with stages chosen first (`stage_selection`), and
        where it stays wide, by a tree (`branch_and_refine`), which chooses its own where the gap is
        wider still. With a short limit, as for a point of a curve, there is no tree: it would have
        few leaves, and the stages chosen bound more by then.
        """
        search, refinement = self.search, self.refinement
        began, left_s = time.perf_counter(), share * search.left_s
        has_short_forward = refinement.first <= MOST_FORWARD
        may_branch = (
            has_short_forward and search.deadline_s - search.started_s >= _LEAST_TO_BRANCH_S
        )
        if may_branch and not search.is_within(_VERY_WIDE_GAP):
            refinement.singles, refinement.cuts = set(), set()  # the tree looks for its own
        elif not search.is_within(_WIDE_GAP):
            scouted_s = scout(refinement, deadline=began + _SCOUTING_SHARE * left_s)
            # without a point it proves that none fits, which is not told here
            if scouted_s < math.inf:
                search.raise_bound(scouted_s)
        if has_short_forward:
            if may_branch and not search.is_within(_WIDE_GAP):
                most_leaves = MOST_LEAVES if self.by_clock else _LEAVES_WITHOUT_CLOCK
                raise_bound_by_branching(
                    search,
                    refinement,
                    lambda: self._cutoff_s,
                    deadline=began + left_s,
                    most_leaves=most_leaves,
                )
            self._decompose(began, left_s)
        self._refine_to(began + left_s)

    def _refine_to(self, deadline: float) -> None:
        """Refines until the gap is closed, nothing is left to refine, or the deadline."""
        while not (self.search.is_over or self.refinement.is_over or is_past(deadline)):
            self.refine(deadline=deadline)

    def _decompose(self, began: float, left_s: float) -> None:
        """Refines until the gap is narrow, for a while, then raises the bound by Benders
        decomposition until it rises no more.
        """
        search, refinement = self.search, self.refinement
        enough_s, took_s = min(_SHARE_BEFORE_BENDERS * left_s, _MOST_BEFORE_BENDERS_S), 0.0
        last_s = min(left_s / 2, _MOST_OF_A_MODEL_S) if self.by_clock else left_s / 2
        for count in itertools.count():
            is_narrow = search.is_within(_NARROW_GAP)
            is_late = (
                is_past(began + enough_s - took_s)
                if self.by_clock
                else count >= _MODELS_BEFORE_BENDERS
            )
            if (
                search.is_over
                or refinement.is_over
                or is_past(began + left_s)
                or (is_narrow and is_late)
            ):
                break
            before = time.perf_counter()
            self.refine(deadline=began + (last_s if is_narrow else left_s))
            took_s = time.perf_counter() - before
        refinement.resume()
        if search.is_within(_NARROW_GAP):
            raise_bound(search, lambda _: self._cutoff_s, deadline=began + left_s)

    def _is_infeasible(self) -> bool:
        graph = self.search.graph
        keep_all = simulate(graph, Schedule.keep_all(graph)).peak_bytes
        return (
            peak_bound(graph, keep_all, time_limit_s=self.search.left_s / 2, is_relaxed=False)
            > self.search.budget_bytes
        )

    @property
    def _cutoff_s(self) -> float | None:
        """The cost at which a bound closes the gap, at first a usual one.

        Whether there is a point below it is decided sooner than which point is the best.
        """
        search = self.search
        if search.cost_s is None:
            return None
        is_near = search.cost_s - search.bound_s <= _USUAL_GAP * search.cost_s
        gap = self.gap if is_near else max(self.gap, _USUAL_GAP)
        return min(search.cost_s, search.cost_s * (1 - gap) + _CUTOFF_MARGIN * search.graph.cost_s)
