"""A plan that was made before, for one graph."""

from __future__ import annotations

from dataclasses import dataclass

from remat.core.budget import describe_bytes
from remat.core.errors import BudgetError, ScheduleError
from remat.core.room import Room
from remat.core.solution import Solution
from remat.run.capture import Step


@dataclass(frozen=True)
class FixedPlan:
    """One solution for one graph; any other graph is refused."""

    solution: Solution

    def __call__(
        self,
        step: Step,
        *,
        gradient_bytes: int = 0,
        unplanned_bytes: int = 0,
        gap_bytes: int = 0,
    ) -> Solution:
        """Returns the solution where it was made for this very step, its numbers found anew.

        Gradients that accumulate are not its own: whoever solved left room for them.

        Raises:
            ScheduleError: it has no schedule, is for another step or is broken.
            BudgetError: it holds more than its own budget.
        """
        if self.solution.schedule is None:
            raise ScheduleError(
                f"this solution has no schedule to run: its status is {self.solution.status}"
            )
        solution = self.solution.on(step.graph)
        left_bytes = solution.budget_bytes - solution.peak_bytes
        if unplanned_bytes > left_bytes:
            raise BudgetError(
                f"this plan leaves {describe_bytes(left_bytes)} of its budget, and "
                f'on_unsupported="plain" keeps {describe_bytes(unplanned_bytes)} beside it, of '
                "buffers that the step changes and of random state; solve for a budget that is "
                "smaller by so much",
                budget_bytes=solution.budget_bytes,
                minimum_bytes=solution.peak_bytes + unplanned_bytes,
                is_proved=False,
            )
        extra_bytes = gap_bytes
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

    def room_of(self, solution: Solution) -> Room:
        """Returns the budget that it was solved for."""
        budget_bytes = solution.budget_bytes
        return Room(budget_bytes, budget_bytes, budget_bytes)
