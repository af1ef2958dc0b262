"""Free order: reorders first computations too, which often saves memory without recomputing.

Other names: joint operator ordering and rematerialization; without recomputation, the
register-allocation or minimum peak memory ordering problem, already NP-hard (Sethi, 1975).
Annealing on sequences with free order: FastSA (2023).

1. Keeping everything in the graph's order is optimal where it fits. A budget below a working set,
   or below what the dependencies force (`bound`), is proved infeasible. `bound` also gives a lower
   bound that holds in every order.
2. Annealing of the order alone (`moves`). Where the result fits the budget, nothing is computed
   twice, so it is optimal.
3. Annealing of order and recomputations together, in rounds. The second round starts from the
   schedule that `Auto` finds in the graph's order in 0.3 of the time left. Annealing ends after a
   few rounds without progress.

`rules` says what may be reordered; the bound assumes fewer rules (dependencies, forward before
backward), so it is valid for these rules too. Imperfections: the bound is the keep-all cost where
graphs are wide. `remat.wrap` refuses schedules that leave the traced step's order; this solver is
for plain graphs, and to see what another order would save.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np

from remat.core.graph import Graph
from remat.core.operators import Operator
from remat.core.schedule import Schedule, simulate
from remat.core.solution import SearchRecord, Solution, Status
from remat.core.validate import validate
from remat.solvers.auto.searching import can_anneal
from remat.solvers.auto.solver import Auto
from remat.solvers.core.accounting import Ints
from remat.solvers.core.base import Solver
from remat.solvers.core.compiled import IS_COMPILED
from remat.solvers.core.incumbent import Search
from remat.solvers.core.interrupt import heeding_interrupts
from remat.solvers.core.memory import leaving_out
from remat.solvers.core.progress import Progress
from remat.solvers.free_order.bound import order_bound_s
from remat.solvers.free_order.moves import anneal_free, pack_rules
from remat.solvers.free_order.rules import order_rules
from remat.solvers.search.annealing import COLD, LocalSearch, Round
from remat.solvers.search.sequence import SPAN

# Measured together on published graphs beside FastSA and on training steps, not one by one.
# Temperatures are shares of the cost of keeping everything.
_LEAST_MOVES, _MOST_MOVES = (20_000, 2_000_000) if IS_COMPILED else (1_000, 5_000)  # in a round
_ORDER_MOVES, _MIXED_MOVES = 400, 1_200  # per operator, in a round
_ORDER_CHANCE = 0.4  # that a move of a mixed round reorders
_HOT = (1e-3, 1e-3, 3e-4, 1e-3, 1e-4)  # first temperatures of the mixed rounds in turn
_ORDER_HOT, _ORDER_COLD = 1e-2, 1e-4  # first and last temperature of the round of the order alone
_STAGNANT_ROUNDS = 3  # rounds in a row without progress, after which annealing ends
_PROGRESS = 1e-4  # relative improvement below which a round counts as stagnant
_BOUND_SHARE, _AUTO_SHARE = 0.1, 0.3  # of the time limit; of the time left
_BOUND_LIMIT_S = 10.0  # seconds for the bound, at most; a round number


@final
@dataclass(frozen=True)
class FreeOrder(Solver):
    """Annealing of order and recomputations, with a lower bound that holds in every order.

    Attributes:
        gap: stops as soon as the cost is proved to be within this fraction of the optimum.
        time_limit_s: a hard cap; the limits on iterations are usually reached first.
        seed: of the annealing.
        rounds: most rounds of annealing, which ends after three in a row without improvement.
        progress: called with a `Progress` whenever the schedule or the bound gets better.
    """

    gap: float = 0.005
    time_limit_s: float = 60.0
    seed: int = 0
    rounds: int = 12
    progress: Callable[[Progress], None] | None = field(default=None, repr=False, compare=False)

    def solve(self, graph: Graph, *, budget_bytes: int) -> Solution:
        """Returns the best schedule found in any order, with a bound for every order."""
        search = FreeSearch(
            graph,
            budget_bytes=budget_bytes,
            gap=self.gap,
            time_limit_s=self.time_limit_s,
            progress=self.progress,
        )
        search.offer(range(graph.num_operators))

        with heeding_interrupts() as heeded:
            if not search.is_over:
                limit_s = min(_BOUND_SHARE * self.time_limit_s, _BOUND_LIMIT_S)
                bound_s = order_bound_s(graph, budget_bytes, time_limit_s=limit_s)
                if bound_s == math.inf:
                    return self._without_schedule(search, Status.INFEASIBLE)
                search.raise_bound(bound_s)
                with leaving_out("annealing", search.note_cut):
                    self._anneal(search)

        search.cut_short = heeded.cut_short or search.cut_short
        if search.steps is None:
            return self._without_schedule(search, Status.NO_SOLUTION)

        return Solution.of_steps(
            graph,
            budget_bytes,
            search.steps,
            lower_bound_s=search.bound_s,
            solver=repr(self),
            wall_s=search.elapsed_s,
            record=SearchRecord(gap=self.gap, is_free_order=True, cut_short=search.cut_short),
        )

    def _without_schedule(self, search: Search, status: Status) -> Solution:
        bound_s = search.bound_s
        return Solution.without_schedule(
            search.graph,
            search.budget_bytes,
            status,
            solver=repr(self),
            wall_s=search.elapsed_s,
            lower_bound_s=bound_s,
            record=SearchRecord(cut_short=search.cut_short),
        )

    def _anneal(self, search: FreeSearch) -> None:
        order, mixed = (
            OrderSearch(
                search.graph,
                budget_bytes=search.budget_bytes,
                seed=self.seed,
                order_chance=chance,
            )
            for chance in (1.0, _ORDER_CHANCE)
        )

        if not can_anneal(search, order.local):
            self._offer_fixed_order(search, search.left_s)
            return

        order_moves, mixed_moves = (
            min(max(each * search.graph.num_operators, _LEAST_MOVES), _MOST_MOVES)
            for each in (_ORDER_MOVES, _MIXED_MOVES)
        )
        start = np.arange(search.graph.num_operators)
        reordered = order.run(start, Round(order_moves, _ORDER_HOT, _ORDER_COLD), search)

        stagnant = 0
        for index in range(self.rounds):
            if search.is_over or stagnant >= _STAGNANT_ROUNDS:
                return

            before_s = math.inf if search.cost_s is None else search.cost_s
            start = self._start(search, index, reordered)
            mixed.run(start, Round(mixed_moves, _HOT[index % len(_HOT)], COLD), search)
            has_progress = search.cost_s is not None and search.cost_s < before_s * (1 - _PROGRESS)
            stagnant = 0 if has_progress else stagnant + 1

    def _start(self, search: FreeSearch, index: int, reordered: Ints) -> Ints:
        """Returns the start of a mixed round.

        The first starts from the reordered sequence, the second from the fixed-order schedule, and
        others from the best.
        """
        fixed = self._offer_fixed_order(search, _AUTO_SHARE * search.left_s) if index == 1 else None
        if fixed is not None:
            return fixed
        return reordered if index == 0 or search.steps is None else np.array(search.steps, np.int64)

    def _offer_fixed_order(self, search: FreeSearch, time_limit_s: float) -> Ints | None:
        """Offers the schedule that `Auto` finds in the graph's order, and returns it."""
        auto = Auto(gap=self.gap, time_limit_s=max(time_limit_s, 0.1), seed=self.seed)
        schedule = auto.solve(search.graph, budget_bytes=search.budget_bytes).schedule
        if schedule is None:
            return None
        search.offer(schedule.steps)
        return schedule.array


