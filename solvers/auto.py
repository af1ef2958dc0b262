"""The solver to use: a bound and a schedule for it, then search and refinement in turn until the gap is closed.

1. Keeping everything, where it fits: optimal.
2. A budget below the largest working set, or below the window model's bound on the peak: proved infeasible.
3. The window model (`window`) over the forward and the backward, solved as a MILP: a bound, and what to keep; the schedule
   is built on demand (`on_demand`). Where the transients of recomputing fit, that is the optimum.
4. Greedy recomputation with eviction (`eviction`), and the schedule of the least budget (`minimum`), as other starts.
5. Annealing on the sequence (`local_search`) in a few rounds: a good schedule, whose cost cuts off the models to come.
6. Refinement (`refinement`): window models with more stages where the schedules fail; bounds, and better starts.
7. Annealing again, from the refined schedules and the best, until a few rounds in a row improve nothing.

It stops as soon as cost and bound are within `gap`. Every bound is of all schedules of the fixed order. Models and search
are cut by nodes and iterations before they are cut by time, so that a seed gives one answer on every machine that is fast
enough for the time limit.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from ..graph import Graph
from ..schedule import Schedule, simulate
from ..solution import Solution, Status
from .base import Solver
from .compiled import COMPILER_S, IS_COMPILED
from .eviction import Rule, is_eviction_ready, steps_with_eviction
from .local_search import LocalSearch, Round
from .minimum import Minimum, minimum, peak_bound, working_set_bytes
from .progress import Progress
from .refinement import Refinement
from .search import Search

_MOST_MOVES = 200_000 if IS_COMPILED else 2_500  # of a round
_LEAST_MOVES = 20_000
_MOVES_AN_OPERATOR = 500
_STAGNANT_ROUNDS = 3
_HOT = (1e-3, 3e-4, 1e-3, 1e-4)  # first temperatures of the rounds in turn
_PROGRESS = 1e-4  # a round that improves by less has brought nothing
_MODEL_LIMIT_S = 12.0  # of one window model
_FIRST_ROUNDS = 3  # of annealing, before the bound is refined
_REFINING_SHARE = 0.6  # of the time that is then left
_LOGGER = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class Auto(Solver):
    """The package's own method; always answers, with a bound.

    Attributes:
        gap: stops as soon as the cost is proved to be within this fraction of the optimum.
        time_limit_s: a hard cap; most answers come long before it.
        seed: of the annealing.
        rounds: most rounds of annealing; three in a row that bring nothing are the last.
        progress: called with a `Progress` whenever the schedule or the bound gets better.
    """

    gap: float = 0.005
    time_limit_s: float = 60.0
    seed: int = 0
    rounds: int = 12
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
        least: Minimum | None = None,
    ) -> Solution:
        """Returns what `solve` does, starting from what is known.

        Args:
            graph: any graph.
            budget_bytes: resident bytes included.
            known_steps: schedules of `graph`, within the budget or not.
            known_bound_s: proved for this budget or a larger one.
            least: what `minimum` says of `graph`, where it was asked before.
        """
        search = Search(graph, budget_bytes=budget_bytes, gap=self.gap, time_limit_s=self.time_limit_s, progress=self.progress)
        search.raise_bound(known_bound_s)
        for steps in (range(graph.num_operators), *known_steps):
            search.offer(steps)
        if not search.is_over and not self._run(search, least):
            return self._without_schedule(search, Status.INFEASIBLE, least)
        if search.steps is None:
            return self._without_schedule(search, Status.NO_SOLUTION, least)
        return Solution.of_steps(
            graph, budget_bytes, search.steps, lower_bound_s=search.bound_s, gap=self.gap, solver=repr(self), wall_s=search.elapsed_s
        )

    def _without_schedule(self, search: Search, status: Status, least: Minimum | None) -> Solution:
        least = least or minimum(search.graph, time_limit_s=max(search.left_s, 0.1))
        return Solution.without_schedule(
            search.graph,
            search.budget_bytes,
            status,
            solver=repr(self),
            wall_s=search.elapsed_s,
            lower_bound_s=search.bound_s,
            minimum_bytes=least.peak_bytes,
        )

    def _run(self, search: Search, least: Minimum | None) -> bool:
        """Searches until the gap is closed or nothing brings more; False where the budget is proved infeasible."""
        starts: list[Sequence[int]] = []
        refinement = Refinement(search.graph, budget_bytes=search.budget_bytes)
        if search.budget_bytes < working_set_bytes(search.graph) or not self._refine(search, refinement, starts):
            return False
        self._solve_greedily(search, starts, least)
        local = LocalSearch(search.graph, budget_bytes=search.budget_bytes, seed=self.seed)
        self._anneal(search, local, starts, _FIRST_ROUNDS)
        deadline_s = search.elapsed_s + _REFINING_SHARE * search.left_s
        while not (search.is_over or refinement.is_over) and search.elapsed_s < deadline_s:
            self._refine(search, refinement, starts)
        self._anneal(search, local, starts, self.rounds)
        return True

    def _refine(self, search: Search, refinement: Refinement, starts: list[Sequence[int]]) -> bool:
        """Raises the bound and adds a start by the next model; False where the budget is proved infeasible."""
        if refinement.is_over:
            return True
        limit_s = min(_MODEL_LIMIT_S, search.left_s / 2)
        step = refinement.solve(deadline=time.perf_counter() + limit_s, cutoff_s=search.cost_s)
        if step.bound_s == math.inf:
            keep_all = simulate(search.graph, Schedule.keep_all(search.graph)).peak_bytes
            peak = peak_bound(search.graph, keep_all, time_limit_s=search.left_s / 2, is_relaxed=False)
            return peak <= search.budget_bytes
        search.raise_bound(step.bound_s)
        if step.steps is not None:
            starts.insert(0, step.steps)
            search.offer(step.steps)
        return True

    @staticmethod
    def _solve_greedily(search: Search, starts: list[Sequence[int]], least: Minimum | None) -> None:
        """Offers the greedy's schedules, and that of the least budget where none of them fits."""
        can_run = is_eviction_ready() or search.left_s > COMPILER_S
        for rule in Rule if can_run else ():
            if search.is_over:
                return
            steps = steps_with_eviction(search.graph, search.budget_bytes, rule)
            if steps is not None:
                search.offer(steps.tolist())
        if search.steps is None and not search.is_over:
            starts.append((least or minimum(search.graph, time_limit_s=search.left_s / 2)).steps)
            search.offer(starts[-1])

    def _anneal(self, search: Search, local: LocalSearch, starts: list[Sequence[int]], rounds: int) -> None:
        """Runs rounds of annealing from the starts, which it takes, and from the best, until some in a row bring nothing."""
        if search.is_over:
            return
        if not local.is_ready and search.left_s < COMPILER_S:
            _LOGGER.warning("no annealing: compiling it takes up to %.0f s once, and %.1f s are left", COMPILER_S, search.left_s)
            return
        if search.steps is not None and search.cost_s is not None:
            local.best_cost_s, local.best_steps = search.cost_s, np.array(search.steps)
        num_moves = min(_MOST_MOVES, _LEAST_MOVES + _MOVES_AN_OPERATOR * search.graph.num_operators)
        stagnant = 0
        for index in range(rounds):
            before_s = local.best_cost_s
            start = starts.pop(0) if starts else local.best_steps if local.best_steps is not None else range(search.graph.num_operators)
            round_ = Round(num_moves, _HOT[index % len(_HOT)], 1e-6)
            local.run(np.asarray(start), round_, should_stop=lambda: self._take(local, search))
            is_over = self._take(local, search)
            stagnant = 0 if local.best_cost_s < before_s * (1 - _PROGRESS) else stagnant + 1
            if is_over or stagnant >= _STAGNANT_ROUNDS:
                return

    @staticmethod
    def _take(local: LocalSearch, search: Search) -> bool:
        if local.best_steps is not None and (search.cost_s is None or local.best_cost_s < search.cost_s):
            search.offer(local.best_steps.tolist())
        return search.is_over
