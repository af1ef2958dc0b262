"""Techniques with little or no search: closed forms, segments, repair and eviction.

They find the schedules from which all others start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from remat.solvers.auto.searching import can_anneal, num_moves, take
from remat.solvers.auto.technique import WIDE_GAP, Solve, Technique
from remat.solvers.bounds.memory_margins import Reserves
from remat.solvers.bounds.refinement import Refinement
from remat.solvers.core.incumbent import Search
from remat.solvers.core.interrupt import is_past
from remat.solvers.exhaustive import states
from remat.solvers.persistent.rotor import rotor_steps
from remat.solvers.search.annealing import COLD, LocalSearch, Round
from remat.solvers.search.greedy_eviction import (
    MOST_OPERATORS_TO_EVICT,
    Rule,
    is_compiled,
    steps_with_eviction,
)
from remat.solvers.search.repair import repaired

_REPAIR_RULES = Rule.LARGE, Rule.CHEAP, Rule.ENOUGH


@final
@dataclass(frozen=True, kw_only=True)
class Exhaustive(Technique):
    """Exhaustive search on graphs of a few operators, up to a number of states (`exhaustive`)."""

    name: ClassVar[str] = "exhaustive"

    def applies(self, solve: Solve) -> bool:
        """True on graphs of a few operators."""
        return states.is_small(solve.graph)

    def run(self, solve: Solve) -> None:
        """Offers the cheapest schedule with its bound, or proves that none fits."""
        search = solve.search
        found = states.cheapest(
            solve.graph,
            budget_bytes=search.budget_bytes,
            deadline=search.deadline_s,
            most_states=states.FEW_STATES,
        )

        if found.is_finished and found.steps is None:
            search.refute()
            return

        if found.steps is not None:
            search.offer(found.steps)
        search.raise_bound(solve.graph.cost_s + found.least)


@final
@dataclass(frozen=True, kw_only=True)
class Families(Technique):
    """The strongest closed-form heuristics, so that `auto` never costs more than any of them."""

    name: ClassVar[str] = "families"

    def run(self, solve: Solve) -> None:
        """Offers each heuristic's cheapest schedule that fits."""
        search = solve.search
        families = solve.shared.families.cheapest(search.budget_bytes, deadline=search.deadline_s)
        while not search.is_over and (steps := next(families, None)) is not None:
            search.offer(steps)


@final
@dataclass(frozen=True, kw_only=True)
class Segments(Technique):
    """The best persistent schedule of segments, then close runs of annealing from it.

    This schedule is annealed even where another is cheaper, as it lies in another basin. Tuned on
    traced steps.

    Attributes:
        least_times: least ratio of what keeping everything needs to the budget; below it, segment
            schedules were never among the best.
        least_s: least time left in seconds; with less, as for a point of a curve, annealing known
            schedules finds better ones.
        share: of the time left, at most, for the segments' options.
        seconds_per_operator: the time that the options take.
        hot: first temperatures of the rounds of annealing, as shares of the cost of keeping
            everything.
    """

    name: ClassVar[str] = "segments"

    least_times: float = 5.0
    least_s: float = 7.0
    share: float = 0.15
    seconds_per_operator: float = 2e-4
    hot: tuple[float, ...] = (1e-3, 3e-4)

    def applies(self, solve: Solve) -> bool:
        """True on large graphs with a budget far below keeping everything, and enough time."""
        count, left_s = solve.graph.num_operators, solve.search.left_s
        return (
            solve.is_large
            and is_compiled()
            and count <= MOST_OPERATORS_TO_EVICT
            and left_s >= self.least_s
            and self.share * left_s >= self.seconds_per_operator * count
            and solve.is_far(self.least_times)
        )

    def run(self, solve: Solve) -> None:
        """Offers the schedule, and the best that annealing finds from it."""
        search = solve.search

        def is_over() -> bool:
            return search.is_over or (solve.is_waited_for() and search.is_within(WIDE_GAP))

        steps = rotor_steps(
            solve.graph,
            search.budget_bytes,
            options_s=search.left_s * self.share,
            should_stop=is_over,
        )
        if steps is None:
            return

        search.offer(steps)
        if not is_over():
            self._anneal(solve, steps, is_over)

    def _anneal(self, solve: Solve, steps: list[int], is_over: Callable[[], bool]) -> None:
        search = solve.search
        local = LocalSearch(solve.graph, budget_bytes=search.budget_bytes, seed=solve.seed)
        if not can_anneal(search, local):
            return

        for hot in self.hot:
            start = steps if local.best_steps is None else local.best_steps
            round_ = Round(num_moves(solve.graph), hot, COLD, is_close=True)
            local.run(
                np.asarray(start), round_, should_stop=lambda: take(local, search) or is_over()
            )
            if take(local, search) or is_over():
                return


