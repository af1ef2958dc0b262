"""The solver to use.

A bound and a schedule for it, then search and refinement in turn until the gap is closed.

1. Keeping everything, where it fits: optimal.
2. A budget below the largest working set, or below the window model's bound on the peak: proved
   infeasible. Graphs of a few operators are searched exhaustively (`exhaustive`), which ends it.
3. On large graphs, prices for memory (`lagrangian`): a bound and schedules in near-linear time. On
   all, what the closed-form heuristics give (`families`): never above one of them. Then, on large
   ones, refined relaxations (`bound_pipeline`), whose schedules often fit and are near the bound;
   with more threads than one it is searched (8) meanwhile.
4. The window model (`window`) over the forward and the backward, solved as a MILP: a bound, and
   what to keep; the schedule is built on demand (`on_demand`). Where the transients of recomputing
   fit, that is the optimum. Where the budget is far below what keeping everything needs, the best
   persistent schedule of segments (`rotor`) is annealed before.
5. Greedy recomputation with eviction (`greedy_eviction`), and the schedule of the least budget
   (`minimum`), as other starts; before 4 where nothing fits yet, and then what else the heuristics
   give, made to fit (`repair`).
6. Annealing on the sequence (`annealing`) in a few rounds: a good schedule, whose cost cuts off the
   models to come.
7. Window models with more stages, which raise the bound (`bound_pipeline`); better starts.
8. At the same time, many short annealing runs from all of these (`restarts`), the best first where
   the budget is far below what keeping everything needs, what they find recombined exactly
   (`recombination`), on small graphs a second set that begins without the best, one long run on
   large ones, until nothing improves, then exact search around the best (`neighbourhood`); from
   other seeds while the bound is still worked on.

It stops as soon as cost and bound are within `gap`. Every bound is of all schedules of the fixed
order. Models and search are cut by nodes and iterations before time, so that with one thread a seed
gives one answer on every machine that is fast enough for the limit.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution, Status
from remat.solvers.auto.bound_pipeline import Bounding, is_small
from remat.solvers.auto.reuse import Shared
from remat.solvers.auto.starting_schedules import (
    offer_families,
    offer_greedy,
    offer_mended,
    offer_persistent,
)
from remat.solvers.core.accounting import working_set_bytes
from remat.solvers.core.base import Solver
from remat.solvers.core.compiled import COMPILER_S, IS_COMPILED, NOT_COMPILED
from remat.solvers.core.incumbent import Search
from remat.solvers.core.interrupt import heeding_interrupts
from remat.solvers.core.progress import Progress
from remat.solvers.exhaustive import states
from remat.solvers.search.annealing import LocalSearch, Round
from remat.solvers.search.neighbourhood import Kind, Neighbourhood
from remat.solvers.search.restarts import Restarts

_MOST_MOVES = 200_000 if IS_COMPILED else 2_500  # of a round
_LEAST_MOVES, _MOVES_AN_OPERATOR = 20_000, 500
_STAGNANT_ROUNDS = 3
# in turn: first temperature, share of the moves
_ROUNDS = (1e-3, 1.0), (3e-4, 1.0), (1e-3, 1.0), (1e-4, 1.0)
# what is found soon is good there, and is cooled first
_ROUNDS_IF_LARGE = (1e-5, 0.25), (1e-3, 1.0), (3e-4, 1.0), (1e-3, 1.0)
# of a round; hot ones that are shorter end above their start
_MOST_MOVES_IF_LARGE = 4_000_000 if IS_COMPILED else 2_500
_HOT_CLOSELY = (1e-3, 3e-4)  # of the rounds from a persistent schedule
_PROGRESS = 1e-4  # a round that improves by less has brought nothing
# of annealing, before the bound is refined, and while large graphs are relaxed; then restarts
_FIRST_ROUNDS, _ROUNDS_BESIDE = 3, 2
# of the time that is then left; the second where it is searched meanwhile
_REFINING_SHARE, _REFINING_SHARE_BESIDE = 0.4, 0.9
_MOST_OPERATORS_TO_RESTART = 3_000
_STARTS_TO_RESTART = 3
_STAGNANT_GENERATIONS = 2
# times the budget; annealing what needs so much takes longest and often ends with nothing that fits
_FAR = 4.0
_FAR_FOR_SEGMENTS = 5.0  # the same; nearer, what is planned by segments is not among the best
_WIDE_GAP = 0.02  # where the heuristics' schedules are made to fit, though others do
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
        threads: with 1 the answer depends on the seed alone, where the time limit is not reached;
            with more the bound is refined while it is searched, and what each finds first steers
            the other.
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
            raise ValueError(
                f"gap {self.gap} and time_limit_s {self.time_limit_s} were given; give a gap "
                ">= 0 and a time limit > 0"
            )

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
        search = Search(
            graph,
            budget_bytes=budget_bytes,
            gap=self.gap,
            time_limit_s=self.time_limit_s,
            progress=self.progress,
        )
        search.raise_bound(known_bound_s)
        for steps in (range(graph.num_operators), *known_steps):
            search.offer(steps)
        shared = shared or Shared(graph)
        with heeding_interrupts() as heeded:
            is_possible = search.is_over or self._run(search, shared)
            if search.steps is None:
                search.offer(
                    shared.least(time_limit_s=max(search.left_s, _LEAST_TIME_FOR_MINIMUM_S)).steps
                )
        cut_short = heeded.cut_short or search.cut_short
        if search.steps is not None:
            return Solution.of_steps(
                graph,
                budget_bytes,
                search.steps,
                lower_bound_s=search.bound_s,
                gap=self.gap,
                solver=repr(self),
                wall_s=search.elapsed_s,
                cut_short=cut_short,
            )
        return Solution.without_schedule(
            graph,
            budget_bytes,
            Status.NO_SOLUTION if is_possible else Status.INFEASIBLE,
            solver=repr(self),
            wall_s=search.elapsed_s,
            lower_bound_s=search.bound_s,
            minimum_bytes=shared.least().peak_bytes,
            cut_short=cut_short,
        )

    def _run(self, search: Search, shared: Shared) -> bool:
        """Searches until the gap is closed or nothing brings more.

        False where the budget is proved infeasible.
        """
        if search.budget_bytes < working_set_bytes(search.graph):
            return False
        if not _exhaust(search):
            return False
        if search.is_over:
            return True
        refinement = shared.refinement(search.budget_bytes)
        bounding = Bounding(search, refinement, self.gap, by_clock=self.threads > 1)
        if not bounding.price():
            return False
        offer_families(search, shared)
        if search.steps is None and search.starts(1):
            self._anneal(search, search.starts(1), 1)
        has_segments = not is_small(search.graph) and self._is_far(search, _FAR_FOR_SEGMENTS)
        # what fits at all comes before models that may take all of the time
        if is_hard := search.steps is None:
            if has_segments:
                self._plan_segments(search)
            offer_mended(search, shared)
            offer_greedy(search, shared)
        restarts = Restarts(search.graph, budget_bytes=search.budget_bytes, seed=self.seed)
        if not self._relax_beside_search(
            bounding, restarts, has_segments=has_segments and not is_hard
        ):
            return False
        if len(refinement.boundaries) == 2 and not bounding.refine():
            return False
        if not is_hard:
            offer_greedy(search, shared)
        if not (is_hard or search.is_within(_WIDE_GAP)):
            if has_segments:
                self._plan_segments(search)
            offer_mended(search, shared)
        if is_small(search.graph) or self.threads == 1 or search.steps is None:
            self._anneal(search, search.starts(2), _FIRST_ROUNDS)
        if self.threads == 1:
            bounding.run(_REFINING_SHARE)
            self._improve(search, restarts, 1)
            return True
        with ThreadPoolExecutor(1) as executor:
            running = executor.submit(bounding.run, _REFINING_SHARE_BESIDE)
            known = search.num_starts
            self._improve(search, restarts, self.threads - 1)
            self._improve_with_other_seeds(search, running.done)
            running.result()
        if search.num_starts > known:
            self._improve(search, restarts, self.threads)
        return True

    def _improve(
        self,
        search: Search,
        restarts: Restarts,
        threads: int,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Looks for better schedules until nothing improves."""
        if search.graph.num_operators <= _MOST_OPERATORS_TO_RESTART:
            self._restart(search, restarts, threads, should_stop)
            # runs take no time there, and where they all ended may be no good valley
            if is_small(search.graph):
                others = Restarts(
                    search.graph, budget_bytes=search.budget_bytes, seed=self.seed + 1
                )
                self._restart(search, others, threads, should_stop, is_anew=True)
            self._solve_neighbourhoods(search, should_stop)
        else:
            self._anneal(search, search.starts(_STARTS_TO_RESTART), self.rounds, should_stop)

    def _improve_with_other_seeds(self, search: Search, is_over: Callable[[], bool]) -> None:
        """Looks for better schedules from other seeds, one after the other, until nothing is to be
        waited for.
        """
        local = LocalSearch(search.graph, budget_bytes=search.budget_bytes, seed=self.seed)
        for seed in itertools.count(self.seed + 2, 2):
            if search.is_over or is_over() or not local.is_ready:
                return
            restarts = Restarts(search.graph, budget_bytes=search.budget_bytes, seed=seed)
            replace(self, seed=seed)._improve(
                search, restarts, self.threads - 1, should_stop=is_over
            )

    def _relax_beside_search(
        self, bounding: Bounding, restarts: Restarts, *, has_segments: bool
    ) -> bool:
        """Relaxes in one thread, and searches in another meanwhile.

        False where the budget is proved infeasible.
        """
        search = bounding.search
        if is_small(search.graph) or self.threads == 1 or search.is_over or search.steps is None:
            is_possible = bounding.relax()
            if has_segments and not search.is_within(_WIDE_GAP):
                self._plan_segments(search)
            return is_possible
        with ThreadPoolExecutor(1) as executor:
            relaxing = executor.submit(bounding.relax)
            if has_segments:
                self._plan_segments(
                    search, should_stop=lambda: relaxing.done() and search.is_within(_WIDE_GAP)
                )
            may_restart = search.graph.num_operators <= _MOST_OPERATORS_TO_RESTART
            self._anneal(
                search,
                [],
                _ROUNDS_BESIDE if may_restart else self.rounds,
                should_stop=relaxing.done,
            )
            if may_restart and not relaxing.done():
                self._restart(search, restarts, 1, should_stop=relaxing.done)
            return relaxing.result()

    def _plan_segments(
        self, search: Search, should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Looks for the best persistent schedule, and anneals it closely, also where another is
        cheaper: it is another valley.
        """

        def is_over() -> bool:
            return search.is_over or should_stop()

        steps = None if is_over() else offer_persistent(search, is_over)
        local = LocalSearch(search.graph, budget_bytes=search.budget_bytes, seed=self.seed)
        for hot in (
            _HOT_CLOSELY if steps is not None and self._is_compiled_in_time(search, local) else ()
        ):
            start = steps if local.best_steps is None else local.best_steps
            round_ = Round(self._num_moves(search.graph), hot, 1e-6, is_close=True)
            local.run(
                np.asarray(start),
                round_,
                should_stop=lambda: self._take(local, search) or is_over(),
            )
            if self._take(local, search) or is_over():
                return

    def _anneal(
        self,
        search: Search,
        starts: Sequence[Sequence[int]],
        rounds: int,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Runs rounds of annealing from the starts, then from the best, until some in a row bring
        nothing.
        """
        local = LocalSearch(search.graph, budget_bytes=search.budget_bytes, seed=self.seed)
        if search.is_over or not self._is_compiled_in_time(search, local):
            return
        if search.steps is not None and search.cost_s is not None:
            local.best_cost_s, local.best_steps = search.cost_s, np.array(search.steps)
        is_large = search.graph.num_operators > _MOST_OPERATORS_TO_RESTART
        rounds_in_turn, most_moves = (
            (_ROUNDS_IF_LARGE, _MOST_MOVES_IF_LARGE) if is_large else (_ROUNDS, _MOST_MOVES)
        )
        stagnant = 0
        starts = [search.steps, *starts] if is_large and search.steps is not None else starts
        for index in range(rounds):
            before_s = local.best_cost_s
            is_fresh = index < len(starts) or local.best_steps is None
            start = (
                starts[index % len(starts)]
                if is_fresh and starts
                else search.steps or range(search.graph.num_operators)
            )
            hot, share = rounds_in_turn[index % len(rounds_in_turn)]
            round_ = Round(
                round(share * self._num_moves(search.graph, most_moves)),
                hot,
                1e-6,
                is_close=index % 2 == 1,
            )
            local.run(
                np.asarray(start),
                round_,
                should_stop=lambda: self._take(local, search) or should_stop(),
            )
            is_over = self._take(local, search) or should_stop()
            stagnant = 0 if local.best_cost_s < before_s * (1 - _PROGRESS) else stagnant + 1
            if is_over or stagnant >= _STAGNANT_ROUNDS + len(starts):
                return

    def _restart(
        self,
        search: Search,
        restarts: Restarts,
        threads: int,
        should_stop: Callable[[], bool] = lambda: False,
        *,
        is_anew: bool = False,
    ) -> None:
        """Runs generations of annealing runs until two in a row bring nothing.

        The first without the best where it is made anew.
        """
        local = LocalSearch(search.graph, budget_bytes=search.budget_bytes, seed=self.seed)
        if search.is_over or not self._is_compiled_in_time(search, local):
            return
        until_s = search.elapsed_s + (1 - _EXACT_SHARE) * search.left_s
        stagnant = 0

        def is_over() -> bool:
            return search.is_over or search.elapsed_s > until_s or should_stop()

        for generation in range(self.rounds):
            before_s = math.inf if search.cost_s is None else search.cost_s
            restarts.run(
                self._starts_to_restart(search, with_best=not is_anew or generation > 0),
                threads=threads,
                should_stop=is_over,
                found=search.offer,
                deadline=search.started_s + until_s,
            )
            stagnant = (
                0
                if search.cost_s is not None and search.cost_s < before_s * (1 - _PROGRESS)
                else stagnant + 1
            )
            if stagnant >= _STAGNANT_GENERATIONS or is_over():
                return

    def _starts_to_restart(self, search: Search, *, with_best: bool) -> list[Sequence[int]]:
        """Keeping everything, what nearly fits, and the best.

        That first where the budget is far below keeping everything.
        """
        best = [search.steps] if search.steps is not None and with_best else []
        others = [range(search.graph.num_operators), *search.starts(_STARTS_TO_RESTART)]
        return [*best, *others] if self._is_far(search) else [*others, *best]

    def _solve_neighbourhoods(
        self, search: Search, should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Searches exactly around the best schedule, one part at a time."""
        neighbourhood = Neighbourhood(search.graph, search.budget_bytes, self.seed)
        for _ in range(min(_NEIGHBOURHOODS, self.rounds)):
            if search.steps is None or search.is_over or should_stop():
                return
            steps = neighbourhood.improve(
                search.steps,
                max_rounds=len(Kind),
                should_stop=lambda: search.is_over or should_stop(),
                time_limit_s=min(_EXACT_LIMIT_S, search.left_s),
            )
            search.offer(steps)

    @staticmethod
    def _is_far(search: Search, times: float = _FAR) -> bool:
        """True where keeping everything needs more than so many times the budget."""
        return (
            simulate(search.graph, Schedule.keep_all(search.graph)).peak_bytes
            > times * search.budget_bytes
        )

    @staticmethod
    def _num_moves(graph: Graph, most: int = _MOST_MOVES) -> int:
        return min(most, _LEAST_MOVES + _MOVES_AN_OPERATOR * graph.num_operators)

    @staticmethod
    def _is_compiled_in_time(search: Search, local: LocalSearch) -> bool:
        is_ready = local.is_ready or search.left_s >= COMPILER_S
        if not is_ready:
            _LOGGER.warning(
                "no annealing: compiling it takes up to %.0f s once, and %.1f s are left",
                COMPILER_S,
                search.left_s,
            )
            search.cut_short = NOT_COMPILED
        return is_ready

    @staticmethod
    def _take(local: LocalSearch, search: Search) -> bool:
        if local.best_steps is not None and (
            search.cost_s is None or local.best_cost_s < search.cost_s
        ):
            search.offer(local.best_steps.tolist())
        return search.is_over


def _exhaust(search: Search) -> bool:
    """Solves graphs of a few operators to the end, within a number of states.

    False where the budget is proved infeasible.
    """
    graph = search.graph
    if not states.is_small(graph):
        return True

    found = states.cheapest(
        graph,
        budget_bytes=search.budget_bytes,
        deadline=search.deadline_s,
        most_states=states.FEW_STATES,
    )
    if found.is_finished and found.steps is None:
        return False
    if found.steps is not None:
        search.offer(found.steps)

    search.raise_bound(graph.cost_s + found.least)
    return True
