"""Room that a planned module's budget leaves for what its step holds beside the planned call.

The loss where it is computed outside, other calls before the backward: no plan of one call knows
them. The first step with each plan is measured as a whole, and where it held more than the budget
the next plan leaves room for what was beside it.
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
from remat.core.graph import Graph, Phase
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
# a loss that is divided and its gradient, as the allocators round them: no reason to plan again
_SCALARS_BYTES = {"cpu": 512, "cuda": 8192}  # by device
_MOST_PLANS = 3  # each leaves room for what was beside the one before; then comes the least


@dataclass(eq=False)
class OutsideRoom:
    """What is left room for beside a module's plans.

    What is held outside while the loss is computed is part of the graph that is planned, at the
    place where gradients arrive. What is held beside a planned forward or backward, other calls
    above all, comes off the budget.

    Attributes:
        module: what is planned.
        is_fixed: its plan is given, and can't leave room.
        size_bytes: what comes off the budget.
        loss_bytes: what the step holds outside while the module's calls wait for their gradients,
            without what the plan saved.
    """

    module: nn.Module
    is_fixed: bool
    size_bytes: int = 0
    loss_bytes: int = 0
    _open: list[_Unjudged] = field(default_factory=list)
    _least: list[Solution] = field(default_factory=list)  # plans that hold the least known
    _measured_at: int = 0  # bytes that the module returned and got then
    _tries: Counter[str] = field(default_factory=Counter)  # graph -> plans that were too little
    _is_told: bool = False

    def plan(self, step: Step, make: Callable[[Step, int], Solution]) -> Solution:
        """Returns the plan that `make` gives for a step and this room.

        A plan that keeps less may leave less to other calls than was measured beside the one
        before. So where none fits beside that, the one that holds the least is run all the same.

        Raises:
            BudgetError: nothing fits, whatever other calls hold.
        """
        try:
            return make(_Planned(self.with_loss(step.graph)), self.size_bytes)
        except BudgetError as error:
            missing_bytes = error.minimum_bytes - error.budget_bytes
            if self.loss_bytes and _arriving_bytes(step.graph) == self._measured_at:
                loss_bytes = self.loss_bytes
                self._begin_anew()
                raise nothing_fits_outside(self.module, error, loss_bytes) from None
            if self.loss_bytes:  # for this shape that is a guess: it is measured first
                return make(step, self.size_bytes)
            if not self.size_bytes or missing_bytes <= 0:
                raise
            self.size_bytes -= min(self.size_bytes, missing_bytes)
        least = make(step, self.size_bytes)
        self._least.append(least)
        return least

    def with_loss(self, graph: Graph) -> Graph:
        """Returns a step's graph with what is held outside while its loss is computed.

        What was returned and the gradients that arrive are there already, and part of it.
        """
        arrival = _arrival(graph)
        extra_bytes = self._loss_bytes(graph) - self.size_bytes - _arriving_bytes(graph)
        if arrival is None or extra_bytes <= 0:
            return graph
        workspace = [op.workspace_bytes for op in graph.operators]
        workspace[arrival] += extra_bytes
        return graph.with_costs([op.cost_s for op in graph.operators], workspace)

    def _loss_bytes(self, graph: Graph) -> int:
        """What was measured to be held while the loss is computed.

        For another shape, in proportion to what the module returns.
        """
        arriving_bytes = _arriving_bytes(graph)
        if arriving_bytes == self._measured_at or not self._measured_at:
            return self.loss_bytes
        return -(-self.loss_bytes * arriving_bytes // self._measured_at)

    def _begin_anew(self) -> None:
        self.size_bytes = self.loss_bytes = self._measured_at = 0
        self._tries.clear()

    def note(self, planned: PlannedStep) -> None:
        """Notes a planned step that is to be measured."""
        room = f"{planned.solution.budget_bytes}/{self.size_bytes}/{self.loss_bytes}"
        name = f"outside/{planned.graph.fingerprint}/{room}"
        loss = Agreement(f"{name}/loss")
        self._open.append(_Unjudged(planned, self.size_bytes, Agreement(name), loss))

    def forget(self) -> None:
        """All is planned again."""
        self._open.clear()
        self._least.clear()

    @property
    def is_open(self) -> bool:
        """True where a step is to be measured yet."""
        return bool(self._open)

    @property
    def held_bytes(self) -> int:
        """The most that is held outside, 0 where the budget was never too little for it."""
        return max(self.size_bytes, self.loss_bytes)

    def forward_begins(self) -> None:
        """Forgets forwards that failed after they were measured."""
        for entry in self._open:
            if entry.planned.meter.waiting is not None:
                entry.planned.meter.waiting.is_new = False

    def await_backward(
        self, results: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]
    ) -> None:
        """Measures the step that the forward just run is part of."""
        await_backward([entry.planned.meter for entry in self._open], results, inputs, self)

    def is_too_little(self, unplanned_bytes: int) -> bool:
        """True where a step held more than the budget, and all is to be planned again.

        Args:
            unplanned_bytes: what the plans leave room for otherwise.

        Raises:
            BudgetError: it did with the plan that holds the least, too.
        """
        for entry in list(self._open):
            planned, whole = entry.planned, entry.planned.meter.whole
            if whole is None and planned.meter.peak_bytes is None:
                continue
            budget_bytes = planned.solution.budget_bytes + unplanned_bytes + entry.room_bytes
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
        """What to take off the budget for what a step held, and what for its loss."""
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
        """Says once that the step is over the budget.

        Raises:
            BudgetError: the plan that held the least was run, so nothing more can be done.
        """
        whole = planned.meter.whole
        needed_bytes = max(whole.peak_bytes if whole else 0, budget_bytes + 1)
        own_bytes = planned.meter.peak_bytes or planned.solution.peak_bytes
        beside_bytes = max(0, needed_bytes - own_bytes)
        if any(planned.solution is least for least in self._least):
            self._begin_anew()  # another shape may do
            raise nothing_fits_beside(self.module, budget_bytes, needed_bytes, beside_bytes)
        if not self._is_told:
            self._is_told = True
            excess, num_calls = needed_bytes - budget_bytes, whole.num_calls if whole else 1
            said = outside_is_over(self.module, excess, beside_bytes, num_calls, self.is_fixed)
            _LOG.warning("%s", said)


@dataclass(frozen=True, eq=False)
class _Unjudged:
    """A planned step that is to be measured.

    Attributes:
        planned: the step with its plan.
        room_bytes: what came off its budget.
        size: what all ranks say is to come off.
        loss: what all ranks say that is held while the loss is computed.
    """

    planned: PlannedStep
    room_bytes: int
    size: Agreement
    loss: Agreement


@dataclass(frozen=True)
class _Planned:
    """A step as it is planned."""

    graph: Graph


def _arrival(graph: Graph) -> int | None:
    """The operator that stands for gradients that arrive, None where there is none."""
    places = [i for i, op in enumerate(graph.operators) if op.target == "tangent"]
    return places[0] if places else None


def _arriving_bytes(graph: Graph) -> int:
    """Bytes of what the forward returns, and of the gradients that arrive for it."""
    arrival = _arrival(graph)
    if arrival is None:
        return 0
    producers = [graph.operators[graph.producer[value]] for value in graph.outputs]
    is_forward = [producer.phase is Phase.FORWARD for producer in producers]
    returned = itertools.compress(graph.outputs, is_forward)
    values = {*returned, *graph.operators[arrival].writes}
    return sum(graph.values[value].size_bytes for value in values)


def _is_over(planned: PlannedStep, held_bytes: int, budget_bytes: int) -> bool:
    """True where a step held more than its budget, by more than scalars."""
    return held_bytes > budget_bytes + _SCALARS_BYTES[planned.meter.device]
