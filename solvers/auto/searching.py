"""Techniques that search: annealing, restarts, neighbourhoods, other seeds.

They start from known schedules and look for cheaper ones until nothing improves.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np

from remat.core.graph import Graph
from remat.solvers.auto.technique import Solve, Technique
from remat.solvers.core.compiled import COMPILER_S, IS_COMPILED, NOT_COMPILED
from remat.solvers.core.incumbent import Search
from remat.solvers.search.annealing import COLD, LocalSearch, Round
from remat.solvers.search.neighbourhood import Kind, Neighbourhood
from remat.solvers.search.restarts import Restarts

MOST_OPERATORS_TO_RESTART = 3_000  # above, one long run finds better schedules (traced steps)
# moves in a round: the most, a number for any graph, and more per operator; not measured
_MOST_MOVES = 200_000 if IS_COMPILED else 2_500
_LEAST_MOVES, _MOVES_PER_OPERATOR = 20_000, 500
# relative improvement below which a round counts as stagnant; no measurement is on record
_PROGRESS = 1e-4
_STARTS = 3  # schedules that nearly fit to start from (published graphs)
_LOGGER = logging.getLogger(__name__)


def num_moves(graph: Graph, most: int = _MOST_MOVES) -> int:
    """Returns the number of moves in one round of annealing."""
    return min(most, _LEAST_MOVES + _MOVES_PER_OPERATOR * graph.num_operators)


def can_anneal(search: Search, local: LocalSearch) -> bool:
    """True where the loops are compiled or there is time for it; else notes why not."""
    is_ready = local.is_ready or search.left_s >= COMPILER_S
    if not is_ready:
        search.note_cut(NOT_COMPILED)
        _LOGGER.warning(
            "no annealing: compiling it takes up to %.0f s once, and %.1f s are left",
            COMPILER_S,
            search.left_s,
        )
    return is_ready


def take(local: LocalSearch, search: Search) -> bool:
    """Offers the best of an annealing run; True where the search is over."""
    if local.best_steps is not None and (
        search.cost_s is None or local.best_cost_s < search.cost_s
    ):
        search.offer(local.best_steps.tolist())
    return search.is_over


def is_restarted(solve: Solve) -> bool:
    """True where many short runs find better schedules than a long one."""
    return solve.graph.num_operators <= MOST_OPERATORS_TO_RESTART


@final
@dataclass(frozen=True, kw_only=True)
class Annealing(Technique):
    """Rounds of annealing from schedules that nearly fit, then from the best, until they stagnate.

    Attributes:
        rounds: most rounds; None takes the solver's number.
        starts: number of schedules that nearly fit to start from.
        stagnant_rounds: ends after this many rounds in a row without improvement; not measured.
        schedule: first temperature (a share of the cost of keeping everything) and share of the
            moves, of each round in turn (tuned on published graphs).
        schedule_if_large: the same on large graphs, where early schedules are good and are cooled
            first (tuned on traced steps).
        most_moves_if_large: in one round on large graphs; a shorter high-temperature round ends
            worse than it began (tuned on traced steps).
    """

    name: ClassVar[str] = "annealing"

    rounds: int | None = None
    starts: int = 0
    stagnant_rounds: int = 3
    schedule: tuple[tuple[float, float], ...] = (1e-3, 1.0), (3e-4, 1.0), (1e-3, 1.0), (1e-4, 1.0)
    schedule_if_large: tuple[tuple[float, float], ...] = (
        (1e-5, 0.25), (1e-3, 1.0), (3e-4, 1.0), (1e-3, 1.0),
    )  # fmt: skip
    most_moves_if_large: int = 4_000_000 if IS_COMPILED else 2_500

    def run(self, solve: Solve) -> None:
        """Offers the best of each round."""
        search = solve.search
        local = LocalSearch(solve.graph, budget_bytes=search.budget_bytes, seed=solve.seed)
        if not can_anneal(search, local):
            return

        if search.steps is not None and search.cost_s is not None:
            local.best_cost_s, local.best_steps = search.cost_s, np.array(search.steps)

        starts, stagnant = self._starts(solve), 0
        for index in range(solve.rounds if self.rounds is None else self.rounds):
            before_s = local.best_cost_s
            is_fresh = index < len(starts) or local.best_steps is None
            plain = search.steps or range(solve.graph.num_operators)
            start = starts[index % len(starts)] if is_fresh and starts else plain

            local.run(
                np.asarray(start),
                self._round(solve, index),
                should_stop=lambda: take(local, search) or solve.is_waited_for(),
            )

            is_over = take(local, search) or solve.is_waited_for()
            stagnant = 0 if local.best_cost_s < before_s * (1 - _PROGRESS) else stagnant + 1
            if is_over or stagnant >= self.stagnant_rounds + len(starts):
                return

    def _starts(self, solve: Solve) -> list[list[int]]:
        best, nearly = solve.search.steps, solve.search.starts(self.starts)
        return [best, *nearly] if best is not None and not is_restarted(solve) else nearly

    def _round(self, solve: Solve, index: int) -> Round:
        is_long = not is_restarted(solve)
        schedule = self.schedule_if_large if is_long else self.schedule
        hot, share = schedule[index % len(schedule)]
        moves = num_moves(solve.graph, self.most_moves_if_large if is_long else _MOST_MOVES)
        return Round(round(share * moves), hot, COLD, is_close=index % 2 == 1)


def restart(
    solve: Solve,
    restarts: Restarts,
    starts: Callable[[int], Sequence[Sequence[int]]],
    *,
    stagnant_generations: int = 2,
    exact_share: float = 0.2,
) -> None:
    """Runs generations of annealing runs until they stagnate.

    The defaults were measured on published graphs.

    Args:
        solve: schedules are offered to it.
        restarts: the pool of runs.
        starts: generation -> schedules to start from.
        stagnant_generations: ends after this many in a row without improvement.
        exact_share: share of the time left that is reserved for exact search afterwards.
    """
    search = solve.search
    local = LocalSearch(solve.graph, budget_bytes=search.budget_bytes, seed=solve.seed)
    if not can_anneal(search, local):
        return

    until_s = search.elapsed_s + (1 - exact_share) * search.left_s
    stagnant = 0

    def is_over() -> bool:
        return solve.is_over or search.elapsed_s > until_s

    def offer(steps: Sequence[int], name: str) -> None:
        with search.by(name):
            search.offer(steps)

    for generation in range(solve.rounds):
        before_s = math.inf if search.cost_s is None else search.cost_s
        restarts.run(
            starts(generation),
            threads=solve.threads,
            should_stop=is_over,
            found=offer,
            deadline=search.started_s + until_s,
        )

        is_better = search.cost_s is not None and search.cost_s < before_s * (1 - _PROGRESS)
        stagnant = 0 if is_better else stagnant + 1
        if stagnant >= stagnant_generations or is_over():
            return


def _starts_of(solve: Solve, *, with_best: bool) -> list[Sequence[int]]:
    """Returns the starts: keeping everything, schedules that nearly fit, and the best.

    The best comes first where keeping everything needs more than four times the budget: annealing
    from keeping everything then takes longest, and often finds nothing that fits (traced steps).
    """
    search = solve.search
    best = [search.steps] if search.steps is not None and with_best else []
    others = [range(solve.graph.num_operators), *search.starts(_STARTS)]
    return [*best, *others] if solve.is_far(4.0) else [*others, *best]


@final
@dataclass(frozen=True, kw_only=True)
class ManyRestarts(Technique):
    """Many short annealing runs, recombined exactly (`restarts`)."""

    name: ClassVar[str] = "restarts"

    def applies(self, solve: Solve) -> bool:
        """True except on the largest graphs and where another thread waits."""
        return is_restarted(solve) and not solve.is_waited_for()

    def run(self, solve: Solve) -> None:
        """Offers the best of each run and of each recombination."""
        restart(solve, solve.restarts, lambda _: _starts_of(solve, with_best=True))


@final
@dataclass(frozen=True, kw_only=True)
class SecondRestarts(Technique):
    """Restarts once more on small graphs, in a separate pool that begins without the best.

    Runs are very fast there, and the first pool may have ended in a poor basin.
    """

    name: ClassVar[str] = "second-restarts"

    def applies(self, solve: Solve) -> bool:
        """True on small graphs."""
        return not solve.is_large

    def run(self, solve: Solve) -> None:
        """Offers the best of each run and of each recombination."""
        restarts = Restarts(
            solve.graph,
            budget_bytes=solve.search.budget_bytes,
            seed=solve.seed + 1,
            recombines=solve.has("recombination"),
        )
        restart(solve, restarts, lambda index: _starts_of(solve, with_best=index > 0))


@final
@dataclass(frozen=True, kw_only=True)
class Neighbourhoods(Technique):
    """Exact search around the best schedule, one part at a time (`neighbourhood`).

    Measured on published graphs.

    Attributes:
        most: neighbourhoods of each kind at most.
        limit_s: time limit of one neighbourhood, in seconds.
    """

    name: ClassVar[str] = "neighbourhoods"

    most: int = 8
    limit_s: float = 5.0

    def applies(self, solve: Solve) -> bool:
        """True except on the largest graphs."""
        return is_restarted(solve)

    def run(self, solve: Solve) -> None:
        """Offers improved schedules."""
        search = solve.search
        neighbourhood = Neighbourhood(solve.graph, search.budget_bytes, solve.seed)
        for _ in range(min(self.most, solve.rounds)):
            if search.steps is None or solve.is_over:
                return

            steps = neighbourhood.improve(
                search.steps,
                max_rounds=len(Kind),
                should_stop=lambda: solve.is_over,
                time_limit_s=min(self.limit_s, search.left_s),
            )
            search.offer(steps)


IMPROVING: tuple[Technique, ...] = (
    ManyRestarts(),
    SecondRestarts(),
    Neighbourhoods(),
    Annealing(starts=_STARTS, when=lambda solve: not is_restarted(solve)),
)


@final
@dataclass(frozen=True, kw_only=True)
class OtherSeeds(Technique):
    """The search with other seeds, one after the other, while the bound thread works."""

    name: ClassVar[str] = "other-seeds"

    def run(self, solve: Solve) -> None:
        """Runs all of `IMPROVING` once per seed."""
        search = solve.search
        local = LocalSearch(solve.graph, budget_bytes=search.budget_bytes, seed=solve.seed)

        for seed in itertools.count(solve.seed + 2, 2):
            if solve.is_over or not local.is_ready:
                return

            restarts = Restarts(
                solve.graph,
                budget_bytes=search.budget_bytes,
                seed=seed,
                recombines=solve.has("recombination"),
            )

            other = replace(solve, seed=seed, restarts=restarts)
            for technique in IMPROVING:
                technique(other)
