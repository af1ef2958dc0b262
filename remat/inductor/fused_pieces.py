"""A step that `torch.compile` cuts into pieces, each of which Inductor compiles.

The pieces are planned as one step (`remat.pieces`). Here each piece is a graph of kernels, and its
halves are compiled for the schedule that the joined plan gives it. Until there is a plan, the piece
runs with the least memory known, also as kernels, so it is compiled twice.

A dry run of each half tells by how much its kernels exceed their part of the plan. The step will
hold the plan's memory, plus this excess while the half runs, and in between by how much more its
forward saves than planned. If that is above the budget, the step
is planned and compiled again with a smaller budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import fx, nn

from remat.core.errors import BudgetError
from remat.core.graph import Graph
from remat.core.schedule import Schedule, effective_sizes, lifetimes, simulate
from remat.core.solution import Solution
from remat.inductor.attempts import Attempts
from remat.inductor.byte_masks import store_masks_as_bytes
from remat.inductor.compiled_halves import CompiledHalves, compile_fx_inner
from remat.inductor.float_results import FloatResults
from remat.inductor.kernel_graph import FusedStep, fuse
from remat.inductor.paddings import share_paddings
from remat.inductor.refusals import refuse_lost_updates, refuse_taken_settings
from remat.pieces.captured_piece import Copied, Piece
from remat.pieces.compiled_piece import boxed
from remat.pieces.joined_step import JoinedStep
from remat.pieces.recording import JoinedPlan, Path
from remat.pieces.runner import Piecewise
from remat.pieces.step_planner import StepPlanner
from remat.run.executor import BoxedFunction, compile_graph
from remat.run.refusals import refuse_cudnn_rnns
from remat.run.rewrite import SplitStep, split
from remat.torch_border.autograd import backward_without_autocast, without_autocast
from remat.torch_border.higher_order import make_tokens_inside
from remat.torch_border.inductor import (
    copied as copied_module,
)
from remat.torch_border.inductor import (
    halves_compiled_at_once,
    inductor_compilers,
    inductor_partitioner,
    reporting_strides,
)
from remat.torch_border.kernel_scheduler import copy_operator
from remat.tracers.costs import CostModel

compile_fx, _ = inductor_compilers()


class Excess(NamedTuple):
    """By how many bytes a piece's kernels exceed its plan; negative where they hold less.

    Attributes:
        forward: while its forward runs.
        between: from then until its backward begins; never negative.
        backward: while its backward runs.
    """

    forward: int
    between: int
    backward: int

    @classmethod
    def of(cls, kernels: CompiledHalves, planned: tuple[int, int], end_bytes: int) -> Excess | None:
        """Returns the excess over a plan's peaks and its end; None where it is not known."""
        held = kernels.peaks_bytes
        if held is None:
            return None
        between = max(0, kernels.memory[False].end_bytes - end_bytes)
        return cls(held[0] - planned[0], between, held[1] - planned[1])


