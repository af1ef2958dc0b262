"""A model, a device, an optimizer and a budget: whether a step fits, and its plan.

The step is traced on fake tensors and planned for the device's memory. The optimizer counts in two
ways: its state is held during the whole step, and its own step has a peak, after the activations
are freed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from remat.core.budget import Budget, check_budget, parse_budget
from remat.core.graph import Graph
from remat.core.schedule import keep_all_peak
from remat.core.solution import Solution, Status
from remat.face.step_function import as_step
from remat.face.tracing import check_traced, trace_for, trace_kernels
from remat.fit.answer import Fit
from remat.fit.footprint import Held
from remat.fit.optimizer_memory import MakeOptimizer, OptimizerMemory, optimizer_memory
from remat.fit.plain_step import plain_peak_bytes
from remat.pieces.unplanned_memory import there_bytes
from remat.plan.card import budget_of_card, kept_free_bytes
from remat.solvers import Solver, make_solver
from remat.solvers.auto.minimum import Minimum, minimum
from remat.solvers.auto.reuse import Shared
from remat.solvers.auto.solver import Auto
from remat.torch_border.kernels import FakeTensor
from remat.tracers.devices import Device, local_device
from remat.tracers.devices import device as device_named
from remat.tracers.retarget import as_on, traced_on


@dataclass(frozen=True)
class Question:
    """A model, a device, an optimizer, a budget, and how a step is planned.

    Attributes:
        model: any module; a step function is wrapped in one.
        device: the device to plan for.
        budget: the memory that may be used, in bytes or as a text.
        optimizer: the memory of the optimizer.
        reserve_bytes: kept free.
        is_accumulating: whether gradients of earlier micro-batches are held during the step.
        autocast: the type of `torch.autocast` that the step runs under; None without it.
        solver: a name or a solver.
        time_limit_s: time limit of the search for the least peak, and also of the solver if it is
            given by name.
        executor: what runs the plan, `eager` or `inductor`.
    """

    model: nn.Module
    device: Device
    budget: Budget
    optimizer: OptimizerMemory
    reserve_bytes: int
    is_accumulating: bool
    autocast: torch.dtype | None
    solver: str | Solver
    time_limit_s: float
    executor: str = "eager"

    @classmethod
    def of(
        cls,
        model: Callable[..., Any],
        *,
        device: str = "",
        budget: Budget | None = None,
        optimizer: str | MakeOptimizer = "adamw",
        reserve_bytes: int = 0,
        is_accumulating: bool = False,
        autocast: torch.dtype | None = None,
        solver: str | Solver = "auto",
        time_limit_s: float = 20.0,
        executor: str = "eager",
    ) -> Question:
        """Returns the question for arguments of `fits`, which describes them."""
        step = as_step(model)
        check_traced(executor)

        if budget is not None:
            check_budget(budget)
        if reserve_bytes < 0:
            raise ValueError(f"reserve_bytes={reserve_bytes} is negative")

        target = device_named(device) if device else local_device()
        memory = optimizer_memory(optimizer, step.parameters(), device_type=target.type)

        return cls(
            step,
            target,
            _memory_of(target, step, is_current=not device) if budget is None else budget,
            memory,
            reserve_bytes,
            is_accumulating,
            autocast,
            solver,
            time_limit_s,
            executor,
        )

    def trace(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Graph:
        """Returns the graph of the step as the device would run it."""
        of_executor = trace_kernels if self.executor == "inductor" else trace_for
        return of_executor(
            self.device, self.model, args, kwargs, costs="roofline", autocast=self.autocast
        )

    def plain_bytes(
        self, graph: Graph, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> int | None:
        """Returns the peak of the step in plain PyTorch, with what is held besides it."""
        with as_on(self.device, autocast=self.autocast):
            step_bytes = plain_peak_bytes(
                self.model,
                args,
                kwargs,
                traced_on=traced_on(self.device),
                device_type=self.device.type,
            )

        if step_bytes is None:
            return None
        return graph.resident_bytes + step_bytes + self.held.total

    @cached_property
    def held(self) -> Held:
        """What is in memory besides the step."""
        gradient_bytes = sum(
            p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad
        )

        return Held(
            self.optimizer,
            gradient_bytes,
            gradient_bytes if self.is_accumulating else 0,
            self.reserve_bytes,
            self.device.library_bytes,
        )

    def budget_bytes(self, graph: Graph) -> int:
        """Returns the budget for the step and what is held besides it.

        A percentage refers to the peak of keeping everything in `graph`, plus what is held.
        """
        return parse_budget(self.budget, keep_all_bytes=keep_all_peak(graph) + self.held.total)

    def optimizer_step_bytes(self, graph: Graph) -> int:
        """Returns the peak while the optimizer steps, after the activations are freed."""
        return (
            graph.resident_bytes
            + self.held.gradient_bytes
            + self.optimizer.state_bytes
            + self.optimizer.step_bytes
            + self.held.throughout_bytes
        )

    def answer(self, graph: Graph) -> Fit:
        """Returns whether the step of `graph` fits, and its plan."""
        budget_bytes, after = self.budget_bytes(graph), self.optimizer_step_bytes(graph)
        least = minimum(graph, time_limit_s=self.time_limit_s)
        bound_bytes = max(least.lower_bound_bytes + self.held.total, after)

        solution = (
            self._solve(graph, budget_bytes - self.held.total, least)
            if bound_bytes <= budget_bytes
            else None
        )

        is_solved = solution is not None and solution.is_solved
        peak_bytes = (
            min(least.peak_bytes, solution.peak_bytes)
            if solution is not None and is_solved
            else least.peak_bytes
        )

        return Fit(
            model=type(self.model).__name__,
            device=self.device.name,
            budget_bytes=budget_bytes,
            graph=graph,
            held=self.held,
            solution=solution if is_solved else None,
            optimizer_step_bytes=after,
            minimum_bytes=max(peak_bytes + self.held.total, after),
            bound_bytes=bound_bytes
            if solution is None or solution.status is not Status.INFEASIBLE
            else max(bound_bytes, budget_bytes + 1),
            device_type=self.device.type,
        )

    def _solve(self, graph: Graph, budget_bytes: int, least: Minimum) -> Solution:
        method = (
            make_solver(self.solver, time_limit_s=self.time_limit_s)
            if isinstance(self.solver, str)
            else self.solver
        )

        if isinstance(method, Auto):
            return method.improve(
                graph,
                budget_bytes=budget_bytes,
                known_steps=[least.steps],
                shared=Shared(graph, least),
            )
        return method.solve(graph, budget_bytes=budget_bytes)


def _memory_of(device: Device, step: nn.Module, *, is_current: bool) -> int:
    """Returns the memory that `checkpoint` would plan a step for if it gets no budget.

    For the current GPU that is what is free there, and what the model's own tensors take there; for
    a card of the table it is as if nothing else was on it. On a CPU it is all memory.
    """
    if device.type == "cpu":
        return device.memory_bytes
    if not is_current:
        return device.memory_bytes - kept_free_bytes(device.memory_bytes)

    is_fake = any(isinstance(parameter, FakeTensor) for parameter in step.parameters())
    own_bytes = 0 if is_fake else there_bytes(step, (), device.type)
    return budget_of_card(device.type, own_bytes, of_all_ranks=False)
