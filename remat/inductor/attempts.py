"""Which plans were tried so that a step's kernels fit a budget, and which to try next."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from remat.core.budget import describe_bytes
from remat.core.errors import BudgetError

ATTEMPTS = 4  # at a plan whose kernels fit the budget
_ATTEMPTS_COPYING = 2  # of them, before convolutions keep the layouts of their inputs
_LEAST_SLOPE = 0.5  # of the kernels' peak against the plan's, where the next plan is chosen

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Attempts:
    """Chooses how much less than the budget each plan may hold, until its kernels hold no more.

    Kernels may hold less than their plan, as Inductor fuses more than the plan knows of. So where
    no plan fits, the one with the least peak is tried, once. Where the kernels of two plans hold
    too much on a GPU, convolutions keep the layouts of their inputs from then on. That is slower
    there, but needs no copies.

    Attributes:
        room_bytes: how much less than the budget the next plan may hold; negative where it may hold
            more than the kernels may.
        keeps_layouts: see `CompiledHalves`.
        held: for each plan that was compiled, its `room_bytes` and the peak of its kernels.
        budget_bytes: of the kernels of the last of them.
        refusal: of the first plan that did not fit.
    """

    room_bytes: int = 0
    keeps_layouts: bool = False
    held: list[tuple[int, int]] = field(default_factory=list)
    budget_bytes: int = 0
    refusal: BudgetError | None = None
    _may_keep_layouts: bool = False

    def refused(self, error: BudgetError) -> None:
        """Notes that no plan is that small.

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

        next_ = "with less"
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
        """Returns the error for a step whose kernels hold too much with each of its plans."""
        least_bytes = min(peak for _, peak in self.held)
        return BudgetError(
            f"Inductor's kernels hold {describe_bytes(least_bytes)} with the best of "
            f"{len(self.held)} plans, and the budget leaves {describe_bytes(self.budget_bytes)}; "
            'raise it to at least that, or use executor="eager"',
            budget_bytes=self.budget_bytes,
            minimum_bytes=least_bytes,
            is_proved=False,
        )

    def _keep_layouts(self) -> None:
        self.room_bytes, self.keeps_layouts, self._may_keep_layouts = 0, True, False
        self.held.clear()
        self.refusal = None

    def _more_room(self, excess_bytes: int) -> int:
        """Returns how much less the next plan may hold, so that its kernels lose the excess.

        It follows the secant through the last two plans, as the kernels' peak falls by less than
        the plan's.
        """
        if len(self.held) < 2:
            return excess_bytes
        (room, peak), (last_room, last_peak) = self.held[-2:]
        slope = (peak - last_peak) / max(1, last_room - room)
        return int(excess_bytes / min(1.0, max(_LEAST_SLOPE, slope)))
