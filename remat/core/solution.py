"""Solutions: a schedule, its cost and peak, and the bound on how far it is from optimal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from remat.core import limits, serialize
from remat.core.budget import describe_bytes
from remat.core.errors import BudgetError, ScheduleError
from remat.core.graph import FORMAT_VERSION, Graph
from remat.core.limits import shortened, shown
from remat.core.outline import first_difference
from remat.core.schedule import Schedule, simulate
from remat.core.validate import Rule, validate


class Status(StrEnum):
    """The possible outcomes of a solver. The four are never merged."""

    OPTIMAL = "optimal"  # a schedule whose cost is proved to be within the requested gap
    FEASIBLE = "feasible"  # a schedule within the budget
    INFEASIBLE = "infeasible"  # proved that no schedule fits
    NO_SOLUTION = "no_solution"  # stopped by a limit, or the method's schedules do not fit


@dataclass(frozen=True, slots=True)
class SearchRecord:
    """What a solver tells of its search, besides the schedule and the bound.

    Attributes:
        gap: the gap that was requested; a cost within it is optimal.
        is_free_order: True if first computations may leave the graph's order.
        minimum_bytes: the smallest budget for which a schedule is known; 0 if it did not look.
        cut_short: what ended the search before its own limits; empty if nothing did.
        found_by: the technique that found the schedule; empty if there is only one.
        proved_by: the technique that proved the bound, or that nothing fits; empty likewise.
    """

    gap: float = 0.0
    is_free_order: bool = False
    minimum_bytes: int = 0
    cut_short: str = ""
    found_by: str = ""
    proved_by: str = ""


@dataclass(frozen=True)
class Solution:
    """The answer of a solver. `cost_s` and `peak_bytes` come from the simulator.

    Attributes:
        status: the outcome.
        budget_bytes: the budget it was solved for.
        schedule: the schedule, or None if there is none.
        peak_bytes: simulated peak; 0 for `INFEASIBLE` and `NO_SOLUTION`.
        cost_s: cost of all steps, recomputations included; 0 without a schedule.
        keep_all_cost_s: cost of computing every operator once.
        lower_bound_s: no schedule within the budget costs less (in the graph's order, unless
            `is_free_order`). It is proved, or stated by the file that was read
            (`is_bound_stated`).
        minimum_bytes: the smallest budget for which a schedule is known; 0 if the solver did not
            look.
        solver: the configuration of the solver.
        wall_s: how long the solver ran.
        fingerprint: that of the graph it was solved for.
        is_free_order: True if first computations may leave the graph's order.
        cut_short: what ended the search before its own limits, such as Ctrl-C; empty if nothing
            did, or if the answer was proved nevertheless.
        found_by: the technique of `auto` that found the schedule; empty for other solvers.
        proved_by: the technique of `auto` that proved the bound, or that nothing fits. Empty if the
            bound of `auto` is `keep_all_cost_s`, and always for other solvers. If the solution was
            read from a file, the name is stated by the file, like the bound.
        is_bound_stated: True if the bound was read from a file and not proved here.
        outline: of the graph it was solved for, to name what differs in another graph.
    """

    status: Status
    budget_bytes: int
    schedule: Schedule | None
    peak_bytes: int
    cost_s: float
    keep_all_cost_s: float
    lower_bound_s: float
    minimum_bytes: int = 0
    solver: str = ""
    wall_s: float = 0.0
    fingerprint: str = ""
    is_free_order: bool = False
    cut_short: str = ""
    found_by: str = ""
    proved_by: str = ""
    version: int = field(default=FORMAT_VERSION)
    is_bound_stated: bool = field(default=False, compare=False)
    outline: tuple[int, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.version != FORMAT_VERSION:
            raise ScheduleError(
                f"this solution has format version {shown(self.version)}; this remat reads version "
                f"{FORMAT_VERSION}"
            )

        self._check_numbers()
        if (self.schedule is not None) != self.is_solved:
            raise ScheduleError(
                f"a solution with status {self.status} has "
                f"{'no' if self.schedule is None else 'a'} schedule"
            )

    def _check_numbers(self) -> None:
        for size in (self.peak_bytes, self.minimum_bytes):
            if fault := limits.size_fault(size):
                raise ScheduleError(f"a solution has {fault}")

        for name in ("cost_s", "keep_all_cost_s", "lower_bound_s", "wall_s"):
            if fault := limits.sum_fault(getattr(self, name)):
                raise ScheduleError(f"a solution has {name} {fault}")

        texts = [self.solver, self.fingerprint, self.cut_short, self.found_by, self.proved_by]
        if fault := limits.budget_fault(self.budget_bytes) or limits.texts_fault(texts):
            raise ScheduleError(f"a solution has {fault}")

    @property
    def techniques(self) -> str:
        """The techniques that found the schedule and proved the bound or infeasibility.

        Empty for solvers with one technique.
        """
        if self.status is Status.INFEASIBLE:
            return f"proved infeasible by {self.proved_by}" if self.proved_by else ""

        proof = self.proved_by or "the cost of computing everything once"
        return f"found by {self.found_by}, bound by {proof}" if self.found_by else ""

    @property
    def is_solved(self) -> bool:
        """True if there is a schedule."""
        return self.status in (Status.OPTIMAL, Status.FEASIBLE)

    @property
    def overhead(self) -> float:
        """Extra cost over keeping everything, as a fraction: 0.12 is 12 % more."""
        return (
            max(0.0, self.cost_s / self.keep_all_cost_s - 1)
            if self.keep_all_cost_s and self.is_solved
            else 0.0
        )

    @property
    def bound_source(self) -> str:
        """Where the bound comes from: `proved`, or `stated by the file`."""
        return "stated by the file" if self.is_bound_stated else "proved"

    @property
    def overhead_bound(self) -> float:
        """Lower bound on the overhead of all schedules, as a fraction; see `bound_source`."""
        return self.lower_bound_s / self.keep_all_cost_s - 1 if self.keep_all_cost_s else 0.0

    @property
    def gap(self) -> float:
        """The most that the cost can be above the optimum, as a fraction of the cost."""
        return max(0.0, 1 - self.lower_bound_s / self.cost_s) if self.cost_s else 0.0

    @property
    def verdict(self) -> str:
        """The outcome in a few words: status, overhead, and the bound on the overhead."""
        if not self.is_solved:
            return f"{self.status}"

        at_least = max(0.0, 100 * self.overhead_bound)
        return (
            f"{self.status}, {100 * self.overhead:.2f} % more compute, at least "
            f"{at_least:.2f} % is needed"
        )

    @classmethod
    def of_steps(
        cls,
        graph: Graph,
        budget_bytes: int,
        steps: Sequence[int],
        *,
        lower_bound_s: float,
        solver: str,
        wall_s: float,
        record: SearchRecord = SearchRecord(),
    ) -> Solution:
        """Returns the solution of a sequence of operators, validated and simulated.

        The status is `OPTIMAL` if the cost is within the requested gap of the bound.

        Raises:
            ScheduleError: the sequence is not valid within the budget: the solver has a bug.
        """
        schedule = Schedule.from_steps(graph, list(steps))
        is_free_order = record.is_free_order
        _check_made(graph, schedule, budget_bytes, solver=solver, is_free_order=is_free_order)
        simulation = simulate(graph, schedule)

        # float(): solvers may pass NumPy numbers
        bound_s = float(min(max(lower_bound_s, graph.cost_s), simulation.cost_s))
        is_optimal = _is_within(simulation.cost_s, bound_s, record.gap)

        return cls(
            status=Status.OPTIMAL if is_optimal else Status.FEASIBLE,
            budget_bytes=budget_bytes,
            schedule=schedule,
            peak_bytes=simulation.peak_bytes,
            cost_s=simulation.cost_s,
            keep_all_cost_s=graph.cost_s,
            lower_bound_s=bound_s,
            minimum_bytes=record.minimum_bytes,
            solver=limits.printable(solver),
            wall_s=wall_s,
            fingerprint=graph.fingerprint,
            is_free_order=is_free_order,
            cut_short="" if is_optimal else record.cut_short,
            found_by=record.found_by,
            proved_by=record.proved_by,
        )

    @classmethod
    def without_schedule(
        cls,
        graph: Graph,
        budget_bytes: int,
        status: Status,
        *,
        solver: str,
        wall_s: float,
        lower_bound_s: float = 0.0,
        record: SearchRecord = SearchRecord(),
    ) -> Solution:
        """Returns the answer of a solver that found no schedule: proved infeasible, or stopped."""
        return cls(
            status=status,
            budget_bytes=budget_bytes,
            schedule=None,
            peak_bytes=0,
            cost_s=0.0,
            keep_all_cost_s=graph.cost_s,
            lower_bound_s=float(max(lower_bound_s, graph.cost_s)),
            minimum_bytes=record.minimum_bytes,
            solver=limits.printable(solver),
            wall_s=wall_s,
            fingerprint=graph.fingerprint,
            cut_short="" if status is Status.INFEASIBLE else record.cut_short,
            proved_by=record.proved_by,
        )

    def save(self, path: str | Path) -> None:
        """Writes the solution as JSON, whole or not at all."""
        serialize.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Solution:
        """Reads a solution that `save` wrote, or raises `ScheduleError` with one line.

        The numbers are those of the file; `on` computes them again.
        """
        return replace(serialize.load(cls, path, ScheduleError), is_bound_stated=True)

    @classmethod
    def load_all(cls, path: str | Path) -> list[Solution]:
        """Reads one solution, or the list of them that `remat frontier --output` wrote."""
        content = serialize.read(path, ScheduleError)
        is_list = content.lstrip()[:1] == b"["
        what = "a solution, or a list of solutions, that this remat reads"
        kind: Any = list[Solution] if is_list else Solution
        found = serialize.decode(kind, content, path, ScheduleError, what)
        return [
            replace(solution, is_bound_stated=True) for solution in (found if is_list else [found])
        ]

    def on(self, graph: Graph) -> Solution:
        """Returns this solution with peak, cost and status computed again for `graph`.

        Numbers read from a file are not trusted. The bound is kept if it can hold for the present
        costs, and still counts as stated by the file; otherwise the cost of keeping everything
        replaces it. A solution without a schedule becomes `NO_SOLUTION`.

        Raises:
            ScheduleError: it was made for another graph, or breaks a rule.
            BudgetError: its peak is above its own budget.
        """
        if self.fingerprint != graph.fingerprint:
            difference = first_difference(self.outline, graph)
            raise ScheduleError(
                "this plan is for another step: it was made for graph "
                f"{shortened(self.fingerprint)}, and this is graph "
                f"{graph.fingerprint} ({graph.num_operators} operators)"
                f"{f'; first difference: {difference}' if difference else ''}; trace and solve "
                "again with this model, these shapes, this precision and this torch version"
            )

        if self.schedule is None:
            return Solution.without_schedule(
                graph, self.budget_bytes, Status.NO_SOLUTION, solver=self.solver, wall_s=self.wall_s
            )

        self._check_on(graph, self.schedule)
        simulation = simulate(graph, self.schedule)
        bound_s = self._bound_on(graph, simulation.cost_s)
        is_stated = self.is_bound_stated and bound_s > graph.cost_s
        is_own = not self.is_bound_stated and bound_s == self.lower_bound_s
        is_best = _is_within(simulation.cost_s, bound_s, 0.0) or (
            is_own and self.status is Status.OPTIMAL
        )

        return replace(
            self,
            status=Status.OPTIMAL if is_best and not is_stated else Status.FEASIBLE,
            peak_bytes=simulation.peak_bytes,
            cost_s=simulation.cost_s,
            keep_all_cost_s=graph.cost_s,
            lower_bound_s=bound_s,
            proved_by=self.proved_by if bound_s == self.lower_bound_s else "",
            minimum_bytes=min(self.minimum_bytes, simulation.peak_bytes),
            is_bound_stated=is_stated,
        )

    def _check_on(self, graph: Graph, schedule: Schedule) -> None:
        found = validate(
            graph, schedule, budget_bytes=self.budget_bytes, is_free_order=self.is_free_order
        )

        if found and found[0].rule is Rule.BUDGET:
            peak_bytes = simulate(graph, schedule).peak_bytes
            raise BudgetError(
                f"this plan needs {describe_bytes(peak_bytes)}, more than its own budget of "
                f"{describe_bytes(self.budget_bytes)}; solve again",
                budget_bytes=self.budget_bytes,
                minimum_bytes=peak_bytes,
                is_proved=False,
            )

        if found:
            raise ScheduleError(
                f"this plan is broken: {found[0].rule} (step {found[0].step}: "
                f"{shortened(found[0].detail)}); solve again"
            )

    def _bound_on(self, graph: Graph, cost_s: float) -> float:
        """Returns the bound if it is for the same costs and not above the plan's cost."""
        is_same = math.isclose(self.keep_all_cost_s, graph.cost_s, rel_tol=1e-9)
        is_possible = is_same and self.lower_bound_s <= cost_s * (1 + 1e-9)
        return min(max(self.lower_bound_s if is_possible else 0.0, graph.cost_s), cost_s)


def _check_made(
    graph: Graph, schedule: Schedule, budget_bytes: int, *, solver: str, is_free_order: bool
) -> None:
    found = validate(graph, schedule, budget_bytes=budget_bytes, is_free_order=is_free_order)
    if found:
        raise ScheduleError(
            f"{solver} made an invalid schedule: {found[0].rule} (step {found[0].step}: "
            f"{found[0].detail})"
        )


def _is_within(cost_s: float, bound_s: float, gap: float) -> bool:
    return cost_s - bound_s <= (gap + 1e-9) * cost_s