class FusedPiece(Piece):
    """A piece whose operators are kernels."""

    def __init__(
        self,
        joint: fx.GraphModule,
        num_forward: int,
        static_inputs: Sequence[int],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        num_tokens = make_tokens_inside(joint, num_forward)
        static_inputs = [place - num_tokens for place in static_inputs]
        super().__init__(joint, num_forward - num_tokens, static_inputs, *args, **kwargs)
        share_paddings(self.joint)
        store_masks_as_bytes(self.joint)
        self.copy_of = copy_operator()
        self._fused: dict[Copied, FusedStep] = {}
        # for each number of halves: by how much their kernels exceed the plan
        self.excess_bytes: list[Excess | None] = []

    def step(self, copied: Copied) -> FusedStep:
        """Returns the piece's kernels, with copies of some inputs and results."""
        if copied not in self._fused:
            self._fused[copied] = fuse(self.traced(copied))
        return self._fused[copied]

    def split(self, copied: Copied, schedule: Schedule) -> SplitStep:
        """Returns the graphs of both halves under a schedule of kernels."""
        fused = self.step(copied)
        return split(fused.step, fused.unfused(schedule), is_free_order=True)

    def compiled(self, copied: Copied, schedule: Schedule) -> tuple[BoxedFunction, BoxedFunction]:
        """Returns both halves; where possible, their kernels hold no more than the schedule.

        On fake tensors no kernel can run, so the operators run one by one.
        """
        if self.is_trace:
            return super().compiled(copied, schedule)

        fused, halves = self.step(copied), self.split(copied, schedule)
        planned = _planned_bytes(fused.graph, schedule)
        kernels = CompiledHalves(fused.step, halves, planned, self.costs.workspace_of)

        forward, backward = halves.forward, halves.backward
        _mark_visible(forward, backward, self.num_forward)
        inputs = [node.meta["val"] for node in forward.graph.find_nodes(op="placeholder")]
        # the forward that is planned may run under autocast
        with reporting_strides(inputs) as strides, without_autocast():
            run_forward = kernels.compile(forward, inputs)

        given = [node.meta["val"] for node in backward.graph.find_nodes(op="placeholder")]
        # the forward returns the numbers last, the backward takes them first
        saved = strides[self.num_forward : len(strides) - self.num_numbers]
        for place, stride in enumerate(saved, start=self.num_numbers):
            if stride is not None:
                given[place] = given[place].as_strided(given[place].shape, stride)
        with without_autocast():
            run_backward = kernels.compile(backward, given, is_backward=True)

        end_bytes = _end_bytes(fused.graph, schedule)
        self.excess_bytes.append(Excess.of(kernels, planned, end_bytes))

        def when_compiled(run: BoxedFunction, args: list[Any]) -> Any:
            kernels.wait()
            return run(args)

        return boxed(partial(when_compiled, run_forward)), self.tangents.with_zeros(
            partial(when_compiled, run_backward)
        )


def _planned_bytes(graph: Graph, schedule: Schedule) -> tuple[int, int]:
    """Returns the plan's peaks in forward and backward, without what exists throughout."""
    bytes_at = simulate(graph, schedule).bytes_at - graph.resident_bytes
    mark = schedule.num_forward_steps
    return int(max(bytes_at[:mark], default=0)), int(max(bytes_at[mark:], default=0))


def _mark_visible(forward: fx.GraphModule, backward: fx.GraphModule, num_forward: int) -> None:
    """Tells Inductor which results the user sees, whose layouts it has to keep."""
    forward.graph.output_node().meta["user_visible_output_idxs"] = list(range(num_forward))
    gradients: Any = backward.graph.output_node().args[0]
    backward.graph.output_node().meta["user_visible_output_idxs"] = [
        place for place, gradient in enumerate(gradients) if isinstance(gradient, fx.Node)
    ]


def _end_bytes(graph: Graph, schedule: Schedule) -> int:
    """Returns what a plan holds after its forward, without what exists throughout."""
    lives, mark = lifetimes(graph, schedule.array), schedule.num_forward_steps
    is_saved = (lives.first < mark) & (lives.last >= mark)
    return int(effective_sizes(graph.arrays, schedule.array)[lives.value[is_saved]].sum())


def compiled_by_inductor(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    compile_forward: Callable[[fx.GraphModule, Any], Any],
    compile_backward: Callable[[fx.GraphModule, Any], Any],
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    *,
    is_trace: bool = False,
) -> Callable[..., Any]:
    """Compiles a dynamo graph as Inductor does; `partition` splits its joint graph.

    Its halves run the piece's part of the plan, and are compiled once there is a plan. With
    `is_trace`, a graph without a backward is not compiled either.
    """
    refuse_lost_updates(module)
    refuse_taken_settings()
    refuse_cudnn_rnns(module)
    joints: list[fx.GraphModule] = []

    def cut(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        joints.append(joint)
        return partition(joint, inputs, **kwargs)

    def compile_half(graph: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        if not joints:  # nothing needs a gradient
            return compile_graph(graph) if is_trace else compile_fx_inner(graph, inputs, **kwargs)
        compile_ = compile_backward if kwargs.get("is_backward") else compile_forward
        return compile_(graph, inputs)

    patches = {"custom_partitioner_fn": inductor_partitioner(cut)}
    floats = FloatResults()
    with backward_without_autocast(), halves_compiled_at_once(), floats.taken_out():
        compiled: Callable[..., Any] = compile_fx(
            copied_module(module),
            list(example_inputs),
            inner_compile=floats.added(compile_half),
            config_patches=patches,
        )
    return compiled


class FusedPiecewise(Piecewise):
    """Runs a step in pieces, through Inductor."""

    make_piece = FusedPiece

    def __init__(self, module: nn.Module, plan: StepPlanner | None, costs: CostModel) -> None:
        super().__init__(module, plan, costs)
        self.compile = partial(compiled_by_inductor, is_trace=self.is_trace)

    def install(
        self,
        path: Path,
        copies: Sequence[Copied],
        joined: JoinedStep,
        held_bytes: int,
        unplanned_bytes: int = 0,
        kernels_room_bytes: int = 0,
        known: Solution | None = None,
    ) -> JoinedPlan:
        """Plans a path; plans again with a smaller budget until its kernels fit.

        Raises:
            BudgetError: no plan's kernels fit.
        """
        attempts = Attempts(kernels_room_bytes)
        while True:
            room_bytes = attempts.room_bytes
            try:
                planned = super().install(
                    path,
                    copies,
                    joined,
                    held_bytes,
                    unplanned_bytes,
                    room_bytes,
                    attempts.known.solution if attempts.known else known,
                )
            except BudgetError as error:
                attempts.refused(error)
                continue

            budget_bytes = planned.solution.budget_bytes + room_bytes
            peak_bytes = planned.kernels_peak_bytes or 0
            if peak_bytes <= budget_bytes:
                if planned.meter.device == "cuda":
                    planned.meter.num_unmeasured = 1  # that step also tunes Triton's kernels
                return planned
            del self.plans[path, held_bytes]
            assert self.plan_of is not None, "what is installed is planned"
            room = self.plan_of.room_of(planned.solution)
            attempts.held_too_much(joined.graph, planned.solution, peak_bytes, room=room)

    def kernels_peak_bytes(
        self, path: Path, numbers: Sequence[int], joined: JoinedStep, schedule: Schedule
    ) -> int | None:
        """Returns the peak of the kernels; None where it is unknown before they run."""
        steps, mark = schedule.steps, schedule.num_forward_steps
        times: list[list[int]] = [[] for _ in path]
        for time, index in enumerate(steps):
            if index in joined.origin:
                times[joined.origin[index][0]].append(time)

        extra_bytes = np.zeros(len(steps), np.int64)
        for piece, number, of_piece in zip(path, numbers, times, strict=True):
            assert isinstance(piece, FusedPiece), "all pieces of a step are made alike"
            own = piece.excess_bytes[number]
            if own is None:
                return None
            forward = [time for time in of_piece if time < mark]
            backward = [time for time in of_piece if time >= mark]
            extra_bytes[np.array(forward, np.intp)] += own.forward
            extra_bytes[np.array(backward, np.intp)] += own.backward
            if forward:
                begin = min(backward, default=len(steps))
                extra_bytes[forward[-1] + 1 : begin] += own.between

        return int((simulate(joined.graph, schedule).bytes_at + extra_bytes).max(initial=0))