@final
@dataclass(frozen=True, kw_only=True)
class Repair(Technique):
    """Closed-form schedules over the budget, repaired by eviction (`repair`).

    Tuned on traced steps.

    Attributes:
        share: of the time left, at most; most searches end earlier.
        most_work: limit on the sum of squared lengths of the repaired schedules; some three
            seconds when it was chosen, on a machine that is not on record.
    """

    name: ClassVar[str] = "repair"

    share: float = 0.2
    most_work: int = 400_000_000

    def applies(self, solve: Solve) -> bool:
        """True where eviction is compiled."""
        return is_compiled()

    def run(self, solve: Solve) -> None:
        """Offers repaired schedules by each rule, while they may be cheaper than the best."""
        search = solve.search
        deadline, work = time.perf_counter() + search.left_s * self.share, 0
        for rule in _REPAIR_RULES:
            others = solve.shared.families.above(search.budget_bytes, deadline=deadline)
            for cost_s, steps in others:
                if search.is_over or is_past(deadline) or work > self.most_work:
                    return

                is_of_use = search.cost_s is None or cost_s < search.cost_s  # repair adds cost
                if is_of_use and len(steps) <= MOST_OPERATORS_TO_EVICT:
                    work += len(steps) ** 2
                    budget_bytes = search.budget_bytes
                    found = repaired(solve.graph, steps, budget_bytes=budget_bytes, rule=rule)
                    search.offer(found or steps)


@final
@dataclass(frozen=True, kw_only=True)
class Eviction(Technique):
    """Greedy recomputation with eviction, and the schedule of the least budget."""

    name: ClassVar[str] = "eviction"

    def run(self, solve: Solve) -> None:
        """Offers greedy eviction's schedules, and the least budget's where none fits."""
        search = solve.search
        evict(search, {})
        if search.steps is None and not search.is_over:
            with search.by("least-budget"):
                search.offer(solve.shared.least(time_limit_s=search.left_s / 2).steps)


def evict(search: Search, kept: Mapping[int, Sequence[int]]) -> None:
    """Offers the schedules of greedy eviction by each rule, following the plan `kept`."""
    for rule in Rule if search.graph.num_operators <= MOST_OPERATORS_TO_EVICT else ():
        if search.is_over:
            return

        steps = steps_with_eviction(
            search.graph, search.budget_bytes, rule, left_s=search.left_s, kept=kept
        )
        if steps is not None:
            search.offer(steps.tolist())


def offer_with_margins(
    search: Search, refinement: Refinement, *, share: float = 0.15, most_repaired: int = 3
) -> None:
    """Offers schedules of the present stages with memory held back (`memory_margins`).

    The cheapest of those that do not fit are repaired. Tuned on traced steps.

    Args:
        search: schedules are offered to it.
        refinement: has the stages.
        share: of the time left, at most.
        most_repaired: number of schedules repaired at most.
    """
    deadline = time.perf_counter() + search.left_s * share
    schedules = (
        iter(()) if refinement.is_over else Reserves(refinement).schedules(deadline=deadline)
    )

    failed: dict[tuple[int, ...], float] = {}  # schedules over the budget, with their cost
    while not search.is_over and (steps := next(schedules, None)) is not None:
        if not search.offer(steps):
            failed[tuple(steps)] = float(search.graph.arrays.cost_s[steps].sum())

    cheapest = sorted(failed, key=failed.__getitem__)[:most_repaired]
    for found in cheapest if is_compiled() else ():
        for rule in _REPAIR_RULES if len(found) <= MOST_OPERATORS_TO_EVICT else ():
            is_of_use = search.cost_s is None or failed[found] < search.cost_s
            if search.is_over or is_past(deadline) or not is_of_use:
                return

            fits = repaired(search.graph, found, budget_bytes=search.budget_bytes, rule=rule)
            if fits is not None:
                search.offer(fits)
