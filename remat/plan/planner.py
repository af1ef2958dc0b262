"""Which plan a captured step gets.

One it had before, one from the disk, one of a larger shape, or a new one.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from remat.core.budget import Budget, describe_bytes, format_bytes, parse_budget
from remat.core.errors import BudgetError, ScheduleError
from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution, Status
from remat.core.units import Units
from remat.core.validate import validate
from remat.narration.stages import stage
from remat.plan.disk_cache import PlanCache, plans_path
from remat.plan.distributed import bucket_bytes, solve_once
from remat.run.capture import Step
from remat.solvers import Solver, make_solver
from remat.solvers.core.compiled import IS_COMPILED
from remat.tracers.costs import CostModel

_LOG = logging.getLogger(__name__)
_ELSEWHERE = ", for another shape"
_SHARE_OF_TIME = 0.1  # for a step that the plan of another shape fits already


@dataclass(frozen=True)
class Options:
    """How a step is planned.

    Attributes:
        budget: bytes, or a text such as "8GiB" or "60%".
        reserve_bytes: held back from the budget for what the step can't see (optimizer state).
        solver: name of a solver, or a solver.
        costs: name of a cost model, or a cost model.
        time_limit_s: how long the solver may take.
        gap: the solver stops as soon as it proved this gap.
        executor: "eager" runs the rewritten step operator by operator, "inductor" compiles it to
            fused kernels.
        differentiate: "scalars" or "all", see `make_backend`.
        plan_cache: plans are read from and written to the user's cache folder.
    """

    budget: Budget
    reserve_bytes: int = 0
    solver: str | Solver = "auto"
    costs: str | CostModel = "profile"
    time_limit_s: float = 60.0
    gap: float = 0.005
    executor: str = "eager"
    differentiate: str = "scalars"
    plan_cache: bool = True

    def __post_init__(self) -> None:
        parse_budget(self.budget, keep_all_bytes=1 << 60)
        if self.reserve_bytes < 0:
            raise ValueError(f"reserve_bytes={self.reserve_bytes} is negative")
        if self.executor not in ("eager", "inductor"):
            raise ValueError(f'executor={self.executor!r} is neither "eager" nor "inductor"')


def solve_graph(
    graph: Graph,
    budget: Budget,
    *,
    solver: str | Solver = "auto",
    time_limit_s: float = 60.0,
    gap: float = 0.005,
    reserve_bytes: int = 0,
    progress: Callable[[Any], None] | None = None,
) -> Solution:
    """Returns the solution for `graph`, or raises `BudgetError` where there is none."""
    if time_limit_s <= 0:
        raise ValueError(f"time_limit_s={time_limit_s} is not positive")
    keep_all = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    budget_bytes = parse_budget(budget, keep_all_bytes=keep_all) - reserve_bytes
    method = (
        make_solver(solver, time_limit_s=time_limit_s, gap=gap, progress=progress)
        if isinstance(solver, str)
        else solver
    )
    solution = _solve(graph, budget_bytes, method)
    if solution.is_solved:
        return solution
    raise _budget_error(graph, solution, reserve_bytes)


def _solve(graph: Graph, budget_bytes: int, method: Solver) -> Solution:
    """Solves, and tells how far it is, on stderr and in the log."""
    what = f"{graph.num_operators:,} operators in {Units.of(graph).size_text(budget_bytes)}"
    _LOG.info("solving %s by %s", what, method)
    with stage(f"planning {what}") as told:
        telling = method.telling(lambda moment: told.say(moment.text(graph.cost_s)))
        solution = telling.solve(graph, budget_bytes=budget_bytes)

    _LOG.info("solved %s in %.1f s: %s", what, solution.wall_s, solution.verdict)
    return solution


def _budget_error(graph: Graph, solution: Solution, reserve_bytes: int) -> BudgetError:
    is_proved = solution.status is Status.INFEASIBLE
    minimum_bytes = (solution.minimum_bytes or _minimum_bytes(graph)) + reserve_bytes
    budget_bytes = solution.budget_bytes + reserve_bytes
    what = "no schedule fits" if is_proved else f"{solution.solver} found no schedule that fits"
    what += f" ({solution.cut_short})" if solution.cut_short else ""
    reserved = f" (of which {describe_bytes(reserve_bytes)} are reserved)" if reserve_bytes else ""
    held = (
        f"; parameters, buffers and inputs alone hold {describe_bytes(graph.resident_bytes)}"
        if graph.resident_bytes
        else ""
    )
    return BudgetError(
        f"{what} in the budget {describe_bytes(budget_bytes)}{reserved}: the least known to "
        f"do is {describe_bytes(minimum_bytes)}{held}. "
        "Raise the budget to at least that, or take a smaller batch.",
        budget_bytes=budget_bytes,
        minimum_bytes=minimum_bytes,
        is_proved=is_proved,
    )


def _minimum_bytes(graph: Graph) -> int:
    from remat.solvers.auto.minimum import minimum

    return minimum(graph).peak_bytes


class Plans:
    """Plans by graph.

    A step that is captured again is not solved again, in this process or another one. A new shape
    of a step that has a plan, such as the last batch of an epoch, is given that plan's schedule
    where it fits, improved for a tenth of the time limit.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._known: dict[tuple[str, int], tuple[Graph, Solution]] = {}
        self._has_largest = False
        # of the largest step so far, the reserve included: what "60%" is a percentage of
        self._keep_all_bytes = 0
        self._cache = (
            PlanCache(plans_path())
            if options.plan_cache and isinstance(options.solver, str)
            else None
        )

    def __call__(
        self, step: Step, *, unplanned_bytes: int = 0, gap_bytes: int = 0, is_largest: bool = False
    ) -> Solution:
        """Returns the solution for a captured step, the same on all ranks.

        Args:
            step: what was captured.
            unplanned_bytes: held back beside the reserve.
            gap_bytes: the same, for what runs between pieces and would whatever is kept: it counts
                in percentages.
            is_largest: its schedule is that of all smaller shapes, which then need no solving.
        """
        graph = step.graph
        held_bytes = self.options.reserve_bytes + unplanned_bytes + gap_bytes + bucket_bytes()
        key = (computation_of(graph), held_bytes)
        if key not in self._known:
            self._known[key] = (graph, self._solve(graph, held_bytes, gap_bytes))
            _LOG.info("%s", _plan_text(graph, self._known[key][1], self.options.budget))
        self._has_largest |= is_largest
        return self._known[key][1]

    def _solve(self, graph: Graph, held_bytes: int, gap_bytes: int) -> Solution:
        options = self.options
        keep_all_bytes = (
            simulate(graph, Schedule.keep_all(graph)).peak_bytes
            + gap_bytes
            + bucket_bytes()
            + options.reserve_bytes
        )
        self._keep_all_bytes = max(self._keep_all_bytes, keep_all_bytes)
        budget_bytes = parse_budget(options.budget, keep_all_bytes=self._keep_all_bytes)
        known = self._of_another_shape(graph, budget_bytes - held_bytes)

        if known and self._has_largest:
            return known

        time_limit_s = options.time_limit_s * (_SHARE_OF_TIME if known else 1)

        def solve() -> Solution:
            try:
                solved = solve_graph(
                    graph,
                    budget_bytes,
                    solver=options.solver,
                    time_limit_s=time_limit_s,
                    gap=options.gap,
                    reserve_bytes=held_bytes,
                )
            except BudgetError:
                if known:
                    return known
                raise
            return _better(solved, known) if known else solved

        def read_or_solve() -> Solution:
            # less time makes another plan, and so does plain Python in place of compiled loops
            how = f"{asked} {time_limit_s} {IS_COMPILED}"
            return (
                self._cache.get_or_solve(graph, budget_bytes - held_bytes, how, solve)
                if self._cache
                else solve()
            )

        # not by how much time: ranks that come by other ways share their plans all the same
        asked = f"{budget_bytes} {held_bytes} {options.solver} {options.gap} {options.time_limit_s}"
        return solve_once(graph, asked, read_or_solve, time_limit_s=options.time_limit_s)

    def _of_another_shape(self, graph: Graph, budget_bytes: int) -> Solution | None:
        """The cheapest schedule of a step that differs from this one in sizes only, where it fits
        the budget.
        """
        wanted, found = structure_of(graph), []
        for other, solution in self._known.values():
            schedule = solution.schedule
            if (
                schedule is None
                or structure_of(other) != wanted
                or validate(graph, schedule, budget_bytes=budget_bytes)
            ):
                continue
            solver = solution.solver.removesuffix(_ELSEWHERE) + _ELSEWHERE
            found.append(
                Solution.of_steps(
                    graph,
                    budget_bytes,
                    schedule.steps,
                    lower_bound_s=0.0,
                    solver=solver,
                    wall_s=0.0,
                    cut_short=solution.cut_short,
                )
            )
        return min(found, key=lambda s: s.cost_s, default=None)


