"""A plan that was made earlier for one graph."""

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
        known: Solution | None = None,
    ) -> Solution:
        """Returns the solution if it was made for this step, with its numbers computed again.

        Accumulated gradients are not checked: the solution's budget has to leave room for them.

        Raises:
            ScheduleError: it has no schedule, is for another step or is invalid.
            BudgetError: it leaves no room for what is held besides the plan.
        """
        del known
        if self.solution.schedule is None:
            raise ScheduleError(
                f"this solution has no schedule to run: its status is {self.solution.status}; "
                "solve for a larger budget, or with a longer time limit"
            )

        solution = self.solution.on(step.graph)
        _check_room(solution, unplanned_bytes, gap_bytes)
        return solution

    def room_of(self, solution: Solution) -> Room:
        """Returns the budget that the solution was made for."""
        budget_bytes = solution.budget_bytes
        return Room(budget_bytes, budget_bytes, budget_bytes)


def _check_room(solution: Solution, unplanned_bytes: int, gap_bytes: int) -> None:
    """Raises a `BudgetError` where a solution leaves no room for what is held besides it."""
    left_bytes = solution.budget_bytes - solution.peak_bytes
    if unplanned_bytes > left_bytes:
        raise BudgetError(
            f"this plan leaves {describe_bytes(left_bytes)} of its budget unused, and "
            f'on_unsupported="plain" needs {describe_bytes(unplanned_bytes)}, for copies '
            "of random state and of buffers that the step changes; solve for a budget smaller "
            "by that much, and wrap dataclasses.replace(solution, budget_bytes=...) with the "
            "whole budget",
            budget_bytes=solution.budget_bytes,
            minimum_bytes=solution.peak_bytes + unplanned_bytes,
            is_proved=False,
        )

    if gap_bytes:
        raise BudgetError(
            f"this plan's peak is {describe_bytes(solution.peak_bytes)}, and between its "
            f"compiled pieces the step holds {describe_bytes(gap_bytes)} more, together above "
            "its budget; checkpoint plans such a step, with room for what it holds there",
            budget_bytes=solution.budget_bytes,
            minimum_bytes=solution.peak_bytes + gap_bytes,
            is_proved=False,
        )
