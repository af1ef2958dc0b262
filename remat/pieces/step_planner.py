"""What plans a joined step: `Plans` for a budget, or a fixed plan."""

from __future__ import annotations

from typing import Protocol

from remat.core.room import Room
from remat.core.solution import Solution
from remat.run.capture import Step


class StepPlanner(Protocol):
    """Returns the solution for a step.

    It reserves `gradient_bytes` for gradients of earlier steps, `gap_bytes` for what runs between
    pieces, and `unplanned_bytes` for what exists only because of the plan. A solution that is
    `known` is used if it fits.
    """

    def __call__(
        self,
        step: Step,
        *,
        gradient_bytes: int = 0,
        gap_bytes: int = 0,
        unplanned_bytes: int = 0,
        known: Solution | None = None,
    ) -> Solution:
        """Returns the solution for a step."""

    def room_of(self, solution: Solution) -> Room:
        """Returns the budget that a solution was made for, with its reserved parts."""
