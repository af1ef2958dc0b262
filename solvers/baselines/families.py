"""The closed-form families together.

What the heuristics of the field give for a budget, in seconds at 20,000 operators.

`auto` takes them over where they fit, so that it is never above one of them, and starts from them;
`minimum` takes the leanest. Deep networks near their least budget need segments of several blocks,
which neither a relaxation nor moves find. Most families' schedules are the same whatever the
budget: they are made and simulated once for all solves of a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from remat.core.errors import SolverError
from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.solvers.baselines.articulation import ArticulationGreedy
from remat.solvers.baselines.chen import ChenGreedy
from remat.solvers.baselines.linearized import LinearizedGreedy
from remat.solvers.baselines.per_block import PerBlock
from remat.solvers.baselines.pytorch_knapsack import PyTorchKnapsack
from remat.solvers.baselines.segment_family import Family
from remat.solvers.baselines.two_level import Nested
from remat.solvers.core.accounting import Ints
from remat.solvers.core.base import Solver

KNAPSACK = PyTorchKnapsack("dp")  # whose schedules close in on the budget
FAMILIES: tuple[Solver, ...] = (
    PerBlock(),
    ChenGreedy(),
    ArticulationGreedy(),
    LinearizedGreedy(),
    KNAPSACK,
)
# not among the leanest: the greedy finds leaner ones, but fewer where it is looked for below the
# peaks of these
NESTED = Nested()
MOST_OPERATORS = 20_000  # each simulates up to a hundred schedules


@dataclass(frozen=True, slots=True)
class _Member:
    """A schedule of a family, simulated."""

    cost_s: float
    peak_bytes: int
    steps: Ints


class Families:
    """What the families give for one graph, whose schedules are kept.

    O(E) each, about three hundred in all.
    """

    def __init__(self, graph: Graph) -> None:
        """Prepares; a family's schedules are made when they are first asked for."""
        self._graph = graph
        self._members: dict[Family, list[_Member]] = {}

    def cheapest(self, budget_bytes: int) -> Iterator[list[int]]:
        """Yields the cheapest steps of each family that fit.

        None on larger graphs, or outside a family's class.
        """
        for solver in self._solvers:
            with suppress(SolverError):
                if isinstance(solver, Family):
                    fitting = [
                        member
                        for member in self._members_of(solver)
                        if member.peak_bytes <= budget_bytes
                    ]
                    if fitting:
                        yield min(fitting, key=lambda member: member.cost_s).steps.tolist()
                    continue
                found = solver.solve(self._graph, budget_bytes=budget_bytes)
                if found.schedule is not None:
                    yield list(found.schedule.steps)

    def above(self, budget_bytes: int) -> Iterator[tuple[float, list[int]]]:
        """Yields cost and steps of the members that don't fit, those first that cost little and are
        little above the budget.
        """
        members = [
            member
            for solver in self._solvers
            if isinstance(solver, Family)
            for member in self._known(solver)
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

    def leanest(self, below_bytes: int) -> Iterator[list[int]]:
        """Yields the steps of each family's member of the lowest peak, where it is below so many
        bytes, ever lower.
        """
        for solver in self._solvers:
            if solver is NESTED:
                continue
            with suppress(SolverError):
                leanest = self._leanest_of(solver, below_bytes)
                if leanest is not None and leanest.peak_bytes < below_bytes:
                    below_bytes = leanest.peak_bytes
                    yield leanest.steps.tolist()

    @property
    def _solvers(self) -> tuple[Solver, ...]:
        return (*FAMILIES, NESTED) if self._graph.num_operators <= MOST_OPERATORS else ()

    def _leanest_of(self, solver: Solver, below_bytes: int) -> _Member | None:
        if isinstance(solver, Family):
            return min(self._members_of(solver), key=lambda member: member.peak_bytes, default=None)
        found = solver.solve(self._graph, budget_bytes=below_bytes - 1)
        if found.schedule is None:
            return None
        leanest = solver.solve(self._graph, budget_bytes=found.minimum_bytes)
        return self._simulated(leanest.schedule.steps) if leanest.schedule is not None else None

    def _known(self, family: Family) -> list[_Member]:
        """The family's members; none outside its class."""
        with suppress(SolverError):
            return self._members_of(family)
        return []

    def _members_of(self, family: Family) -> list[_Member]:
        """The schedules of a family than which none of it is both cheaper and leaner."""
        if family not in self._members:
            front: list[_Member] = []
            for steps in family.members(self._graph):
                new = self._simulated(steps)
                if not any(
                    old.cost_s <= new.cost_s and old.peak_bytes <= new.peak_bytes for old in front
                ):
                    front = [
                        old
                        for old in front
                        if old.cost_s < new.cost_s or old.peak_bytes < new.peak_bytes
                    ] + [new]
            self._members[family] = front
        return self._members[family]

    def _simulated(self, steps: Sequence[int]) -> _Member:
        simulation = simulate(self._graph, Schedule.from_steps(self._graph, list(steps)))
        return _Member(simulation.cost_s, simulation.peak_bytes, np.asarray(steps, np.int32))