class FreeSearch(Search):
    """A search whose schedules may leave the graph's order."""

    def offer(self, steps: Sequence[int]) -> bool:
        """Makes `steps` the incumbent if they are valid in free order, fit and cost less.

        Returns whether they are valid and fit.
        """
        schedule = Schedule.from_steps(self.graph, [int(op) for op in steps])
        if validate(self.graph, schedule, budget_bytes=self.budget_bytes, is_free_order=True):
            return False
        cost_s = simulate(self.graph, schedule).cost_s
        if self.cost_s is None or cost_s < self.cost_s:
            self.cost_s, self.steps = cost_s, list(schedule.steps)
            self._report()
        return True


class OrderSearch:
    """Annealing in any order that the rules allow, of one graph under one budget."""

    def __init__(self, graph: Graph, *, budget_bytes: int, seed: int, order_chance: float) -> None:
        """Prepares the search; a move reorders with chance `order_chance`."""
        self.num_operators, self.is_backward = graph.num_operators, graph.arrays.is_backward
        rules = order_rules(graph)
        self.has_mark = len(rules.is_fixed) > graph.num_operators

        self.local = LocalSearch(
            _with_mark(graph) if self.has_mark else graph,
            budget_bytes=budget_bytes,
            seed=seed,
            loop=anneal_free,
            arguments=(pack_rules(rules), order_chance),
        )

        # with one region, the only limit on recomputing an operator is its own first computation
        if len({op.region for op in graph.operators}) <= 1:
            operators = self.local.state.operators[:-1]
            operators[:, SPAN] = operators[:, SPAN + 2] = np.arange(len(operators))

    def run(self, steps: Ints, round_: Round, search: FreeSearch) -> Ints:
        """Anneals from `steps` until the round or the search is over; returns the last state.

        Offers better schedules to `search`.
        """
        last = self.local.run(self.marked(steps), round_, should_stop=lambda: self._take(search))
        return self._unmarked(last)

    def _take(self, search: FreeSearch) -> bool:
        """Offers the best so far; True where the search is over."""
        best = self.local.best_steps
        if best is not None and (search.cost_s is None or self.local.best_cost_s < search.cost_s):
            search.offer(self._unmarked(best).tolist())
        return search.is_over

    def marked(self, steps: Ints) -> Ints:
        """Returns the steps, with the mark before the backward if the graph has one."""
        if not self.has_mark:
            return steps
        first = int(np.argmax(self.is_backward[steps]))
        return np.insert(steps, first, self.num_operators)

    def _unmarked(self, steps: Ints) -> Ints:
        return np.asarray(steps[steps < self.num_operators], np.int64)


def _with_mark(graph: Graph) -> Graph:
    """Returns the graph with one more operator, the forward's end, which computes nothing."""
    mark = Operator(
        " end of the forward",
        0.0,
        (),
        (),
        region=graph.operators[0].region,
        pinned="it is not a computation",
    )
    return replace(graph, operators=(*graph.operators, mark))
