"""The plans tried to make a step's kernels fit a budget, and the next one to try."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from remat.core.budget import describe_bytes
from remat.core.errors import BudgetError

ATTEMPTS = 4  # compiled plans above the budget, after which there is an error
_ATTEMPTS_COPYING = 2  # such plans, after which convolutions keep the layouts of their inputs
_LEAST_SLOPE = 0.5  # of the secant (kernels' peak against plan's peak) that gives the next plan

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Attempts:
    """Chooses the budget of each next plan, until a plan's kernels fit the step's budget.

    Kernels may hold less than their plan, because Inductor fuses more than the plan assumes. So if
    no plan fits the budget, the plan with the lowest peak is still compiled, once. On a GPU, if the
    kernels of two plans exceed the budget, convolutions keep the layouts of their inputs from then
    on. That is slower there, but needs no copies.

    Attributes:
        room_bytes: how far the next plan's budget is below the step's; negative if it is above.
        keeps_layouts: see `CompiledHalves`.
        held: for each plan that was compiled, its `room_bytes` and the peak of its kernels.
        budget_bytes: the budget for the kernels of the last compiled plan.
        refusal: the error for the first plan that did not fit the budget.
    """

    room_bytes: int = 0
    keeps_layouts: bool = False
    held: list[tuple[int, int]] = field(default_factory=list)
    budget_bytes: int = 0
    refusal: BudgetError | None = None
    _may_keep_layouts: bool = False

    def refused(self, error: BudgetError) -> None:
        """Notes that no plan fits the budget it was given.

        Raises:
            BudgetError: nothing is left to try.
        """
        if self._may_keep_layouts:
            self._keep_layouts()
            return

        self.room_bytes += error.budget_bytes - error.minimum_bytes
        was_tried = bool(self.held) and self.room_bytes <= self.held[-1][0]
        if self.refusal or was_tried:
            raise self.error() if self.held else self.refusal or error
        self.refusal = error

    def held_too_much(
        self, peak_bytes: int, budget_bytes: int, *, may_keep_layouts: bool = False
    ) -> None:
        """Notes the peak of a plan's kernels, which is above the budget.

        Raises:
            BudgetError: nothing is left to try.
        """
        self.held.append((self.room_bytes, peak_bytes))
        self.budget_bytes = budget_bytes
        self.room_bytes += self._more_room(peak_bytes - budget_bytes)
        self._may_keep_layouts = may_keep_layouts and not self.keeps_layouts

        next_ = "with a smaller budget"
        if self._may_keep_layouts and len(self.held) == _ATTEMPTS_COPYING:
            self._keep_layouts()
            next_ = "with the layouts of convolutions' inputs kept"
        elif len(self.held) >= ATTEMPTS:
            raise self.error()

        _LOG.info(
            "the kernels of this plan hold %s more than the budget; compiling again %s",
            describe_bytes(peak_bytes - budget_bytes),
            next_,
        )

    def error(self) -> BudgetError:
        """Returns the error for a step whose kernels exceed the budget with every plan tried."""
        least_bytes = min(peak for _, peak in self.held)
        return BudgetError(
            f"Inductor's kernels hold {describe_bytes(least_bytes)} with the best of "
            f"{len(self.held)} plans, but the budget leaves {describe_bytes(self.budget_bytes)} "
            'for them; raise it by the difference, or use executor="eager"',
            budget_bytes=self.budget_bytes,
            minimum_bytes=least_bytes,
            is_proved=False,
        )

    def _keep_layouts(self) -> None:
        self.room_bytes, self.keeps_layouts, self._may_keep_layouts = 0, True, False
        self.held.clear()
        self.refusal = None

    def _more_room(self, excess_bytes: int) -> int:
        """Returns by how much to lower the next plan's budget so that its kernels should fit.

        It follows the secant through the last two plans, because the kernels' peak falls by less
        than the plan's.
        """
        if len(self.held) < 2:
            return excess_bytes
        (room, peak), (last_room, last_peak) = self.held[-2:]
        slope = (peak - last_peak) / max(1, last_room - room)
        return int(excess_bytes / min(1.0, max(_LEAST_SLOPE, slope)))
