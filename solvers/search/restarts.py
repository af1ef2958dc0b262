"""Many short annealing runs, recombined exactly: from given starts, then from a pool of the best.

Iterated local search (Lourenço, Martin, Stützle, 2003) over a small pool of `annealing` results.
Where an annealing run ends depends on the basin it fell into while it was hot. Starting afresh each
time discards what was good elsewhere in the schedule; a run from a member of the pool, reheated to
0.1 or 0.03 % of the keep-all cost, changes only a part of that schedule. `recombination` takes over
whatever a run does better than the best so far: a memetic algorithm (Moscato, 1989). Near the least
budget most runs end a little above the budget, at a low cost; these are recombined too.

The runs of a batch have separate random streams, so they may run in parallel threads and still give
the same answer.
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
from remat.solvers.search.annealing import COLD, LocalSearch, Round
from remat.solvers.search.recombination import Recombination

# Measured together, not one by one, on published graphs (ResNet-50 and U-Net at 5 GB).
_NUM_RUNS = 24  # in a generation
_NUM_FRESH = 12, 3  # of these from the given starts: in the first generation, in later ones
_BATCH = 2  # runs between two recombinations; they may be parallel (traced steps: U-Net)
_NUM_KEPT = 6  # schedules in the pool
_USUAL_MOVES = 60_000 if IS_COMPILED else 600  # in a run, on graphs of 100 to 400 operators
# moves in a run, per operator, at least and at most
_LEAST_MOVES_PER_OPERATOR, _MOST_MOVES_PER_OPERATOR = (150, 600) if IS_COMPILED else (2, 6)
# first temperatures of fresh runs in turn, shares of the keep-all cost; the last keeps a good start
_HOT = (1e-2, 3e-3, 3e-4)
_WARM = (1e-3, 3e-4)  # of runs from the pool, at random
_RECOMBINATION_LIMIT_S = 5.0  # seconds for one recombination; most reach their node limit earlier


@dataclass(frozen=True)
class _Found:
    """The end of a run: its best schedule that fits, or its last state where none did."""

    cost_s: float  # infinite where nothing fits
    least_over: float  # bytes over the budget, where nothing fits
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
            moves: the length of a run; None chooses it by the graph's size.
            recombines: whether the runs' results are recombined exactly.
        """
        self._graph = graph
        self._budget_bytes = budget_bytes
        self._seed = seed
        self._num_runs = self._num_generations = 0
        self._random = np.random.default_rng(seed)

        count = graph.num_operators
        self._moves = moves or min(
            max(_USUAL_MOVES, _LEAST_MOVES_PER_OPERATOR * count), _MOST_MOVES_PER_OPERATOR * count
        )

        self._best: list[_Found] = []
        self._recombination = Recombination(graph, budget_bytes=budget_bytes)
        self._recombines = recombines

    @property
    def pool(self) -> list[tuple[float, Ints]]:
        """(cost in seconds, steps) of the best schedules that fit, best first, no two alike."""
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
                them in turn, and those that fit enter the pool.
            threads: number of runs at the same time.
            should_stop: polled often, from several threads; a true answer ends all runs.
            found: called with the best of the pool and "restarts" after each run, and with
                "recombination" whenever a recombination improved it.
            deadline: in `time.perf_counter` seconds; limits recombinations.
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
            start, Round(self._moves, hot, COLD, is_close=number % 2 == 1), should_stop=should_stop
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
        """Recombines the best with each run's end, then with all others of the pool at once.

        Yields after each improvement. Ends that exceed the budget are included: most are cheap,
        exceed it little, and the best schedule may have the recomputations that they lack.
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
        """Merges `ends` into the pool: what fits by cost, then the others by bytes over budget."""
        distinct = {
            (one.cost_s, one.least_over if one.cost_s == np.inf else 0.0): one
            for one in [*ends, *self._best]
        }
        self._best = [distinct[key] for key in sorted(distinct)][:_NUM_KEPT]
