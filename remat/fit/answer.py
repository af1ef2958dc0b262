"""The answer of `remat.fits`: whether a step fits, its plan and memory, and a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from remat.analysis.cuda_allocator import expected_peaks
from remat.core.budget import describe_bytes, format_bytes
from remat.core.cuda_peaks import CudaPeaks
from remat.core.graph import Graph
from remat.core.operators import ValueKind
from remat.core.schedule import Schedule
from remat.core.solution import Solution, Status
from remat.core.units import Scale
from remat.fit.footprint import Footprint, Held
from remat.torch_border.cuda_allocator import will_expand_segments


@dataclass(frozen=True)
class Fit:
    """Whether and how a training step fits; truthy if it does. Print it, or read its fields.

    Attributes:
        model: the name of the model's class.
        device: the device planned for.
        budget_bytes: the memory that may be used.
        graph: the step as the device would run it.
        held: what is in memory besides the step.
        solution: the plan with the least overhead that was found; None if none fits. Its budget is
            that of the step alone.
        optimizer_step_bytes: the peak while the optimizer steps.
        minimum_bytes: the smallest budget that is known to work.
        bound_bytes: no smaller budget works in this order of operators (proved).
        plain_bytes: the peak of the step in plain PyTorch. It is usually more than keeping
            everything in the captured step, which drops operators that compute nothing. None if
            the step can't run without data, or for the batches of `max_batch`.
        device_type: `cpu` or `cuda`.
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
    device_type: str = "cpu"

    def __bool__(self) -> bool:
        return self.solution is not None

    @cached_property
    def keep_all(self) -> Footprint:
        """The memory at the peak if everything is kept."""
        return Footprint.of(self.graph, Schedule.keep_all(self.graph), self.held)

    @cached_property
    def planned(self) -> Footprint | None:
        """The memory at the peak of the plan; None if nothing fits."""
        if self.solution is None or self.solution.schedule is None:
            return None
        return Footprint.of(self.graph, self.solution.schedule, self.held)

    @cached_property
    def cuda_peaks(self) -> tuple[CudaPeaks, ...]:
        """What torch's allocator will count on a GPU, expected: keeping everything, and planned.

        Only the first without a plan; empty for a CPU. The workspace of convolutions is missing on
        a machine without the GPU, and reserved bytes are then too low.
        """
        if self.device_type != "cuda":
            return ()
        schedules = [Schedule.keep_all(self.graph)]
        if self.solution is not None and self.solution.schedule is not None:
            schedules.append(self.solution.schedule)

        return tuple(
            expected_peaks(self.graph, schedule, is_expandable=will_expand_segments()).beside(
                self.held.total
            )
            for schedule in schedules
        )

    @property
    def status(self) -> Status:
        """OPTIMAL or FEASIBLE if it fits, INFEASIBLE if proved not to, NO_SOLUTION otherwise."""
        if self.solution is not None:
            return self.solution.status
        return Status.INFEASIBLE if self.bound_bytes > self.budget_bytes else Status.NO_SOLUTION

    @property
    def overhead(self) -> float:
        """Extra compute of the plan over keeping everything; infinite if nothing fits."""
        return self.solution.overhead if self.solution is not None else float("inf")

    @property
    def step_s(self) -> float:
        """Seconds of the plan's forward and backward by the cost model; infinite without a plan."""
        return self.solution.cost_s if self.solution is not None else float("inf")

    def record(self) -> dict[str, Any]:
        """Returns the figures for JSON; None for those that are missing."""
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
            "expected_on_cuda": [asdict(peaks) for peaks in self.cuda_peaks],
            "costs": self.graph.costs,
        }

    def __str__(self) -> str:
        console = Console(
            width=80, no_color=True, highlight=False, force_terminal=False, legacy_windows=False
        )
        with console.capture() as capture:
            console.print(self.verdict, soft_wrap=False)
            console.print(self._table())
            if len(self.cuda_peaks) == 2 and self.cuda_peaks[1].advice():
                console.print(self.cuda_peaks[1].advice())
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    @property
    def verdict(self) -> str:
        """A sentence or two: whether it fits, with how much extra compute, or what to change."""
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
                f"The parameters, gradients and optimizer state{self._beside} alone take "
                f"{format_bytes(fixed)}, and recomputing does not change that: shard them over "
                f"at least {share} such devices, or use an optimizer with less state."
            )

        if self.optimizer_step_bytes > self.budget_bytes:
            return (
                f"While {self.held.optimizer.name} steps, "
                f"{format_bytes(self.optimizer_step_bytes)} are needed: use foreach=False or "
                "fused=True, or an optimizer with less state."
            )

        if self.minimum_bytes <= self.budget_bytes:
            return (
                f"A plan of {describe_bytes(self.minimum_bytes)} is known, but not to this solver: "
                'use solver="auto", or a longer time limit.'
            )
        return (
            f"The least budget known to work is {describe_bytes(self.minimum_bytes)}: use a "
            "smaller batch or a larger device."
        )

    @property
    def _beside(self) -> str:
        """What else is held throughout, in words."""
        parts = {"reserve": self.held.reserve_bytes, "cuBLAS": self.held.library_bytes}
        return "".join(f" and {name}" for name, size_bytes in parts.items() if size_bytes)

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE, pad_edge=False)
        table.add_column("at the peak of the step")
        table.add_column("keeping everything", justify="right")
        if self:
            table.add_column("planned", justify="right")

        state = f"optimizer state ({self.held.optimizer.name}){self._beside}"
        gradients = format_bytes(self.held.gradient_bytes + self.held.accumulated_bytes)
        rows = {
            "parameters": "parameters",
            "buffers_and_inputs": "buffers and inputs",
            "optimizer": state,
            "gradients": f"gradients (of {gradients})",
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

        if self.cuda_peaks:
            allocated = [format_bytes(peaks.allocated_bytes) for peaks in self.cuda_peaks]
            reserved = [format_bytes(peaks.reserved_bytes) for peaks in self.cuda_peaks]
            table.add_row("allocated by torch, expected", *allocated)
            table.add_row("reserved by torch, expected", *reserved)
        self._add_totals(table, len(parts))
        return table

    def _add_totals(self, table: Table, num_columns: int) -> None:
        if self.plain_bytes is not None:
            table.add_row("the same step in plain PyTorch", format_bytes(self.plain_bytes))
        table.add_row(
            "peak of the optimizer's step",
            *[format_bytes(self.optimizer_step_bytes)] * num_columns,
            end_section=True,
        )

        scale = Scale.for_largest(self.graph.cost_s, "s")
        times = [
            scale.text(self.graph.cost_s),
            f"{scale.text(self.step_s)} (+{100 * self.overhead:.2f} %)",
        ]
        table.add_row(f"forward and backward, {self.graph.costs}", *times[:num_columns])
        table.add_row("least budget known to work", format_bytes(self.minimum_bytes))
