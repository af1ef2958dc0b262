"""The base class of techniques, and the solve that they see.

A technique finds schedules or raises the bound of one solve of `auto`. It says where it applies,
owns its tuned numbers, and can be switched off by name. Its results carry that name:
`Solution.found_by` and `Solution.proved_by`.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from remat.core.graph import Graph
from remat.core.schedule import keep_all_peak
from remat.solvers.auto.reuse import Shared
from remat.solvers.bounds.refinement import Refinement
from remat.solvers.core.incumbent import Search
from remat.solvers.core.memory import leaving_out
from remat.solvers.search.restarts import Restarts

_LOG = logging.getLogger(__name__)

LEAST_LARGE = 500  # operators; below, models with integers are solved quickly (published graphs)
WIDE_GAP, VERY_WIDE_GAP = 0.02, 0.05  # of the cost; above, slower techniques pay off (traced steps)


@dataclass(frozen=True)
class Span:
    """A time span that starts at `begin_s`, in `time.perf_counter` seconds."""

    begin_s: float
    seconds: float

    def at(self, share: float) -> float:
        """Returns the moment at which a share of it is over."""
        return self.begin_s + share * self.seconds


def never() -> bool:
    """Always False: no other thread waits for this one."""
    return False


@dataclass
class Solve:
    """One solve, as its techniques see it.

    Attributes:
        search: the best schedule and the best bound so far, and the time left.
        shared: results shared with solves of the same graph under other budgets.
        refinement: the stages and rows of this budget's window models.
        restarts: the pool of annealing runs.
        gap: the solve ends at this gap, a fraction of the cost.
        seed: of the annealing.
        rounds: most rounds of each kind of search.
        threads: number of threads that the techniques of this thread may use.
        by_clock: techniques are limited by time; else by counts, so that a seed gives one answer.
        without: names of techniques that are off.
        span: the time for bounds.
        is_waited_for: returns True once another thread has finished and waits for this one.
        was_hard: True where no closed-form heuristic found a schedule that fits.
    """

    search: Search
    shared: Shared
    refinement: Refinement
    restarts: Restarts
    gap: float
    seed: int
    rounds: int
    threads: int
    by_clock: bool
    without: frozenset[str] = frozenset()
    span: Span = Span(0.0, 0.0)
    is_waited_for: Callable[[], bool] = never
    was_hard: bool = False

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self.search.graph

    @property
    def is_large(self) -> bool:
        """True where prices and relaxations come before models with integers."""
        return self.graph.num_operators >= LEAST_LARGE

    @property
    def is_over(self) -> bool:
        """True where the gap is closed, the time is up, or another thread has ended."""
        return self.search.is_over or self.is_waited_for()

    def has(self, name: str) -> bool:
        """True where the technique is not switched off."""
        return name not in self.without

    def is_far(self, times: float) -> bool:
        """True where keeping everything needs more than `times` the budget."""
        peak_bytes = keep_all_peak(self.graph)
        return peak_bytes > times * self.search.budget_bytes

    def for_bounds(self, share: float) -> Self:
        """Returns this solve with `share` of the time left as the time for bounds."""
        return replace(self, span=Span(time.perf_counter(), share * self.search.left_s))

    def beside(self, is_waited_for: Callable[[], bool] = never) -> Self:
        """Returns this solve for techniques that run beside one other thread."""
        return replace(self, threads=max(1, self.threads - 1), is_waited_for=is_waited_for)


Condition = Callable[[Solve], bool]


def always(solve: Solve) -> bool:
    """True for every solve."""
    return True


def was_easy(solve: Solve) -> bool:
    """True where a closed-form heuristic found a schedule that fits."""
    return not solve.was_hard


def is_wide(solve: Solve) -> bool:
    """True where a closed-form heuristic found a schedule that fits, and the gap is wide."""
    return not solve.was_hard and not solve.search.is_within(WIDE_GAP)


@dataclass(frozen=True, kw_only=True)
class Technique(ABC):
    """One way to a better schedule or bound.

    Attributes:
        name: switches it off, and marks its results.
        when: condition for running at this place of the order, besides `applies`.
    """

    name: ClassVar[str]
    when: Condition = field(default=always, repr=False)

    def applies(self, solve: Solve) -> bool:
        """True where it may improve the schedule or the bound."""
        return True

    @abstractmethod
    def run(self, solve: Solve) -> None:
        """Offers schedules to `solve.search`, or raises its bound."""

    def __call__(self, solve: Solve) -> None:
        """Runs the technique if it is on, applies, and the solve is not over."""
        if solve.search.is_over or not (
            solve.has(self.name) and self.when(solve) and self.applies(solve)
        ):
            return

        _LOG.debug("%s", self.name)
        search = solve.search
        with search.by(self.name), leaving_out(self.name, search.note_cut):
            self.run(solve)
