"""The state of a search for one graph and budget: best schedule, best bound, and the time left."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.validate import validate
from remat.solvers.core.interrupt import is_interrupted
from remat.solvers.core.pace import pace_s
from remat.solvers.core.progress import Progress, ProgressCallback

# share of the time limit; the rest is for checking the answer; no measurement is on record
_SHARE = 0.95
# passes over the graph (`pace`): to check the answer, and for the longest part of a solve that does
# not check the clock; with them a limit of 5 s holds on a chain of a million operators and a
# complete graph of 1,500
_CHECK_PASSES, _BLIND_PASSES = 130, 160
_MOST_STARTS = 8  # schedules over the budget that are kept; a round number, not measured
_LOGGER = logging.getLogger(__name__)


class Search:
    """The best schedule and the best bound so far.

    Methods offer steps; valid ones that cost less become the incumbent. Offered steps over the
    budget serve as starts for local search; those that cost little and exceed it little come first.
    The incumbent and the bound carry the name of the technique they come from.

    `cut_short` says what had to be left out, in the words of `Solution.cut_short`.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        budget_bytes: int,
        gap: float,
        time_limit_s: float,
        progress: ProgressCallback | None = None,
    ) -> None:
        """Starts the clock."""
        self.graph = graph
        self.budget_bytes = budget_bytes
        self.gap = gap

        self.started_s = time.perf_counter()
        pass_s = pace_s(graph)
        self.deadline_s = self.started_s + min(
            _SHARE * time_limit_s, time_limit_s - _CHECK_PASSES * pass_s
        )
        self._blind_s = _BLIND_PASSES * pass_s

        self.progress = progress
        self.bound_s = graph.cost_s
        self.cost_s: float | None = None
        self.steps: list[int] | None = None
        self.cut_short = ""
        self.num_starts = 0  # offered so far
        self.found_by = self.proved_by = ""
        self.is_infeasible = False  # proved

        self._origin = threading.local()
        self._starts: list[tuple[float, list[int]]] = []
        self._lock = threading.RLock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return time.perf_counter() - self.started_s

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; 0 after Ctrl-C."""
        return 0.0 if is_interrupted() else self.deadline_s - time.perf_counter()

    @property
    def is_proved(self) -> bool:
        """True where the best schedule is within the gap of the bound."""
        return self.is_within(self.gap)

    def is_within(self, gap: float) -> bool:
        """True where the best schedule is within `gap`, a fraction of its cost, of the bound."""
        return self.cost_s is not None and self.cost_s - self.bound_s <= (gap + 1e-9) * self.cost_s

    @property
    def is_over(self) -> bool:
        """True where the gap is closed, no schedule can fit, or the time is nearly up."""
        return self.is_proved or self.is_infeasible or self.left_s <= self._blind_s

    @contextmanager
    def by(self, name: str) -> Iterator[None]:
        """Credits schedules and bounds that this thread finds inside to the technique `name`."""
        before = self._name
        self._origin.name = name
        try:
            yield
        finally:
            self._origin.name = before

    @property
    def _name(self) -> str:
        return getattr(self._origin, "name", "")

    def note_cut(self, reason: str) -> None:
        """Adds a reason to `cut_short`."""
        with self._lock:
            if reason not in self.cut_short:
                self.cut_short = f"{self.cut_short}; {reason}" if self.cut_short else reason

    def refute(self) -> None:
        """Records a proof that no schedule fits."""
        with self._lock:
            self.is_infeasible, self.proved_by = True, self._name

    def starts(self, count: int) -> list[list[int]]:
        """Returns the best offered steps that exceed the budget, no two of equal cost and peak."""
        return [steps for _, steps in self._starts[:count]]

    def _add_start(self, steps: Sequence[int], cost_s: float, peak_bytes: int) -> None:
        distance = cost_s / max(self.graph.cost_s, 1e-300) + peak_bytes / max(self.budget_bytes, 1)
        with self._lock:
            if all(distance != known for known, _ in self._starts):
                self.num_starts += 1
                self._starts = sorted([*self._starts, (distance, list(steps))])[:_MOST_STARTS]

    def offer(self, steps: Sequence[int]) -> bool:
        """Makes `steps` the incumbent if they fit and cost less; returns whether they fit."""
        schedule = Schedule.from_steps(self.graph, [int(op) for op in steps])
        simulation = simulate(self.graph, schedule)
        if not keeps_regions(self.graph, schedule.steps):
            return False
        if simulation.peak_bytes > self.budget_bytes:
            self._add_start(schedule.steps, simulation.cost_s, simulation.peak_bytes)
            return False

        with self._lock:
            if self.cost_s is None or simulation.cost_s < self.cost_s:
                self.cost_s, self.steps = simulation.cost_s, list(schedule.steps)
                self.found_by = self._name
                self._report()
        return True

    def raise_bound(self, bound_s: float) -> None:
        """Raises the bound to `bound_s` (finite or -inf) where that is higher."""
        assert bound_s < math.inf, f"{bound_s} is no bound on the cost of a schedule"
        with self._lock:
            if bound_s > self.bound_s:
                self.bound_s, self.proved_by = float(bound_s), self._name
                self._report()

    def _report(self) -> None:
        moment = Progress(self.elapsed_s, self.cost_s, self.bound_s, self.found_by, self.proved_by)
        _LOGGER.debug("%s", moment)
        if self.progress is not None:
            self.progress(moment)


def keeps_regions(graph: Graph, steps: Sequence[int]) -> bool:
    """True where no step leaves its region; O(V) for graphs of one region, as most are."""
    is_one = len({op.region for op in graph.operators}) <= 1
    return is_one or not validate(graph, Schedule.from_steps(graph, list(steps)))
