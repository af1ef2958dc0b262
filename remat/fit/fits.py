"""Will it fit: what a training step of a model needs on a device, before any time on one.

The step is traced on fake tensors and planned for the device's memory. Beside the step's own peak
the optimizer counts: its state is held throughout, and its own step has a peak of its own, when the
activations are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from remat.core.budget import Budget, describe_bytes, format_bytes, parse_budget
from remat.core.graph import Graph, ValueKind
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution, Status
from remat.core.units import Scale
from remat.face.step_function import as_step
from remat.face.tracing import trace_for
from remat.fit.footprint import Footprint, Held
from remat.fit.optimizer_memory import MakeOptimizer, OptimizerMemory, optimizer_memory
from remat.fit.plain_step import plain_peak_bytes
from remat.solvers import Solver, make_solver
from remat.solvers.auto.minimum import Minimum, minimum
from remat.solvers.auto.reuse import Shared
from remat.solvers.auto.solver import Auto
from remat.tracers.devices import Device, device_at_hand
from remat.tracers.devices import device as device_named
from remat.tracers.retarget import as_on, traced_on


@dataclass(frozen=True)
class Fit:
    """Whether and how a training step fits: true where it does, print it, or read its fields.

    Attributes:
        model: the name of the model's class.
        device: the device planned for.
        budget_bytes: what it may hold.
        graph: the step as the device would run it.
        held: what is held beside the step.
        solution: the plan of the least overhead that was found, None where none fits; its budget is
            that of the step alone.
        optimizer_step_bytes: the peak while the optimizer steps.
        minimum_bytes: the least budget known to do.
        bound_bytes: proved: no budget below can do, in this order of operators.
        plain_bytes: what plain PyTorch holds at the peak of this step. It is more than keeping
            everything in the captured step, where what computes nothing is gone. None where it was
            not asked, or can't be found without data.
    """

    model: str
    device: str
    budget_bytes: int
    graph: Graph
    held: Held
    solution: Solution | None
    optimizer_step_bytes: int
    minimum_bytes: int
    bound_bytes: int
    plain_bytes: int | None = None

    def __bool__(self) -> bool:
        return self.solution is not None

    @cached_property
    def keep_all(self) -> Footprint:
        """The peak where everything is kept."""
        return Footprint.of(self.graph, Schedule.keep_all(self.graph), self.held)

    @cached_property
    def planned(self) -> Footprint | None:
        """The peak of the plan; None where none fits."""
        if self.solution is None or self.solution.schedule is None:
            return None
        return Footprint.of(self.graph, self.solution.schedule, self.held)

    @property
    def status(self) -> Status:
        """OPTIMAL or FEASIBLE where it fits.

        INFEASIBLE where it was proved not to, NO_SOLUTION where no plan was found.
        """
        if self.solution is not None:
            return self.solution.status
        return Status.INFEASIBLE if self.bound_bytes > self.budget_bytes else Status.NO_SOLUTION

    @property
    def overhead(self) -> float:
        """Extra compute of the plan over keeping everything; infinite where nothing fits."""
        return self.solution.overhead if self.solution is not None else float("inf")

    @property
    def step_s(self) -> float:
        """Seconds of forward and backward of the plan, at the cost model's word.

        Infinite where nothing fits.
        """
        return self.solution.cost_s if self.solution is not None else float("inf")

    def record(self) -> dict[str, Any]:
        """Returns the figures for JSON; those that are not there are None."""
        return {
            "fits": bool(self),
            "status": str(self.status),
            "model": self.model,
            "device": self.device,
            "budget_bytes": self.budget_bytes,
            "optimizer": self.held.optimizer.name,
            "optimizer_state_bytes": self.held.optimizer.state_bytes,
            "gradient_bytes": self.held.gradient_bytes,
            "keep_all": {
                **asdict(self.keep_all),
                "total": self.keep_all.total,
                "step_s": self.graph.cost_s,
            },
            "planned": {**asdict(self.planned), "total": self.planned.total, "step_s": self.step_s}
            if self.planned
            else None,
            "overhead_percent": 100 * self.overhead if self else None,
            "optimizer_step_bytes": self.optimizer_step_bytes,
            "minimum_bytes": self.minimum_bytes,
            "bound_bytes": self.bound_bytes,
            "plain_bytes": self.plain_bytes,
            "costs": self.graph.costs,
        }

    def __str__(self) -> str:
        console = Console(
            width=80, no_color=True, highlight=False, force_terminal=False, legacy_windows=False
        )
        with console.capture() as capture:
            console.print(self.verdict, soft_wrap=False)
            console.print(self._table())
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    @property
    def verdict(self) -> str:
        """One sentence: whether it fits, at what price, or what is missing."""
        where = f"{self.model} in {format_bytes(self.budget_bytes)} of {self.device}"
        if self:
            price = (
                f"with {100 * self.overhead:.2f} % more compute"
                if self.overhead >= 5e-5
                else "keeping everything"
            )
            return f"{where}: fits, {price}."
        how_sure = "proved" if self.status is Status.INFEASIBLE else "no plan was found"
        return f"{where}: does not fit ({how_sure}). {self._remedy()}"

    def _remedy(self) -> str:
        fixed = (
            sum(v.size_bytes for v in self.graph.values if v.kind is ValueKind.PARAMETER)
            + self.held.gradient_bytes
            + self.held.total
        )
        if fixed > self.budget_bytes:
            share = -(-fixed // self.budget_bytes)
            return (
                f"Parameters, gradients and optimizer state alone take {format_bytes(fixed)}, "
                "whatever is recomputed: shard them over "
                f"more than {share} such devices, or take an optimizer with less state."
            )
        if self.optimizer_step_bytes > self.budget_bytes:
            return (
                f"The step of {self.held.optimizer.name} itself takes "
                f"{format_bytes(self.optimizer_step_bytes)}: "
                "take foreach=False or fused=True, or one with less state."
            )
        return (
            f"The least budget known to do is {describe_bytes(self.minimum_bytes)}: take a "
            "smaller batch, or a larger device."
        )

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE, pad_edge=False)
        table.add_column("at the peak of the step")
        table.add_column("keeping everything", justify="right")
        if self:
            table.add_column("planned", justify="right")
        state = f"optimizer state ({self.held.optimizer.name})" + (
            " and reserve" if self.held.reserve_bytes else ""
        )
        rows = {
            "parameters": "parameters",
            "buffers_and_inputs": "buffers and inputs",
            "optimizer": state,
            "gradients": "gradients (of "
            f"{format_bytes(self.held.gradient_bytes + self.held.accumulated_bytes)})",
            "activations": "activations",
            "temporaries": "temporaries and workspace",
            "total": "peak",
        }
        parts = [part for part in (self.keep_all, self.planned) if part is not None]
        for field, name in rows.items():
            table.add_row(
                name,
                *[format_bytes(getattr(part, field)) for part in parts],
                end_section=field == "temporaries",
            )
        if self.plain_bytes is not None:
            table.add_row("the same step in plain PyTorch", format_bytes(self.plain_bytes))
        table.add_row(
            "peak of the optimizer's step",
            *[format_bytes(self.optimizer_step_bytes) for _ in parts],
            end_section=True,
        )
        scale = Scale.for_largest(self.graph.cost_s, "s")
        times = [
            scale.text(self.graph.cost_s),
            f"{scale.text(self.step_s)} (+{100 * self.overhead:.2f} %)",
        ]
        table.add_row(f"forward and backward, {self.graph.costs}", *times[: len(parts)])
        table.add_row("least budget known to do", format_bytes(self.minimum_bytes))
        return table


@dataclass(frozen=True)
class Question:
    """What is asked of every batch: a model, a device, an optimizer, and how a step is planned.

    Attributes:
        model: any module, of a function the one that stands for it.
        device: what to plan for.
        budget: what the step may hold; None for all of the device's memory.
        optimizer: its memory.
        reserve_bytes: kept free.
        is_accumulating: gradients of earlier micro-batches are held while the step runs.
        autocast: the type of `torch.autocast` that the step runs under; None without.
        solver: a name, or a solver.
        time_limit_s: how long planning may take.
    """

    model: nn.Module
    device: Device
    budget: Budget | None
    optimizer: OptimizerMemory
    reserve_bytes: int
    is_accumulating: bool
    autocast: torch.dtype | None
    solver: str | Solver
    time_limit_s: float

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
    ) -> Question:
        """Returns the question in the words of `fits`, whatever is wrong with them refused."""
        step = as_step(model)
        if reserve_bytes < 0:
            raise ValueError(f"reserve_bytes={reserve_bytes} is negative")
        target = device_named(device) if device else device_at_hand()
        memory = optimizer_memory(optimizer, step.parameters(), device_type=target.type)
        return cls(
            step,
            target,
            budget,
            memory,
            reserve_bytes,
            is_accumulating,
            autocast,
            solver,
            time_limit_s,
        )

    def trace(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Graph:
        """Returns the graph of the step as the device would run it.

        Traced with its kernels where torch has them.
        """
        return trace_for(
            self.device, self.model, args, kwargs, costs="roofline", autocast=self.autocast
        )

    def plain_bytes(
        self, graph: Graph, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> int | None:
        """Returns the peak of the same step in plain PyTorch, with what is held beside it."""
        with as_on(self.device.type, autocast=self.autocast):
            step_bytes = plain_peak_bytes(
                self.model,
                args,
                kwargs,
                traced_on=traced_on(self.device.type),
                device_type=self.device.type,
            )
        if step_bytes is None:
            return None
        return graph.resident_bytes + step_bytes + self.held.total

    @cached_property
    def held(self) -> Held:
        """What is held beside the step."""
        gradient_bytes = sum(
            p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad
        )
        return Held(
            self.optimizer,
            gradient_bytes,
            gradient_bytes if self.is_accumulating else 0,
            self.reserve_bytes,
        )

    def budget_bytes(self, graph: Graph) -> int:
        """The budget of one step.

        A percentage is one of keeping everything in `graph`, the optimizer's state included.
        """
        if self.budget is None:
            return self.device.memory_bytes
        return parse_budget(self.budget, keep_all_bytes=keep_all_bytes(graph) + self.held.total)

    def optimizer_step_bytes(self, graph: Graph) -> int:
        """The peak while the optimizer steps, when the activations are gone."""
        return (
            graph.resident_bytes
            + self.held.gradient_bytes
            + self.optimizer.state_bytes
            + self.optimizer.step_bytes
            + self.reserve_bytes
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


def keep_all_bytes(graph: Graph) -> int:
    """Returns the peak of keeping everything."""
    return simulate(graph, Schedule.keep_all(graph)).peak_bytes


def fits(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: str = "",
    budget: Budget | None = None,
    optimizer: str | MakeOptimizer = "adamw",
    reserve_bytes: int = 0,
    is_accumulating: bool = False,
    autocast: torch.dtype | None = None,
    solver: str | Solver = "auto",
    time_limit_s: float = 20.0,
) -> Fit:
    """Returns whether a training step of `model(*args, **kwargs)` fits, what it holds, and the
    least overhead at which it does.

    Nothing is allocated, no device is needed: the model may be on the meta device (`with
    torch.device("meta"):`), so that one of 70 billion parameters can be asked about on a laptop.

    Args:
        model: any module, or a step function.
        args: its inputs; real, meta or fake.
        kwargs: its keyword inputs.
        device: a name of the device table, "H100"; this machine's device if empty.
        budget: what the step may hold; all of the device's memory by default. A percentage is one
            of keeping everything.
        optimizer: "adamw", "sgd", "momentum", "adafactor", "adamw-8bit", ...
            (`remat.fit.optimizer_memory.OPTIMIZERS`), "none", or a class or function that makes one
            of parameters: its memory is measured on fake tensors.
        reserve_bytes: kept free, for communication buffers or the context of other libraries.
        is_accumulating: gradients of earlier micro-batches are held while the step runs.
        autocast: the type of `torch.autocast` that the step runs under.
        solver: a name (`remat.SOLVER_NAMES`) or a solver.
        time_limit_s: how long planning may take.

    Raises:
        ValueError: an unknown device or optimizer, or a malformed budget.
        TraceError: the step can't be captured as one graph.
    """
    question = Question.of(
        as_step(model, args, kwargs),
        device=device,
        budget=budget,
        optimizer=optimizer,
        reserve_bytes=reserve_bytes,
        is_accumulating=is_accumulating,
        autocast=autocast,
        solver=solver,
        time_limit_s=time_limit_s,
    )
    graph = question.trace(args, kwargs)
    return replace(question.answer(graph), plain_bytes=question.plain_bytes(graph, args, kwargs))
