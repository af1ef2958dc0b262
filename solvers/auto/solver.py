"""The solver to use: techniques in order, until the gap between bound and schedule is closed.

1. Keeping everything is optimal where it fits. A budget below the largest working set is
   infeasible.
2. `STARTING`: exhaustive search on graphs of a few operators, prices for memory on large ones,
   closed forms. Where nothing fits yet, `FITTING`: segments, repair and eviction.
3. Relaxations of large graphs, with a first search in the other threads.
4. `FIRST`: the window model, whose schedule is optimal where the transients of recomputing fit;
   other starts; a few rounds of annealing, whose cost is the cutoff of later models.
5. Bounds (`raising.BOUNDING`) in one thread, schedules (`searching.IMPROVING`) in the others; each
   side limits the other's work.

A technique is skipped where it does not apply, or by name with `without=`. What each one is worth
is measured (`experiments/results/bench_ablation.md`). The solve stops as soon as cost and bound are
within `gap`. Every bound holds for all schedules of the fixed order. Limits of nodes and iterations
end models and searches before time limits do, so with one thread a seed gives one answer on every
machine that is fast enough for the time limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import final

from remat.core.graph import Graph
from remat.core.solution import SearchRecord, Solution, Status
from remat.solvers.auto.minimum import Minimum
from remat.solvers.auto.raising import BOUNDING, FirstModel, Prices, Relaxations
from remat.solvers.auto.reuse import Shared
from remat.solvers.auto.searching import (
    IMPROVING,
    Annealing,
    ManyRestarts,
    OtherSeeds,
    is_restarted,
)
from remat.solvers.auto.starting import Eviction, Exhaustive, Families, Repair, Segments
from remat.solvers.auto.technique import Solve, Technique, is_wide, was_easy
from remat.solvers.core.accounting import working_set_bytes
from remat.solvers.core.base import Solver
from remat.solvers.core.incumbent import Search
from remat.solvers.core.interrupt import heeding_interrupts, threads_beside
from remat.solvers.core.progress import Progress
from remat.solvers.search.restarts import Restarts

STARTING: tuple[Technique, ...] = (
    Exhaustive(),
    Prices(),
    Families(),
    # one round from the best schedule that nearly fits, for a first one that fits; not measured
    Annealing(
        rounds=1,
        starts=1,
        when=lambda solve: solve.search.steps is None and bool(solve.search.starts(1)),
    ),
)
# used where nothing fits yet, before models that may take all of the time
FITTING: tuple[Technique, ...] = (Segments(), Repair(), Eviction())

RELAXING = Relaxations()
BESIDE_RELAXING: tuple[Technique, ...] = (
    Segments(when=was_easy),
    # one round that roams and one that is close: both help at the least budget (traced steps)
    Annealing(rounds=2, when=is_restarted),
    Annealing(when=lambda solve: not is_restarted(solve)),
    ManyRestarts(),
)

FIRST: tuple[Technique, ...] = (
    FirstModel(),
    Eviction(when=was_easy),
    Segments(when=is_wide),
    Repair(when=is_wide),
    # three rounds (published graphs), first from the two best starts: better than from the least
    # budget's schedule (500 random nodes)
    Annealing(
        rounds=3,
        starts=2,
        when=lambda solve: not solve.is_large or not solve.by_clock or solve.search.steps is None,
    ),
)

TECHNIQUES = (
    *STARTING, *FITTING, RELAXING, *BESIDE_RELAXING, *FIRST, *BOUNDING, *IMPROVING, OtherSeeds(),
)  # fmt: skip
# parts that can be switched off too, and the techniques that contain them
PARTS = {
    "margins": ("relaxations",),
    "rounding-cuts": ("relaxations", "window", "refinement"),
    "recombination": ("restarts", "second-restarts", "other-seeds"),
}
NAMES = tuple(dict.fromkeys([*(technique.name for technique in TECHNIQUES), *PARTS]))

# of the time left: alone, beside a search (published graphs)
_SHARE_FOR_BOUNDS_ALONE, _SHARE_FOR_BOUNDS = 0.4, 0.9
# for the least budget of an answer, even where the time limit is over; round, not measured
_LEAST_TIME_FOR_MINIMUM_S = 0.5


@final
@dataclass(frozen=True)
class Auto(Solver):
    """The package's own method; always returns an answer with a bound.

    Attributes:
        gap: stops as soon as the cost is proved to be within this fraction of the optimum.
        time_limit_s: a hard cap; most answers come long before it.
        seed: of the annealing.
        rounds: most rounds of each kind of search, which ends after a few without improvement.
        threads: with 1 the answer depends only on the seed, unless the time limit is reached; with
            more, bound and schedule are improved at the same time, and the timing matters.
        without: names of techniques to switch off, from `NAMES`.
        progress: called with a `Progress` whenever the schedule or the bound gets better.
    """

    gap: float = 0.005
    time_limit_s: float = 60.0
    seed: int = 0
    rounds: int = 12
    threads: int = 2
    without: tuple[str, ...] = ()
    progress: Callable[[Progress], None] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threads < 1:
            raise ValueError(f"threads={self.threads} was given; give at least 1")

        given: object = self.without
        if isinstance(given, str):
            raise TypeError(f"without={given!r} is a string; give a tuple, as in ('window',)")

        unknown = [name for name in self.without if name not in NAMES]
        if unknown:
            raise ValueError(
                f"auto has no technique called {', '.join(map(repr, unknown))}; "
                f"it has {', '.join(NAMES)}"
            )

    def solve(self, graph: Graph, *, budget_bytes: int) -> Solution:
        """Returns the best schedule found within `budget_bytes` with the best bound proved."""
        return self.improve(graph, budget_bytes=budget_bytes)

    def solve_near(self, graph: Graph, near: Sequence[Solution], *, budget_bytes: int) -> Solution:
        """Does the same as `solve`, starting from solutions of `graph` for other budgets."""
        bounds = (
            known.lower_bound_s
            for known in near
            if known.budget_bytes >= budget_bytes and not known.is_bound_stated
        )
        return self.improve(
            graph,
            budget_bytes=budget_bytes,
            known_steps=[known.schedule.steps for known in near if known.schedule],
            known_bound_s=max(bounds, default=0.0),
        )

    def improve(
        self,
        graph: Graph,
        *,
        budget_bytes: int,
        known_steps: Sequence[Sequence[int]] = (),
        known_bound_s: float = 0.0,
        shared: Shared | None = None,
    ) -> Solution:
        """Does the same as `solve`, starting from known schedules and bounds.

        Args:
            graph: any graph.
            budget_bytes: resident bytes included.
            known_steps: schedules of `graph`, within the budget or not.
            known_bound_s: proved for this budget or a larger one.
            shared: results shared with other solves of `graph`; this one adds to them.
        """
        search = Search(
            graph,
            budget_bytes=budget_bytes,
            gap=self.gap,
            time_limit_s=self.time_limit_s,
            progress=self.progress,
        )

        with search.by("known"):
            search.raise_bound(known_bound_s)
            for steps in known_steps:
                search.offer(steps)
        with search.by("keep-all"):
            search.offer(range(graph.num_operators))

        shared = shared or Shared(graph)
        with heeding_interrupts() as heeded:
            self._run(search, shared)

        # where nothing fits yet, the least budget is searched for even after Ctrl-C
        least = partial(shared.least, time_limit_s=max(search.left_s, _LEAST_TIME_FOR_MINIMUM_S))
        if search.steps is None:
            with search.by("least-budget"):
                search.offer(least().steps)
        return self._solution(search, least, cut_short=heeded.cut_short or search.cut_short)

    def _solution(
        self, search: Search, least: Callable[[], Minimum], *, cut_short: str
    ) -> Solution:
        record = SearchRecord(
            gap=self.gap,
            cut_short=cut_short,
            found_by=search.found_by,
            proved_by=search.proved_by,
        )
        if search.steps is not None:
            return Solution.of_steps(
                search.graph,
                search.budget_bytes,
                search.steps,
                lower_bound_s=search.bound_s,
                solver=repr(self),
                wall_s=search.elapsed_s,
                record=record,
            )

        return Solution.without_schedule(
            search.graph,
            search.budget_bytes,
            Status.INFEASIBLE if search.is_infeasible else Status.NO_SOLUTION,
            solver=repr(self),
            wall_s=search.elapsed_s,
            lower_bound_s=search.bound_s,
            record=replace(record, minimum_bytes=least().peak_bytes),
        )

    def _run(self, search: Search, shared: Shared) -> None:
        """Runs the techniques in order until the gap is closed or nothing improves any more."""
        if search.budget_bytes < working_set_bytes(search.graph):
            with search.by("working-set"):
                search.refute()
        if search.is_over:
            return

        solve = self.begin(search, shared)
        _run(STARTING, solve)
        solve.was_hard = search.steps is None
        if solve.was_hard:
            _run(FITTING, solve)

        self._relax(solve)
        _run(FIRST, solve)
        self._close(solve)

    def begin(self, search: Search, shared: Shared) -> Solve:
        """Returns the solve that techniques see; nothing has run yet."""
        without = frozenset(self.without)
        restarts = Restarts(
            search.graph,
            budget_bytes=search.budget_bytes,
            seed=self.seed,
            recombines="recombination" not in without,
        )

        return Solve(
            search,
            shared,
            shared.refinement(search.budget_bytes),
            restarts,
            gap=self.gap,
            seed=self.seed,
            rounds=self.rounds,
            threads=self.threads,
            by_clock=self.threads > 1,
            without=without,
        )

    def _relax(self, solve: Solve) -> None:
        """Solves relaxations of large graphs.

        With several threads and a schedule that fits, a search runs at the same time.
        """
        search = solve.search
        is_alone = self.threads == 1 or search.steps is None or not RELAXING.applies(solve)
        if is_alone or search.is_over or not solve.has(RELAXING.name):
            RELAXING(solve)
            return

        with threads_beside(1) as executor:
            relaxing = executor.submit(RELAXING, solve)
            _run(BESIDE_RELAXING, solve.beside(relaxing.done))
            relaxing.result()

    def _close(self, solve: Solve) -> None:
        """Raises the bound and searches for better schedules until nothing improves any more."""
        search = solve.search
        if self.threads == 1:
            _run(BOUNDING, solve.for_bounds(_SHARE_FOR_BOUNDS_ALONE))
            _run(IMPROVING, solve)
            return

        with threads_beside(1) as executor:
            bounding = executor.submit(_run, BOUNDING, solve.for_bounds(_SHARE_FOR_BOUNDS))
            known = search.num_starts
            _run(IMPROVING, solve.beside())
            OtherSeeds()(solve.beside(bounding.done))
            bounding.result()
        if search.num_starts > known:
            _run(IMPROVING, solve)


def _run(techniques: Iterable[Technique], solve: Solve) -> None:
    for technique in techniques:
        technique(solve)
