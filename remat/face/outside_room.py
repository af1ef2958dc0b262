"""Reserves budget for memory that a step was measured to hold outside of the planned call.

A plan of one call does not contain a loss that is computed outside, or other calls before the
backward. So the first step with each plan is measured as a whole, and if it exceeds the budget, the
next plan leaves room for what was held outside.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from remat.core.errors import BudgetError
from remat.core.graph import Graph
from remat.core.operators import Phase
from remat.core.schedule import simulate
from remat.core.solution import Solution
from remat.face.outside_messages import (
    nothing_fits_beside,
    nothing_fits_outside,
    outside_is_over,
)
from remat.plan.distributed import Agreement
from remat.run.capture import PlannedStep, Step
from remat.run.measured_forward import WholeStep
from remat.run.whole_step import await_backward

_LOG = logging.getLogger(__name__)
# An excess of up to this many bytes, by device, causes no new plan. A loss that is divided, and its
# gradient, take that much as the allocators round sizes.
_SCALARS_BYTES = {"cpu": 512, "cuda": 8192}
_MOST_PLANS = 3  # that leave room for measured memory; after them, the plan of least peak runs


@dataclass(eq=False)
class OutsideRoom:
    """The memory that is reserved for what a step holds outside of a module's planned call.

    Memory held while the loss is computed is added to the planned graph, at the operator where
    gradients arrive. Memory held while a planned forward or backward runs, mostly of other calls,
    is subtracted from the budget.

    Attributes:
        module: the planned module.
        is_fixed: whether its plan was given, so that it can't leave room.
        size_bytes: memory that is subtracted from the budget.
        loss_bytes: memory that the step holds outside while the module's calls wait for their
            gradients, without what the plan saved.
    """

    module: nn.Module
    is_fixed: bool
    size_bytes: int = 0
    loss_bytes: int = 0
    _open: list[_Unjudged] = field(default_factory=list)
    _least: list[Solution] = field(default_factory=list)  # plans of the least peak known
    # bytes of the module's results and of their gradients, when `loss_bytes` was measured
    _measured_at: int = 0
    _tries: Counter[str] = field(default_factory=Counter)  # graph -> plans that left too little
    _owner: object = field(default_factory=object)  # of all meters of the module's plans
    _has_warned: bool = False
    _is_refused: bool = False

    def plan(self, step: Step, make: Callable[[Step, int], Solution]) -> Solution:
        """Returns the plan that `make` finds for a step alongside the reserved memory.

        How much other calls hold depends on the plan: it may be less with a plan that saves less.
        So if no plan fits alongside the measured memory, the plan of least peak still runs.

        Raises:
            BudgetError: no plan fits, even with nothing reserved for other calls.
        """
        try:
            return make(_Planned(self.with_loss(step.graph)), self.size_bytes)
        except BudgetError as error:
            missing_bytes = error.minimum_bytes - error.budget_bytes
            if self.loss_bytes and _arriving_bytes(step.graph) == self._measured_at:
                self._is_refused = True
                raise nothing_fits_outside(self.module, error, self.loss_bytes) from None

            if self.loss_bytes:  # an estimate for this shape: plan without it, and measure first
                return make(step, self.size_bytes)
            if not self.size_bytes or missing_bytes <= 0:
                raise
            self.size_bytes -= min(self.size_bytes, missing_bytes)

        least = make(step, self.size_bytes)
        self._least.append(least)
        return least

    def forget_refused(self) -> None:
        """After an error that reaches the caller: forgets what no plan fits alongside.

        Until then other plans may be tried, which need the same room.
        """
        if self._is_refused:
            self._begin_anew()  # another shape may fit

    def with_loss(self, graph: Graph) -> Graph:
        """Returns a step's graph plus the memory held outside while the loss is computed.

        That memory includes the module's results and the gradients that arrive for them; they are
        in the graph already, and are not added again.
        """
        arrival = _arrival(graph)
        extra_bytes = self._loss_bytes(graph) - self.size_bytes - _arriving_bytes(graph)
        if arrival is None or extra_bytes <= 0:
            return graph
        workspace = [op.workspace_bytes for op in graph.operators]
        workspace[arrival] += extra_bytes
        return graph.with_costs([op.cost_s for op in graph.operators], workspace)

    def _loss_bytes(self, graph: Graph) -> int:
        """Returns what is held while the loss is computed: as measured, or estimated.

        The estimate for another shape is proportional to the size of what the module returns.
        """
        arriving_bytes = _arriving_bytes(graph)
        if arriving_bytes == self._measured_at or not self._measured_at:
            return self.loss_bytes
        return -(-self.loss_bytes * arriving_bytes // self._measured_at)

    def _begin_anew(self) -> None:
        self.size_bytes = self.loss_bytes = self._measured_at = 0
        self._is_refused = False
        self._tries.clear()

    def note(self, planned: PlannedStep) -> None:
        """Notes a planned step that is to be measured."""
        planned.meter.owner = self._owner
        room = f"{planned.solution.budget_bytes}/{self.size_bytes}/{self.loss_bytes}"
        name = f"outside/{planned.graph.fingerprint}/{room}"
        loss = Agreement(f"{name}/loss")
        self._open.append(_Unjudged(planned, self.size_bytes, Agreement(name), loss))

    def forget(self) -> None:
        """Forgets the planned steps; the reserved memory stays."""
        self._open.clear()
        self._least.clear()

    @property
    def is_open(self) -> bool:
        """True while a step still has to be measured."""
        return bool(self._open)

    @property
    def held_bytes(self) -> int:
        """The most that is held outside; 0 as long as no step exceeded its budget."""
        return max(self.size_bytes, self.loss_bytes)

    def forward_begins(self) -> None:
        """Ignores forwards that were measured, but failed later."""
        for entry in self._open:
            if entry.planned.meter.waiting is not None:
                entry.planned.meter.waiting.is_new = False

    def await_backward(
        self, results: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]
    ) -> None:
        """Measures the whole step of the forward that just ran."""
        await_backward([entry.planned.meter for entry in self._open], results, inputs, self)

    def is_too_little(self, unplanned_bytes: int) -> bool:
        """Returns True if a step exceeded the budget, so that everything has to be planned again.

        Args:
            unplanned_bytes: other memory that the plans leave room for.

        Raises:
            BudgetError: the step exceeded it even with the plan of least peak.
        """
        for entry in list(self._open):
            planned, whole = entry.planned, entry.planned.meter.whole
            if whole is None and planned.meter.peak_bytes is None:
                continue

            budget_bytes = planned.budget_bytes + unplanned_bytes + entry.room_bytes
            is_over = whole is not None and _is_over(planned, whole.peak_bytes, budget_bytes)
            room = self._room(planned, whole, budget_bytes) if whole and is_over else (0, 0)
            room = entry.size.of_all_ranks(room[0]), entry.loss.of_all_ranks(room[1])
            if entry.size.is_settled:
                self._open.remove(entry)
            if room == (0, 0):
                continue

            self._say(planned, budget_bytes)
            if self.is_fixed:
                continue
            self._tries[planned.graph.fingerprint] += 1
            self.size_bytes, self.loss_bytes = room
            self._measured_at = _arriving_bytes(planned.graph)
            return True
        return False

    def _room(self, planned: PlannedStep, whole: WholeStep, budget_bytes: int) -> tuple[int, int]:
        """Returns the bytes to take off the budget after a measured step, and those of its loss."""
        assert planned.solution.schedule is not None, "what ran has a schedule"
        own_bytes = simulate(planned.graph, planned.solution.schedule).peak_bytes
        if self._tries[planned.graph.fingerprint] >= _MOST_PLANS:
            return budget_bytes, 0
        if whole.num_calls > 1 or _arrival(planned.graph) is None:
            return whole.peak_bytes - own_bytes, 0

        is_over = _is_over(planned, whole.planned_bytes, budget_bytes)
        size_bytes = whole.planned_bytes - own_bytes if is_over else self.size_bytes
        loss_bytes = whole.outside_bytes - planned.meter.resident_bytes
        return max(size_bytes, self.size_bytes), max(loss_bytes, self._loss_bytes(planned.graph))

    def _say(self, planned: PlannedStep, budget_bytes: int) -> None:
        """Warns once that the step exceeds the budget.

        Raises:
            BudgetError: the plan of least peak exceeds it too, so no other plan can do better.
        """
        whole = planned.meter.whole
        needed_bytes = max(whole.peak_bytes if whole else 0, budget_bytes + 1)
        own_bytes = planned.meter.tensor_bytes or planned.solution.peak_bytes
        beside_bytes = max(0, needed_bytes - own_bytes)

        if any(planned.solution is least for least in self._least):
            self._begin_anew()  # another shape may fit
            raise nothing_fits_beside(self.module, budget_bytes, needed_bytes, beside_bytes)

        if not self._has_warned:
            self._has_warned = True
            excess, num_calls = needed_bytes - budget_bytes, whole.num_calls if whole else 1
            text = outside_is_over(self.module, excess, beside_bytes, num_calls, self.is_fixed)
            _LOG.warning("%s", text)


@dataclass(frozen=True, eq=False)
class _Unjudged:
    """A planned step that is to be measured.

    Attributes:
        planned: the step with its plan.
        room_bytes: memory that was taken off its budget.
        size: what all ranks agree to take off next.
        loss: what all ranks agree is held while the loss is computed.
    """

    planned: PlannedStep
    room_bytes: int
    size: Agreement
    loss: Agreement


@dataclass(frozen=True)
class _Planned:
    """A step whose graph includes what is held outside."""

    graph: Graph


def _arrival(graph: Graph) -> int | None:
    """Returns the operator at which gradients arrive; None if there is none."""
    places = [i for i, op in enumerate(graph.operators) if op.target == "tangent"]
    return places[0] if places else None


def _arriving_bytes(graph: Graph) -> int:
    """Returns the bytes of the forward's results, and of the gradients that arrive for them."""
    arrival = _arrival(graph)
    if arrival is None:
        return 0
    producers = [graph.operators[graph.producer[value]] for value in graph.outputs]
    is_forward = [producer.phase is Phase.FORWARD for producer in producers]
    returned = itertools.compress(graph.outputs, is_forward)
    values = {*returned, *graph.operators[arrival].writes}
    return sum(graph.values[value].size_bytes for value in values)


def _is_over(planned: PlannedStep, held_bytes: int, budget_bytes: int) -> bool:
    """True if a step exceeded its budget by more than a few scalars."""
    return held_bytes > budget_bytes + _SCALARS_BYTES[planned.meter.device]
