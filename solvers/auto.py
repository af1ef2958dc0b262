"""The solver to use: a bound and a schedule for it, then search and refinement in turn until the gap is closed.

1. Keeping everything, where it fits: optimal.
2. A budget below the largest working set, or below the window model's bound on the peak: proved infeasible.
3. On large graphs, prices for memory (`lagrangian`): a bound and schedules in near-linear time. On all, what the closed-form
   heuristics give (`families`): never above one of them. Then, on large ones, refined relaxations, whose schedules often fit
   and are near the bound; with more threads than one it is searched (8) meanwhile. What a model keeps and does not fit
   is mended by eviction (`eviction`), or by memory in reserve where it failed (`reserves`).
4. The window model (`window`) over the forward and the backward, solved as a MILP: a bound, and what to keep; the schedule
   is built on demand (`on_demand`). Where the transients of recomputing fit, that is the optimum.
5. Greedy recomputation with eviction (`eviction`), and the schedule of the least budget (`minimum`), as other starts; before 4
   where nothing fits yet.
6. Annealing on the sequence (`local_search`) in a few rounds: a good schedule, whose cost cuts off the models to come.
7. Refinement (`refinement`): window models with more stages where the schedules fail; bounds, and better starts. On small graphs, before
   it, where the gap is wide, stages chosen by what they bound (`scouting`), and even ones (`hierarchy`); after its first models, where
   it is narrow, many small models at once (`benders`).
8. At the same time, many short annealing runs from all of these (`restarts`), what they find recombined exactly (`recombination`), one
   long run on large graphs, until nothing improves, then exact search around the best (`neighbourhood`).

It stops as soon as cost and bound are within `gap`. Every bound is of all schedules of the fixed order. Models and search are cut by nodes
and iterations before time, so that with one thread a seed gives one answer on every machine that is fast enough for the limit.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import final

import numpy as np

from ..graph import Graph
from ..schedule import Schedule, simulate
from ..solution import Solution, Status
from .base import Solver
from .benders import raise_bound
from .compiled import COMPILER_S, IS_COMPILED
from .hierarchy import MOST_FORWARD, Hierarchy
from .interrupt import heeding_interrupts, is_past
from .lagrangian import HOPELESS, Lagrangian
from .local_search import LocalSearch, Round
from .minimum import peak_bound, working_set_bytes
from .neighbourhood import Kind, Neighbourhood
from .offers import offer_evicted, offer_families, offer_greedy, offer_with_reserves
from .progress import Progress
from .refinement import Refinement
from .restarts import Restarts
from .scouting import scout
from .search import Search
from .shared import Shared

_MOST_MOVES = 200_000 if IS_COMPILED else 2_500  # of a round
_LEAST_MOVES, _MOVES_AN_OPERATOR = 20_000, 500
_STAGNANT_ROUNDS = 3
_HOT = (1e-3, 3e-4, 1e-3, 1e-4)  # first temperatures of the rounds in turn
_HOT_IF_LARGE = (1e-5, 3e-5, 3e-4, 1e-5)  # an operator is a smaller part of the cost, and what is found soon is good
_PROGRESS = 1e-4  # a round that improves by less has brought nothing
_FIRST_MODELS_LIMIT_S = 12.0  # of each window model before there is a good schedule
_FIRST_ROUNDS, _ROUNDS_BESIDE = 3, 1  # of annealing, before the bound is refined, and while large graphs are relaxed; then restarts
_REFINING_SHARE, _REFINING_SHARE_BESIDE = 0.4, 0.9  # of the time that is then left; the second where it is searched meanwhile
_WIDE_GAP, _VERY_WIDE_GAP = 0.02, 0.06  # where even stages are tried
_NARROW_GAP = 0.01  # where Benders decomposition is tried, after a share of the time for bounds; with one thread, after so many models
_SHARE_BEFORE_BENDERS, _MODELS_BEFORE_BENDERS = 0.15, 5
_SCOUTING_SHARE = 0.4  # of the time for bounds
_WORTH = 0.1  # of the gap they must close, and may bound less than refinement, to be solved with integers
_CLIMBING_SHARE = 0.9  # of the time for bounds, until when
_USUAL_GAP = 0.005
_CUTOFF_MARGIN = 2e-6  # of the cost of keeping everything: what bounds are rounded down by, and more
_MOST_OPERATORS_TO_RESTART = 3_000
_LEAST_OPERATORS_TO_PRICE = 500
_MOST_RELAXATIONS = 6
_FRUITLESS_WORK = 3_500  # operators in all relaxations in a row that bound less than those before
_PRICING_SHARE = 0.4  # of the time
_STARTS_TO_RESTART = 3
_STAGNANT_GENERATIONS = 2
_EXACT_SHARE = 0.2  # of the time left after refining, for exact search
_EXACT_LIMIT_S, _NEIGHBOURHOODS = 5.0, 8  # of one neighbourhood; of each kind
_LEAST_TIME_FOR_MINIMUM_S = 0.1  # where the limit is over
_LOGGER = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class Auto(Solver):
    """The package's own method; always answers, with a bound.

    Attributes:
        gap: stops as soon as the cost is proved to be within this fraction of the optimum.
        time_limit_s: a hard cap; most answers come long before it.
        seed: of the annealing.
        rounds: most rounds of each kind of search; some in a row that bring nothing are the last.
        threads: with 1 the answer depends on the seed alone, where the time limit is not reached; with more the bound is refined
            while it is searched, and what each finds first steers the other.
        progress: called with a `Progress` whenever the schedule or the bound gets better.
    """

    gap: float = 0.005
    time_limit_s: float = 60.0
    seed: int = 0
    rounds: int = 12
    threads: int = 2
    progress: Callable[[Progress], None] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (self.gap >= 0 and self.time_limit_s > 0):
            raise ValueError(f"gap {self.gap} and time_limit_s {self.time_limit_s} were given; give a gap >= 0 and a time limit > 0")

    def solve(self, graph: Graph, *, budget_bytes: int) -> Solution:
        """Returns the best schedule found within `budget_bytes` with the best bound proved."""
        return self.improve(graph, budget_bytes=budget_bytes)

    def improve(
        self,
        graph: Graph,
        *,
        budget_bytes: int,
        known_steps: Sequence[Sequence[int]] = (),
        known_bound_s: float = 0.0,
        shared: Shared | None = None,
    ) -> Solution:
        """Returns what `solve` does, starting from what is known.

        Args:
            graph: any graph.
            budget_bytes: resident bytes included.
            known_steps: schedules of `graph`, within the budget or not.
            known_bound_s: proved for this budget or a larger one.
            shared: what other solves of `graph` found out, and this one adds to.
        """
        search = Search(graph, budget_bytes=budget_bytes, gap=self.gap, time_limit_s=self.time_limit_s, progress=self.progress)
        search.raise_bound(known_bound_s)
        for steps in (range(graph.num_operators), *known_steps):
            search.offer(steps)
        shared = shared or Shared(graph)
        with heeding_interrupts():
            is_possible = search.is_over or self._run(search, shared)
            if search.steps is None:
                search.offer(shared.least(time_limit_s=max(search.left_s, _LEAST_TIME_FOR_MINIMUM_S)).steps)
        if search.steps is not None:
            return Solution.of_steps(
                graph, budget_bytes, search.steps, lower_bound_s=search.bound_s, gap=self.gap, solver=repr(self), wall_s=search.elapsed_s
            )
        return Solution.without_schedule(
            graph,
            budget_bytes,
            Status.NO_SOLUTION if is_possible else Status.INFEASIBLE,
            solver=repr(self),
            wall_s=search.elapsed_s,
            lower_bound_s=search.bound_s,
            minimum_bytes=shared.least().peak_bytes,
        )

    def _run(self, search: Search, shared: Shared) -> bool:
        """Searches until the gap is closed or nothing brings more; False where the budget is proved infeasible."""
        if search.budget_bytes < working_set_bytes(search.graph) or not self._price(search):
            return False
        offer_families(search, shared)
        if search.steps is None and search.starts(1):
            self._anneal(search, search.starts(1), 1)
        if is_hard := search.steps is None:  # what fits at all comes before models that may take all of the time
            offer_greedy(search, shared)
        refinement = shared.refinement(search.budget_bytes)
        restarts = Restarts(search.graph, budget_bytes=search.budget_bytes, seed=self.seed)
        if not self._relax_beside_search(search, refinement, restarts):
            return False
        if len(refinement.boundaries) == 2 and not self._refine(search, refinement):
            return False
        if not is_hard:
            offer_greedy(search, shared)
        if self._is_small(search) or self.threads == 1 or search.steps is None:
            self._anneal(search, search.starts(2), _FIRST_ROUNDS)
        if self.threads == 1:
            self._refine_until(search, refinement, _REFINING_SHARE)
            self._improve(search, restarts, 1)
            return True
        with ThreadPoolExecutor(1) as executor:
            bounding = executor.submit(self._refine_until, search, refinement, _REFINING_SHARE_BESIDE)
            known = search.num_starts
            self._improve(search, restarts, self.threads - 1)
            bounding.result()
        if search.num_starts > known:
            self._improve(search, restarts, self.threads)
        return True

    def _refine_until(self, search: Search, refinement: Refinement, share: float) -> None:
        """Raises the bound until the gap is closed, nothing is left to refine, or that share of the time left is over.

        Where the gap is wide, with stages chosen first (`scouting`), and by even stages: where these close a part of it that counts,
        they are solved with integers, which takes long, at once where it stays very wide, else where half of the refinement bounds no more.
        """
        began, left_s, first_s = time.perf_counter(), share * search.left_s, search.bound_s
        hierarchy = Hierarchy(search.graph, search.budget_bytes)
        if not search.is_within(_WIDE_GAP):
            scouted_s = scout(refinement, deadline=began + _SCOUTING_SHARE * left_s)
            if scouted_s < math.inf:  # without a point it proves that none fits, which is not told here
                first_s = max(first_s, scouted_s)
                search.raise_bound(first_s)
            self._climb(search, hierarchy, began + left_s)
        if hierarchy.is_integer and hierarchy.best_s >= first_s + _WORTH * self._gap_s(search, first_s):
            if search.is_within(_VERY_WIDE_GAP):
                self._refine_to(search, refinement, began + left_s / 2)
            if hierarchy.best_s >= search.bound_s - _WORTH * self._gap_s(search, search.bound_s):
                self._climb(search, hierarchy, began + _CLIMBING_SHARE * left_s)
            refinement.resume()
        if refinement.first <= MOST_FORWARD:
            self._decompose(search, refinement, began, left_s)
        self._refine_to(search, refinement, began + left_s)

    @staticmethod
    def _gap_s(search: Search, bound_s: float) -> float:
        """How far the best schedule is from a bound; 0 where there is none."""
        return 0.0 if search.cost_s is None else search.cost_s - bound_s

    def _refine_to(self, search: Search, refinement: Refinement, deadline: float) -> None:
        """Refines until the gap is closed, nothing is left to refine, or the deadline."""
        while not (search.is_over or refinement.is_over or is_past(deadline)):
            self._refine(search, refinement, deadline=deadline)

    def _decompose(self, search: Search, refinement: Refinement, began: float, left_s: float) -> None:
        """Refines until the gap is narrow, for a while, then raises the bound by Benders decomposition until it rises no more."""
        for count in itertools.count():
            is_narrow = search.is_within(_NARROW_GAP)
            is_late = count >= _MODELS_BEFORE_BENDERS if self.threads == 1 else is_past(began + _SHARE_BEFORE_BENDERS * left_s)
            if search.is_over or refinement.is_over or is_past(began + left_s) or (is_narrow and is_late):
                break
            self._refine(search, refinement, deadline=began + (left_s / 2 if is_narrow else left_s))
        refinement.resume()
        if search.is_within(_NARROW_GAP):
            raise_bound(search, self._cutoff_s, deadline=began + left_s)

    def _climb(self, search: Search, hierarchy: Hierarchy, deadline: float) -> None:
        """Raises the bound by the linear programs of ever finer even stages, or where these are solved, by integers."""
        is_integer = hierarchy.is_integer
        while not (search.is_over or hierarchy.is_over or is_past(deadline)) and hierarchy.is_integer == is_integer:
            bound_s = hierarchy.solve(deadline=deadline, cutoff_s=self._cutoff_s(search))
            if bound_s < math.inf:
                search.raise_bound(bound_s)

    def _improve(self, search: Search, restarts: Restarts, threads: int) -> None:
        """Looks for better schedules until nothing improves."""
        if search.graph.num_operators <= _MOST_OPERATORS_TO_RESTART:
            self._restart(search, restarts, threads)
            self._solve_neighbourhoods(search)
        else:
            self._anneal(search, search.starts(_STARTS_TO_RESTART), self.rounds)

    def _price(self, search: Search) -> bool:
        """Takes bound and schedules from prices for memory; False where the budget is proved infeasible."""
        if self._is_small(search):
            return True
        lagrangian = Lagrangian(search.graph, budget_bytes=search.budget_bytes)
        deadline = time.perf_counter() + search.left_s * _PRICING_SHARE
        search.raise_bound(lagrangian.raise_bound(deadline=deadline))
        if search.bound_s > HOPELESS * search.graph.cost_s and self._is_infeasible(search):
            return False
        for steps in lagrangian.schedules(deadline=deadline):
            search.offer(steps)
            if search.is_over:
                break
        return True

    @staticmethod
    def _is_infeasible(search: Search) -> bool:
        keep_all = simulate(search.graph, Schedule.keep_all(search.graph)).peak_bytes
        return peak_bound(search.graph, keep_all, time_limit_s=search.left_s / 2, is_relaxed=False) > search.budget_bytes

    def _relax_beside_search(self, search: Search, refinement: Refinement, restarts: Restarts) -> bool:
        """Relaxes in one thread, and searches in another meanwhile; False where the budget is proved infeasible."""
        if self._is_small(search) or self.threads == 1 or search.is_over or search.steps is None:
            return self._relax(search, refinement)
        with ThreadPoolExecutor(1) as executor:
            relaxing = executor.submit(self._relax, search, refinement)
            may_restart = search.graph.num_operators <= _MOST_OPERATORS_TO_RESTART
            self._anneal(search, [], _ROUNDS_BESIDE if may_restart else self.rounds, should_stop=relaxing.done)
            if may_restart and not relaxing.done():
                self._restart(search, restarts, 1, should_stop=relaxing.done)
            return relaxing.result()

    @staticmethod
    def _is_small(search: Search) -> bool:
        return search.graph.num_operators < _LEAST_OPERATORS_TO_PRICE

    def _relax(self, search: Search, refinement: Refinement) -> bool:
        """Refines linear relaxations of large graphs while schedules don't fit or are dear; False where infeasibility is proved."""
        if self._is_small(search):
            return True
        fruitless = 0
        for _ in range(_MOST_RELAXATIONS):
            stages, best_s = refinement.boundaries, refinement.best_s
            offer_with_reserves(search, refinement)
            if not self._refine(search, refinement, is_relaxed=True):
                return False
            fruitless = 0 if refinement.best_s > best_s else fruitless + 1
            if refinement.boundaries == stages or fruitless * search.graph.num_operators >= _FRUITLESS_WORK:
                break
        refinement.return_to_best_relaxed()
        return True

    def _refine(self, search: Search, refinement: Refinement, *, deadline: float = math.inf, is_relaxed: bool = False) -> bool:
        """Raises the bound and offers a schedule by the next model; False where the budget is proved infeasible."""
        if refinement.is_over or search.is_over:
            return True
        first_s = min(_FIRST_MODELS_LIMIT_S, search.left_s / 2)
        deadline = deadline if deadline < math.inf else time.perf_counter() + first_s
        step = refinement.solve(deadline=deadline, cutoff_s=self._cutoff_s(search), is_relaxed=is_relaxed)
        if step.bound_s == math.inf:
            return not self._is_infeasible(search)
        search.raise_bound(step.bound_s)
        if step.steps is not None and not search.offer(step.steps) and not self._is_small(search):
            offer_evicted(search, step.kept)  # small graphs find better ones by search
        return True

    def _cutoff_s(self, search: Search) -> float | None:
        """The cost at which a bound closes the gap, at first a usual one.

        Whether there is a point below it is decided sooner than which point is the best.
        """
        if search.cost_s is None:
            return None
        is_near = search.cost_s - search.bound_s <= _USUAL_GAP * search.cost_s
        gap = self.gap if is_near else max(self.gap, _USUAL_GAP)
        return min(search.cost_s, search.cost_s * (1 - gap) + _CUTOFF_MARGIN * search.graph.cost_s)

    def _anneal(
        self, search: Search, starts: Sequence[Sequence[int]], rounds: int, should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Runs rounds of annealing from the starts, then from the best, until some in a row bring nothing."""
        local = LocalSearch(search.graph, budget_bytes=search.budget_bytes, seed=self.seed)
        if search.is_over or not self._is_compiled_in_time(search, local):
            return
        if search.steps is not None and search.cost_s is not None:
            local.best_cost_s, local.best_steps = search.cost_s, np.array(search.steps)
        num_moves = min(_MOST_MOVES, _LEAST_MOVES + _MOVES_AN_OPERATOR * search.graph.num_operators)
        is_large = search.graph.num_operators > _MOST_OPERATORS_TO_RESTART
        hot, stagnant = _HOT_IF_LARGE if is_large else _HOT, 0
        starts = [search.steps, *starts] if is_large and search.steps is not None else starts
        for index in range(rounds):
            before_s = local.best_cost_s
            is_fresh = index < len(starts) or local.best_steps is None
            start = starts[index % len(starts)] if is_fresh and starts else search.steps or range(search.graph.num_operators)
            round_ = Round(num_moves, hot[index % len(hot)], 1e-6)
            local.run(np.asarray(start), round_, should_stop=lambda: self._take(local, search) or should_stop())
            is_over = self._take(local, search) or should_stop()
            stagnant = 0 if local.best_cost_s < before_s * (1 - _PROGRESS) else stagnant + 1
            if is_over or stagnant >= _STAGNANT_ROUNDS + len(starts):
                return

    def _restart(self, search: Search, restarts: Restarts, threads: int, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Runs generations of annealing runs until two in a row bring nothing."""
        local = LocalSearch(search.graph, budget_bytes=search.budget_bytes, seed=self.seed)
        if search.is_over or not self._is_compiled_in_time(search, local):
            return
        until_s = search.elapsed_s + (1 - _EXACT_SHARE) * search.left_s
        stagnant = 0

        def is_over() -> bool:
            return search.is_over or search.elapsed_s > until_s or should_stop()

        for _ in range(self.rounds):
            before_s = math.inf if search.cost_s is None else search.cost_s
            best = [search.steps] if search.steps is not None else []
            restarts.run(
                [range(search.graph.num_operators), *search.starts(_STARTS_TO_RESTART), *best],
                threads=threads,
                should_stop=is_over,
                found=search.offer,
                deadline=search.started_s + until_s,
            )
            stagnant = 0 if search.cost_s is not None and search.cost_s < before_s * (1 - _PROGRESS) else stagnant + 1
            if stagnant >= _STAGNANT_GENERATIONS or is_over():
                return

    def _solve_neighbourhoods(self, search: Search) -> None:
        """Searches exactly around the best schedule, one part at a time."""
        neighbourhood = Neighbourhood(search.graph, search.budget_bytes, self.seed)
        for _ in range(min(_NEIGHBOURHOODS, self.rounds)):
            if search.steps is None or search.is_over:
                return
            steps = neighbourhood.improve(
                search.steps, max_rounds=len(Kind), should_stop=lambda: search.is_over, time_limit_s=min(_EXACT_LIMIT_S, search.left_s)
            )
            search.offer(steps)

    @staticmethod
    def _is_compiled_in_time(search: Search, local: LocalSearch) -> bool:
        is_ready = local.is_ready or search.left_s >= COMPILER_S
        if not is_ready:
            _LOGGER.warning("no annealing: compiling it takes up to %.0f s once, and %.1f s are left", COMPILER_S, search.left_s)
        return is_ready

    @staticmethod
    def _take(local: LocalSearch, search: Search) -> bool:
        if local.best_steps is not None and (search.cost_s is None or local.best_cost_s < search.cost_s):
            search.offer(local.best_steps.tolist())
        return search.is_over
