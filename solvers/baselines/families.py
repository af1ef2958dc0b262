"""The schedules of the strongest closed-form heuristics, in seconds for 20,000 operators.

`auto` starts from those that fit, so its cost is never above theirs; `minimum` takes those with the
lowest peak. Deep networks near their least budget need segments of several blocks, which neither
relaxations nor local search find. Most families' schedules do not depend on the budget: they are
built and simulated once for all solves of a graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from remat.core.errors import SolverError
from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution
from remat.solvers.baselines.articulation import ArticulationGreedy
from remat.solvers.baselines.chen import ChenGreedy
from remat.solvers.baselines.linearized import LinearizedGreedy
from remat.solvers.baselines.per_block import PerBlock
from remat.solvers.baselines.pytorch_knapsack import PyTorchKnapsack
from remat.solvers.baselines.segment_family import Family, cheapest_that_fits
from remat.solvers.baselines.two_level import Nested
from remat.solvers.core.accounting import Ints
from remat.solvers.core.base import Solver
from remat.solvers.core.interrupt import until

KNAPSACK = PyTorchKnapsack("dp")  # the only one whose schedules depend on the budget
FAMILIES: tuple[Solver, ...] = (
    PerBlock(),
    ChenGreedy(),
    ArticulationGreedy(),
    LinearizedGreedy(),
    KNAPSACK,
)
# not used by `leanest`: greedy eviction reaches lower peaks, but fails more often if its search has
# to begin below the peaks of these schedules
NESTED = Nested()
# operators of a graph; each family simulates up to a hundred schedules, which takes seconds; a
# round number, no measurement is on record
MOST_OPERATORS = 20_000


@dataclass(frozen=True, slots=True)
class _Member:
    """A schedule of a family, simulated."""

    cost_s: float
    peak_bytes: int
    steps: Ints


@dataclass(frozen=True, slots=True)
class _Known:
    """A family's best schedules so far, and the iterator of the rest."""

    rest: Iterator[Sequence[int]]
    front: list[_Member]


def _of_class(family: Family, graph: Graph) -> Iterator[Sequence[int]]:
    with suppress(SolverError):  # the family does not apply to this graph
        yield from family.members(graph)


class Families:
    """The families' schedules for one graph, cached: about three hundred, O(E) each."""

    def __init__(self, graph: Graph) -> None:
        """Computes nothing yet; a family's schedules are built when first asked for."""
        self._graph = graph
        self._known: dict[Family, _Known] = {}

    def cheapest(self, budget_bytes: int, *, deadline: float = math.inf) -> Iterator[list[int]]:
        """Yields each family's cheapest schedule that fits, of those built by the deadline.

        Families that do not apply to the graph are skipped. Graphs of more than `MOST_OPERATORS`
        have none.
        """
        for solver in self._solvers:
            if isinstance(solver, Family):
                fitting = [
                    member
                    for member in self._members_of(solver, deadline)
                    if member.peak_bytes <= budget_bytes
                ]
                if fitting:
                    yield min(fitting, key=lambda member: member.cost_s).steps.tolist()
                continue

            found = self._knapsack(budget_bytes, deadline)
            if found.schedule is not None:
                yield list(found.schedule.steps)

    def above(
        self, budget_bytes: int, *, deadline: float = math.inf
    ) -> Iterator[tuple[float, list[int]]]:
        """Yields cost and steps of the schedules that don't fit.

        Those that cost little and exceed the budget little come first.
        """
        members = [
            member
            for solver in self._solvers
            if isinstance(solver, Family)
            for member in self._members_of(solver, deadline)
        ]

        budget = max(budget_bytes, 1)
        for member in sorted(
            members,
            key=lambda member: (
                member.cost_s / (self._graph.cost_s or 1.0) + member.peak_bytes / budget
            ),
        ):
            if member.peak_bytes > budget_bytes:
                yield member.cost_s, member.steps.tolist()

    def leanest(self, below_bytes: int, *, deadline: float = math.inf) -> Iterator[list[int]]:
        """Yields schedules of ever lower peaks, all below `below_bytes`; at most one per family."""
        for solver in self._solvers:
            if solver is NESTED:
                continue
            leanest = self._leanest_of(solver, below_bytes, deadline)
            if leanest is not None and leanest.peak_bytes < below_bytes:
                below_bytes = leanest.peak_bytes
                yield leanest.steps.tolist()

    @property
    def _solvers(self) -> tuple[Solver, ...]:
        return (*FAMILIES, NESTED) if self._graph.num_operators <= MOST_OPERATORS else ()

    def _leanest_of(self, solver: Solver, below_bytes: int, deadline: float) -> _Member | None:
        if isinstance(solver, Family):
            members = self._members_of(solver, deadline)
            return min(members, key=lambda member: member.peak_bytes, default=None)
        found = self._knapsack(below_bytes - 1, deadline)
        if found.schedule is None:
            return None
        leanest = self._knapsack(found.minimum_bytes, deadline)
        return self._simulated((leanest.schedule or found.schedule).steps)

    def _knapsack(self, budget_bytes: int, deadline: float) -> Solution:
        members = until(KNAPSACK.members(self._graph, budget_bytes), deadline)
        return cheapest_that_fits(self._graph, budget_bytes, members, solver=repr(KNAPSACK))

    def _members_of(self, family: Family, deadline: float) -> list[_Member]:
        """Returns a family's schedules that are Pareto-optimal in cost and peak.

        Only those built by the deadline count; the next call builds the rest. There are none where
        the family does not apply to the graph.
        """
        if family not in self._known:
            self._known[family] = _Known(iter(_of_class(family, self._graph)), [])
        known = self._known[family]

        for steps in until(known.rest, deadline):
            new = self._simulated(steps)
            if not any(
                old.cost_s <= new.cost_s and old.peak_bytes <= new.peak_bytes for old in known.front
            ):
                known.front[:] = [
                    old
                    for old in known.front
                    if old.cost_s < new.cost_s or old.peak_bytes < new.peak_bytes
                ] + [new]

        return known.front

    def _simulated(self, steps: Sequence[int]) -> _Member:
        simulation = simulate(self._graph, Schedule.from_steps(self._graph, list(steps)))
        return _Member(simulation.cost_s, simulation.peak_bytes, np.asarray(steps, np.int32))
