"""Plans that were made earlier, of another shape or budget, and are of use to a step now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from remat.core.graph import Graph
from remat.core.solution import SearchRecord, Solution, Status
from remat.core.validate import validate
from remat.plan.digests import structure_of

_ELSEWHERE = ", for another shape"
# of the time limit, if the plan of another shape already fits the step, or if the same step was
# planned before and has to hold less
_SHARE_OF_TIME = 0.1


@dataclass(frozen=True)
class Earlier:
    """Plans that were made before, and are of use to a step.

    Attributes:
        fitting: the cheapest plan, of another shape or budget, whose schedule fits the step.
        near: plans of the same step for other budgets, made because its kernels or pieces held more
            than planned; the solver starts from them.
    """

    fitting: Solution | None = None
    near: tuple[Solution, ...] = ()

    @property
    def share_of_time(self) -> float:
        """The part of the time limit that the solver gets."""
        return _SHARE_OF_TIME if self.fitting or self.near else 1.0

    def or_cheaper(self, solved: Solution) -> Solution:
        """Returns the cheaper of the fitting plan and this one.

        It is cut short if either search was, unless proved optimal.
        """
        if self.fitting is None:
            return solved
        found = min((solved, self.fitting), key=lambda s: s.cost_s)
        is_proved = found.status is Status.OPTIMAL
        return replace(
            found, cut_short="" if is_proved else solved.cut_short or self.fitting.cut_short
        )


def cheapest_fitting(
    plans: Iterable[tuple[Graph, Solution]], graph: Graph, budget_bytes: int
) -> Solution | None:
    """Returns the cheapest schedule of another shape of a step that fits the budget."""
    wanted, found = structure_of(graph), []
    for other, solution in plans:
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
                record=SearchRecord(cut_short=solution.cut_short),
            )
        )

    return min(found, key=lambda s: s.cost_s, default=None)
