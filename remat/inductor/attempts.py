"""The plans tried to make a step's kernels fit a budget, and the next one to try.

For the latest graphs, the plan whose kernels held least is remembered. An error names its peak as a
budget that suffices; with that budget, this plan is the second one tried.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from remat.core.budget import describe_bytes
from remat.core.errors import BudgetError
from remat.core.graph import Graph
from remat.core.room import Room
from remat.core.solution import Solution

ATTEMPTS = 4  # after this many compiled plans above the budget, an error is raised
_ATTEMPTS_COPYING = 2  # after this many, convolutions keep the layouts of their inputs
_LEAST_SLOPE = 0.5  # the secant of kernels' peak over plan's peak counts as at least this steep

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompiledPlan:
    """A plan whose kernels were compiled, and all that their peak depends on.

    Attributes:
        solution: the plan.
        peak_bytes: the peak of its kernels.
        room_bytes: how far its budget was below the step's, which decides how much is fused.
        keeps_layouts: see `CompiledHalves`.
    """

    solution: Solution
    peak_bytes: int
    room_bytes: int
    keeps_layouts: bool


_MOST_REMEMBERED = 32  # graphs
_least: OrderedDict[str, CompiledPlan] = OrderedDict()  # the latest one is last


def _remembered(graph: Graph, compiled: CompiledPlan) -> CompiledPlan:
    """Returns the plan of this graph whose kernels held least, this one included."""
    known = _least.pop(graph.fingerprint, compiled)
    least = min(known, compiled, key=lambda plan: plan.peak_bytes)
    _least[graph.fingerprint] = least
    if len(_least) > _MOST_REMEMBERED:
        _least.popitem(last=False)
    return least


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
        known: the next plan, if one is remembered whose kernels fit the budget; tried once.
        held: for each plan that was compiled, its `room_bytes` and the peak of its kernels.
        budget_bytes: the budget for the kernels of the last compiled plan.
        room: the budget as it was given, and what it keeps free beside these kernels.
        refusal: the error for the first plan that did not fit the budget.
    """

    room_bytes: int = 0
    keeps_layouts: bool = False
    known: CompiledPlan | None = None
    held: list[tuple[int, int]] = field(default_factory=list)
    budget_bytes: int = 0
    room: Room | None = None
    refusal: BudgetError | None = None
    _may_keep_layouts: bool = False
    _is_known_tried: bool = False

    def refused(self, error: BudgetError) -> None:
        """Notes that the planner found no plan within the budget that it was given.

        Raises:
            BudgetError: nothing is left to try.
        """
        self.known = None
        if self._may_keep_layouts:
            self._keep_layouts()
            return

        self.room_bytes += error.budget_bytes - error.minimum_bytes
        was_tried = bool(self.held) and self.room_bytes <= self.held[-1][0]
        if self.refusal or was_tried:
            raise self.error() if self.held else self.refusal or error
        self.refusal = error

    def held_too_much(
        self,
        graph: Graph,
        plan: Solution,
        peak_bytes: int,
        *,
        room: Room | None = None,
        may_keep_layouts: bool = False,
    ) -> None:
        """Notes the peak of a plan's kernels, which is above the budget.

        Args:
            graph: the graph that was planned.
            plan: the plan.
            peak_bytes: the peak of its kernels.
            room: the budget that the plan was made for; None where it is not known.
            may_keep_layouts: whether convolutions' inputs may keep their layouts.

        Raises:
            BudgetError: nothing is left to try.
        """
        self.held.append((self.room_bytes, peak_bytes))
        # what is kept free for kernels that hold more than planned is theirs
        self.room = room and replace(room, gap_bytes=room.gap_bytes - self.room_bytes)
        self.budget_bytes = budget_bytes = plan.budget_bytes + self.room_bytes
        compiled = CompiledPlan(plan, peak_bytes, self.limit_room_bytes, self.keeps_layouts)
        self.known, least = None, _remembered(graph, compiled)
        if least.peak_bytes <= budget_bytes and not self._is_known_tried:
            self.known, self._is_known_tried = least, True
            self.keeps_layouts = least.keeps_layouts
            self.room_bytes = budget_bytes - least.solution.budget_bytes
            return

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

    @property
    def limit_room_bytes(self) -> int:
        """How far the limit of the next kernels is below the step's budget; see `CompiledPlan`."""
        return self.known.room_bytes if self.known else self.room_bytes

    def error(self) -> BudgetError:
        """Returns the error for a step whose kernels exceed the budget with every plan tried."""
        least_bytes = min(peak for _, peak in self.held)
        given_bytes = self.room.budget_bytes if self.room else self.budget_bytes
        needed_bytes = least_bytes + given_bytes - self.budget_bytes
        given = self.room.budget_text() if self.room else describe_bytes(given_bytes)
        beside = ""
        if self.room and self.room.held():
            beside = f", of which are kept free: {self.room.held_text()}"
        return BudgetError(
            f"Inductor's kernels hold {describe_bytes(least_bytes)} with the best of "
            f"{len(self.held)} plans, and the budget of {given}{beside}, leaves "
            f"{describe_bytes(self.budget_bytes)} for them; raise it to "
            f'{describe_bytes(needed_bytes)}, or use executor="eager"',
            budget_bytes=given_bytes,
            minimum_bytes=needed_bytes,
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