def _better(solved: Solution, known: Solution) -> Solution:
    """The cheaper one; cut short where either was, as the other would have been better too."""
    found = min((solved, known), key=lambda s: s.cost_s)
    is_proved = found.status is Status.OPTIMAL
    return replace(found, cut_short="" if is_proved else solved.cut_short or known.cut_short)


def _plan_text(graph: Graph, solution: Solution, budget: Budget) -> str:
    """A plan in one line: what it may hold, what it will, and what that costs."""
    keep_all_bytes = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    asked = format_bytes(budget) if isinstance(budget, int) else budget
    return (
        f"planned for {asked}: the step holds {format_bytes(solution.peak_bytes)} of "
        f"{format_bytes(solution.budget_bytes)}, where keeping everything takes "
        f"{format_bytes(keep_all_bytes)}; {solution.verdict}"
    )


def computation_of(graph: Graph) -> str:
    """A digest of all that a plan depends on: a graph without its names.

    Where a number became an input of the step, what it is multiplied with has another name.
    """
    sizes = [(value.size_bytes, value.kind) for value in graph.values]
    costs = [(op.cost_s, op.workspace_bytes) for op in graph.operators]
    return hashlib.sha256(repr((structure_of(graph), sizes, costs)).encode()).hexdigest()


def structure_of(graph: Graph) -> str:
    """A digest of a graph without its sizes and costs.

    Two shapes of one step agree in it, mostly.
    """
    parts = [
        (op.target, op.reads, op.writes, op.phase, op.region, op.pinned, op.reuses, op.is_snapshot)
        for op in graph.operators
    ]
    return hashlib.sha256(
        repr((parts, graph.outputs, [v.kind for v in graph.values])).encode()
    ).hexdigest()


@dataclass(frozen=True)
class FixedPlan:
    """One solution for one graph; any other graph is refused."""

    solution: Solution

    def __call__(self, step: Step, *, unplanned_bytes: int = 0, gap_bytes: int = 0) -> Solution:
        """Returns the solution where it was made for this very step, its numbers found anew.

        Raises:
            ScheduleError: it has no schedule, is for another step or is broken.
            BudgetError: it holds more than its own budget.
        """
        if self.solution.schedule is None:
            raise ScheduleError(
                f"this solution has no schedule to run: its status is {self.solution.status}"
            )
        solution = self.solution.on(step.graph)
        extra_bytes = unplanned_bytes + gap_bytes
        if extra_bytes:
            raise BudgetError(
                f"this plan predicts {describe_bytes(solution.peak_bytes)}, and between "
                "its compiled pieces the step holds "
                f"{describe_bytes(extra_bytes)} beside it, together more than its budget; "
                "solve for a budget that is smaller by so much",
                budget_bytes=solution.budget_bytes,
                minimum_bytes=solution.peak_bytes + extra_bytes,
                is_proved=False,
            )
        return solution
