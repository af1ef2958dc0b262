"""Many short annealing runs instead of a long one: the better half goes on, colder, until few are left.

Successive halving (Karnin et al., 2013; Jamieson and Talwalkar, 2016) over runs of `local_search`. Where an annealing run
ends depends on the valley it fell into while it was hot: of 24 runs of 60,000 moves on U-Net (5 GB) half end more than 2 %
above the optimum and one within 0.2 %, and no run leaves its valley later, however long it goes on.

A *generation* starts anew; what it ends with joins the best of those before. Runs of one generation have random streams
of their own, so they may run in parallel threads and give the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import numpy as np

from ..graph import Graph
from .accounting import Ints
from .compiled import IS_COMPILED
from .local_search import LocalSearch, Round

_NUM_RUNS = 24
_NUM_KEPT = 3
_USUAL_MOVES = 60_000 if IS_COMPILED else 600  # of a run, on graphs of 100 to 400 operators
_LEAST_MOVES_AN_OPERATOR, _MOST_MOVES_AN_OPERATOR = (150, 600) if IS_COMPILED else (2, 6)
_HOT = (1e-2, 3e-3, 3e-4)  # first temperatures of new runs in turn, shares of the keep-all cost; the last keeps a good start
_COLDER = (3e-4, 1e-4, 1e-3, 3e-4, 1e-4)  # of the levels after
_COLD = 1e-6


class Restarts:
    """Generations of annealing runs on one graph under one budget.

    Attributes:
        pool: (cost in seconds, steps) of the best runs that fit, best first, each another schedule.
    """

    def __init__(self, graph: Graph, *, budget_bytes: int, seed: int = 0, threads: int = 1, moves: int | None = None) -> None:
        """Prepares the search; `moves` is the length of a run, by default what suits the graph."""
        self._graph = graph
        self._budget_bytes = budget_bytes
        self._seed = seed
        self._threads = threads
        self._num_generations = 0
        count = graph.num_operators
        self._moves = moves or min(max(_USUAL_MOVES, _LEAST_MOVES_AN_OPERATOR * count), _MOST_MOVES_AN_OPERATOR * count)
        self.pool: list[tuple[float, Ints]] = []

    def run(
        self,
        starts: Sequence[Sequence[int]],
        *,
        should_stop: Callable[[], bool] | None = None,
        found: Callable[[Sequence[int]], object] | None = None,
    ) -> None:
        """Runs one generation from `starts` in turn, within the budget or not, and adds what it finds to the pool.

        Args:
            starts: valid sequences, at least one.
            should_stop: asked often, from several threads; a true answer ends all runs.
            found: called after each level with the best of the pool.
        """
        self._num_generations += 1
        runs = [self._new_run(index, np.asarray(starts[index // len(_HOT) % len(starts)], np.int64)) for index in range(_NUM_RUNS)]
        with ThreadPoolExecutor(self._threads) as executor:
            for hot in (None, *_COLDER):
                list(executor.map(_Run.go_on, runs, repeat(hot), repeat(self._moves), repeat(should_stop)))
                runs = sorted(runs, key=lambda run: run.rank)[: max(len(runs) // 2, _NUM_KEPT)]
                self._collect(runs)
                if found is not None and self.pool:
                    found(self.pool[0][1].tolist())
                if should_stop is not None and should_stop():
                    return

    def _new_run(self, index: int, start: Ints) -> _Run:
        seed = np.random.SeedSequence([self._seed, self._num_generations, index]).generate_state(1)
        local = LocalSearch(self._graph, budget_bytes=self._budget_bytes, seed=int(seed[0]))
        return _Run(local, start, _HOT[index % len(_HOT)])

    def _collect(self, runs: Sequence[_Run]) -> None:
        found = {steps.tobytes(): (cost_s, steps) for cost_s, steps in self.pool}
        for run in runs:
            if run.local.best_steps is not None:
                found[run.local.best_steps.tobytes()] = (run.local.best_cost_s, run.local.best_steps)
        self.pool = sorted(found.values(), key=lambda pair: pair[0])[: 2 * _NUM_KEPT]


class _Run:
    """One annealing run, and where it goes on from."""

    def __init__(self, local: LocalSearch, start: Ints, hot: float) -> None:
        self.local = local
        self._current = start
        self._hot = hot

    @property
    def rank(self) -> tuple[float, float]:
        """Runs that fit come first, by cost; the others by how far they are from it."""
        return self.local.best_cost_s, self.local.least_over

    def go_on(self, hot: float | None, moves: int, should_stop: Callable[[], bool] | None) -> None:
        """Anneals from the best so far, or from the last state where none fits."""
        if should_stop is not None and should_stop():
            return
        start = self._current if self.local.best_steps is None else self.local.best_steps
        self._current = self.local.run(start, Round(moves, hot or self._hot, _COLD), should_stop=should_stop)
