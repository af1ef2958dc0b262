"""Many short annealing runs, recombined exactly.

Fresh ones first, then from what they found, warmed up and cooled again.

Iterated local search (Lourenço, Martin, Stützle, 2003) over a small pool of `annealing` results.
Where an annealing run ends depends on the basin it fell into while it was hot. Starting anew each
time throws away what was good elsewhere in the schedule; a run from one of the best, warmed up to
0.1 or 0.03 % of the keep-all cost, changes a part of it. Wherever a run ends, what it does better
than the best is taken over by `recombination`: a memetic algorithm (Moscato, 1989). Near the least
budget most runs end a little above it, and cheap; these count as well.

Runs of one batch have random streams of their own, so they may run in parallel threads and give the
same answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.solvers.core.accounting import Ints
from remat.solvers.core.compiled import IS_COMPILED
from remat.solvers.core.interrupt import threads_beside
from remat.solvers.search.annealing import LocalSearch, Round
from remat.solvers.search.recombination import Recombination

_NUM_RUNS = 24  # of a generation
_NUM_FRESH = 12, 3  # of them from the starts: in the first generation, in those after
_BATCH = 2
_NUM_KEPT = 6
_USUAL_MOVES = 60_000 if IS_COMPILED else 600  # of a run, on graphs of 100 to 400 operators
_LEAST_MOVES_AN_OPERATOR, _MOST_MOVES_AN_OPERATOR = (150, 600) if IS_COMPILED else (2, 6)
# first temperatures of fresh runs in turn, shares of the keep-all cost; the last keeps a good start
_HOT = (1e-2, 3e-3, 3e-4)
_WARM = (1e-3, 3e-4)  # of runs from the pool, at random
_COLD = 1e-6
_RECOMBINATION_LIMIT_S = 5.0  # of one; most are cut by nodes before


@dataclass(frozen=True)
class _Found:
    """Where a run ended: its best that fits, or its last state where nothing did."""

    cost_s: float  # infinite where nothing fits
    least_over: float  # then, bytes over the budget
    steps: Ints


class Restarts:
    """Generations of annealing runs on one graph under one budget."""

    def __init__(
        self,
        graph: Graph,
        *,
        budget_bytes: int,
        seed: int = 0,
        moves: int | None = None,
        recombines: bool = True,
    ) -> None:
        """Prepares the search.

        Args:
            graph: any graph.
            budget_bytes: resident bytes included.
            seed: of all runs.
            moves: the length of a run, by default what suits the graph.
            recombines: whether what runs find is recombined exactly.
        """
        self._graph = graph
        self._budget_bytes = budget_bytes
        self._seed = seed
        self._num_runs = self._num_generations = 0
        self._random = np.random.default_rng(seed)
        count = graph.num_operators
        self._moves = moves or min(
            max(_USUAL_MOVES, _LEAST_MOVES_AN_OPERATOR * count), _MOST_MOVES_AN_OPERATOR * count
        )
        self._best: list[_Found] = []
        self._recombination = Recombination(graph, budget_bytes=budget_bytes)
        self._recombines = recombines

    @property
    def pool(self) -> list[tuple[float, Ints]]:
        """(cost in seconds, steps) of the best that fit, best first, each of another cost."""
        return [(found.cost_s, found.steps) for found in self._best if found.cost_s < np.inf]

    def run(
        self,
        starts: Sequence[Sequence[int]],
        *,
        threads: int = 1,
        should_stop: Callable[[], bool] | None = None,
        found: Callable[[Sequence[int], str], object] | None = None,
        deadline: float = math.inf,
    ) -> None:
        """Runs one generation and adds what it finds to the pool.

        Args:
            starts: valid sequences, at least one, within the budget or not; fresh runs start from
                them in turn, and those that fit are of the pool.
            threads: that run at the same time.
            should_stop: asked often, from several threads; a true answer ends all runs.
            found: called with the best of the pool and "restarts" after each run, and with
                "recombination" whenever recombining made it better.
            deadline: of `time.perf_counter`, in seconds: what caps recombinations.
        """
        self._keep_best([end for end in map(self._end_at, starts) if end.cost_s < np.inf])
        num_fresh = _NUM_FRESH[min(self._num_generations, 1)]
        self._num_generations += 1
        with threads_beside(threads) as executor:
            for first in range(0, _NUM_RUNS, _BATCH):
                batch = [
                    self._new_start(index, num_fresh, starts)
                    for index in range(first, first + _BATCH)
                ]
                seeds = range(self._num_runs, self._num_runs + _BATCH)
                self._num_runs += _BATCH
                begins, hots = zip(*batch, strict=True)
                ends = []
                for end in executor.map(self._anneal, begins, hots, seeds, repeat(should_stop)):
                    ends.append(end)
                    self._keep_best([end])
                    self._report(found, "restarts")
                for _ in self._recombinations(ends, deadline, should_stop):
                    self._report(found, "recombination")
                if should_stop is not None and should_stop():
                    return

    def _report(self, found: Callable[[Sequence[int], str], object] | None, name: str) -> None:
        if found is not None and self.pool:
            found(self.pool[0][1].tolist(), name)

    def _new_start(
        self, index: int, num_fresh: int, starts: Sequence[Sequence[int]]
    ) -> tuple[Ints, float]:
        """Returns where the next run of a generation starts and its first temperature."""
        if index < num_fresh:
            start = starts[(index // len(_HOT) + self._num_generations - 1) % len(starts)]
            return np.asarray(start, np.int64), _HOT[index % len(_HOT)]
        chosen = self._best[int(self._random.integers(len(self._best)))]
        return chosen.steps, float(self._random.choice(_WARM))

    def _anneal(
        self, start: Ints, hot: float, number: int, should_stop: Callable[[], bool] | None
    ) -> _Found:
        seed = np.random.SeedSequence([self._seed, number]).generate_state(1)
        local = LocalSearch(self._graph, budget_bytes=self._budget_bytes, seed=int(seed[0]))
        if should_stop is not None and should_stop():
            return _Found(np.inf, np.inf, start)
        last = local.run(
            start, Round(self._moves, hot, _COLD, is_close=number % 2 == 1), should_stop=should_stop
        )
        return _Found(
            local.best_cost_s,
            local.least_over,
            last if local.best_steps is None else local.best_steps,
        )

    def _end_at(self, steps: Sequence[int]) -> _Found:
        simulation = simulate(
            self._graph, Schedule.from_steps(self._graph, [int(op) for op in steps])
        )
        over = simulation.peak_bytes - self._budget_bytes
        return _Found(
            simulation.cost_s if over <= 0 else np.inf, max(over, 0), np.asarray(steps, np.int64)
        )

    def _recombinations(
        self, ends: Sequence[_Found], deadline: float, should_stop: Callable[[], bool] | None
    ) -> Iterator[None]:
        """Recombines the best with where each run ended, then with the others of the pool at once.

        Yields where it is better.

        Ends that do not fit count as well: most are cheap and little above the budget, and what
        they lack the best may have.
        """
        if not self._recombines:
            return

        rest = [found.steps for found in self._best[1:]]
        for others in (*([end.steps] for end in ends), rest):
            best, left_s = (
                self._best[0],
                min(_RECOMBINATION_LIMIT_S, deadline - time.perf_counter()),
            )
            if best.cost_s == np.inf or left_s <= 0 or (should_stop is not None and should_stop()):
                return
            part = (
                self._recombination.improve(best.steps, others, time_limit_s=left_s)
                if others
                else None
            )
            if part is not None and part.cost_s < best.cost_s:
                self._keep_best([_Found(part.cost_s, 0.0, part.steps)])
                yield

    def _keep_best(self, ends: Sequence[_Found]) -> None:
        """What fits comes first, by cost; the others by how far they are from it."""
        distinct = {
            (one.cost_s, one.least_over if one.cost_s == np.inf else 0.0): one
            for one in [*ends, *self._best]
        }
        self._best = [distinct[key] for key in sorted(distinct)][:_NUM_KEPT]
