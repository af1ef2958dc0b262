"""The `torch.compile` backend that runs plans through Inductor, within the budget.

Inductor lets a custom partitioner cut its joint graph into forward and backward
(`torch._inductor.config.custom_partitioner_fn`). In this graph, dropout already draws from seeds
that the forward makes (`inductor_seeds`). The seeds are saved, and every recomputation makes the
same masks from them. Each half is compiled in the plan's order, and a dry run tells what its
kernels hold. If they exceed the budget, the step is planned and compiled again with a smaller one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from remat.core.errors import BudgetError
from remat.core.room import Room
from remat.core.solution import Solution
from remat.inductor.attempts import Attempts, CompiledPlan
from remat.inductor.byte_masks import store_masks_as_bytes
from remat.inductor.compiled_halves import CompiledHalves, compile_fx_inner
from remat.inductor.float_results import FloatResults
from remat.inductor.kernel_graph import FusedStep, fuse
from remat.inductor.paddings import share_paddings
from remat.inductor.refusals import refuse_lost_updates, refuse_taken_settings
from remat.pieces.compiled_piece import boxed
from remat.run.capture import (
    PlannedStep,
    Planner,
    Step,
    check_joint,
    refuse_unplannable,
    runs_once,
    with_own_gradients,
)
from remat.run.other_outputs import check_differentiate, refusals_of_outputs
from remat.run.plain_forward import PlainForward
from remat.run.plain_steps import PlainSteps
from remat.torch_border.autograd import backward_without_autocast
from remat.torch_border.inductor import (
    copied,
    halves_compiled_at_once,
    inductor_compilers,
    inductor_partitioner,
    leave_kept_graphs_to_the_backward,
)
from remat.tracers.aot import read_joint
from remat.tracers.calls import Call
from remat.tracers.costs import CostModel
from remat.tracers.recomputable import are_inference
from remat.tracers.traced_step import TracedStep

compile_fx, _ = inductor_compilers()
_LOG = logging.getLogger(__name__)


def make_inductor_backend(
    plan: Planner,
    costs: CostModel,
    on_planned: Callable[[PlannedStep], None],
    *,
    differentiate: str = "scalars",
    model_bytes: Callable[[], int] = lambda: 0,
    plain_steps: PlainSteps | None = None,
    room_of: Callable[[Solution], Room] | None = None,
) -> Any:
    """Returns a `torch.compile` backend that runs the solution of `plan` through Inductor.

    See `make_backend`. `room_of` gives the budget that a solution was made for, for errors.
    """
    check_differentiate(differentiate)

    def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        refuse_lost_updates(module)
        refuse_taken_settings()
        refuse_unplannable(module)
        read = _reader(costs, model_bytes, are_inference(example_inputs))
        plain = PlainForward(module, example_inputs) if plain_steps else None
        with_refusals = refusals_of_outputs(module, differentiate)

        workspace_of = costs.workspace_of
        compilation = _within_budget(
            module, example_inputs, read, plan, workspace_of, plain, room_of
        )
        compiled, planned = compilation.compiled, compilation.planned

        if planned:
            on_planned(_with_kernels(planned, compilation))
            compiled = with_own_gradients(compiled, planned)
            if plain_steps and plain:
                compiled = plain_steps.around(plain, compiled)

        return with_refusals(compiled)

    return backend


def _with_kernels(planned: PlannedStep, compilation: _Compilation) -> PlannedStep:
    """Returns a planned step with what is known of its compiled kernels before they run."""
    if planned.meter.device == "cuda":
        planned.meter.num_unmeasured = 1  # the first step also tunes Triton's kernels
    return replace(
        planned,
        kernels_peak_bytes=compilation.peak_bytes,
        kernels_room_bytes=compilation.room_bytes,
    )


Read = Callable[[fx.GraphModule, int, Any], FusedStep]


def _reader(costs: CostModel, model_bytes: Callable[[], int], inference: Sequence[bool]) -> Read:
    """Returns what reads a joint graph as a step of kernels; `inference`: see `check_joint`."""

    def read(joint: fx.GraphModule, num_forward_outputs: int, static: Any) -> FusedStep:
        check_joint(joint, inference)
        share_paddings(joint)
        store_masks_as_bytes(joint)
        return fuse(
            read_joint(
                joint,
                num_forward_outputs,
                costs,
                static_inputs=tuple(static or ()),
                model_bytes=model_bytes(),
            )
        )

    return read


def _within_budget(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    read: Read,
    plan: Planner,
    workspace_of: Callable[[Call], int],
    plain: PlainForward | None,
    room_of: Callable[[Solution], Room] | None,
) -> _Compilation:
    """Plans and compiles a step, as `Attempts` chooses, until its kernels fit the budget.

    Raises:
        BudgetError: no plan's kernels fit.
    """
    attempts = Attempts()
    while True:
        room_bytes = attempts.room_bytes
        compilation = _Compilation(
            read,
            _with_room(plan, room_bytes, attempts.known),
            workspace_of,
            plain,
            room_bytes,
            attempts.limit_room_bytes,
            attempts.keeps_layouts,
        )
        try:
            compilation.compile(module, example_inputs)
        except BudgetError as error:
            attempts.refused(error)
            continue

        if _is_kept(compilation, attempts, room_of):
            compilation.wait()
            return compilation


def _is_kept(
    compilation: _Compilation, attempts: Attempts, room_of: Callable[[Solution], Room] | None
) -> bool:
    """Says whether a step's kernels fit the budget, as far as it is known; notes those that don't.

    Raises:
        BudgetError: it is not known, and an earlier attempt was refused.
    """
    planned, peak_bytes = compilation.planned, compilation.peak_bytes
    if planned is not None and peak_bytes is not None:
        if peak_bytes <= planned.solution.budget_bytes + compilation.room_bytes:
            return True
        attempts.held_too_much(
            planned.graph,
            planned.solution,
            peak_bytes,
            room=room_of(planned.solution) if room_of else None,
            may_keep_layouts=_may_copy_layouts(planned.step),
        )
        return False

    if attempts.refusal:
        raise attempts.refusal
    if planned is not None:
        _LOG.warning(
            "what the kernels of this step hold is not known before they run; the first step "
            "is measured"
        )
    return True


def _may_copy_layouts(step: TracedStep) -> bool:
    """Says whether Inductor may copy the inputs of convolutions; see `CompiledHalves`."""
    return step.graph.device != "cpu" and any(
        op.target.startswith("aten.convolution") for op in step.graph.operators
    )


def _with_room(plan: Planner, room_bytes: int, known: CompiledPlan | None) -> Planner:
    def planned(step: Step, *, unplanned_bytes: int = 0) -> Solution:
        given = {"known": known.solution} if known else {}
        return plan(step, unplanned_bytes=unplanned_bytes + room_bytes, **given)

    return planned


@dataclass(eq=False)
class _Compilation:
    """One plan of a step, compiled.

    Attributes:
        read: reads a joint graph as a step.
        plan: step -> solution.
        workspace_of: call of a library operator -> its workspace.
        plain: can run the step as plain PyTorch.
        room_bytes: how far the plan's budget is below the step's; negative if it is above.
        limit_room_bytes: see `Attempts`.
        keeps_layouts: see `CompiledHalves`.
        compiled: the compiled step; set by `compile`.
        planned: its plan; None where nothing needs a gradient.
    """

    read: Read
    plan: Planner
    workspace_of: Callable[[Call], int]
    plain: PlainForward | None
    room_bytes: int
    limit_room_bytes: int
    keeps_layouts: bool
    compiled: Callable[..., Any] = field(init=False)
    planned: PlannedStep | None = None
    _halves: CompiledHalves | None = None

    def compile(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        """Plans and compiles a captured forward and its backward."""
        patches = {"custom_partitioner_fn": inductor_partitioner(self._cut)}
        floats = FloatResults()
        with backward_without_autocast(), halves_compiled_at_once(), floats.taken_out():
            self.compiled = compile_fx(
                copied(module),
                list(example_inputs),
                inner_compile=floats.added(self._compile_half),
                config_patches=patches,
            )

    def wait(self) -> None:
        """Waits until the kernels are compiled."""
        if self._halves:
            self._halves.wait()

    @property
    def peak_bytes(self) -> int | None:
        """The peak of the step; None where it is unknown before the step runs."""
        held = self._halves.peaks_bytes if self._halves else None
        if self.planned is None or held is None:
            return None
        return self.planned.graph.resident_bytes + max(held)

    def _cut(
        self,
        joint: fx.GraphModule,
        _: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Any = None,
        **__: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        fused = self.read(joint, num_fwd_outputs, static_lifetime_input_indices)
        self.planned = PlannedStep.of(fused.step, self.plan, self.plain, fused)

        limit_bytes = (
            self.planned.solution.budget_bytes
            + min(0, self.limit_room_bytes)
            - fused.step.graph.resident_bytes
        )
        self._halves = CompiledHalves(
            fused.step,
            self.planned.split,
            (limit_bytes, limit_bytes),
            self.workspace_of,
            keeps_layouts=self.keeps_layouts,
        )

        return self.planned.split.forward, self.planned.split.backward

    def _compile_half(self, graph: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        planned = self.planned
        if planned is None or self._halves is None:
            return compile_fx_inner(graph, inputs, **kwargs)

        compiled = self._halves.compile(graph, inputs, **kwargs)
        # a half that computes nothing is a function
        run = getattr(compiled, "current_callable", compiled)
        if kwargs.get("is_backward"):
            leave_kept_graphs_to_the_backward()
            backward = planned.meter.backward(planned.tangents.with_zeros(run))
            measured = runs_once(backward, planned, self.plain)
        else:
            planned.meter.num_results = self._halves.num_returned(graph)
            measured = planned.forward(run)

        if run is compiled:
            return boxed(measured)
        compiled.current_callable = measured
        return compiled
