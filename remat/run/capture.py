"""Captures a step, for tracing and for running: `torch.compile` with AOTAutograd behind it.

Dynamo captures the forward as one graph; AOTAutograd makes the joint graph of forward and backward
and passes it to our partitioner, which reads it as a `Graph`, gets a plan from the planner, and
returns the two halves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import fx

from remat.core.errors import TraceError
from remat.core.graph import Graph
from remat.core.schedule import Schedule
from remat.core.solution import Solution
from remat.run.autocast_cache import autocast_cache
from remat.run.changed_results import SharedResults, refuse_changed_results
from remat.run.executor import BoxedFunction, compile_graph
from remat.run.hooked_results import refuse_hooked_results
from remat.run.measure import FirstStepMeter
from remat.run.other_outputs import check_differentiate, refusals_of_outputs
from remat.run.plain_forward import PlainForward
from remat.run.plain_kernels import plain_kernels
from remat.run.plain_steps import PlainSteps
from remat.run.refusals import (
    named,
    refuse_cudnn_rnns,
    refuse_fused_cells,
    refuse_nested,
    refuse_new_storage,
    refuse_scans,
    refuse_what_has_no_size,
    size_that_data_decides,
)
from remat.run.rewrite import SplitStep, split
from remat.run.tangents import Tangents
from remat.torch_border.allocator import abandon_node
from remat.torch_border.autograd import (
    aot_autograd,
    backward_without_autocast,
    before_next_run,
    is_batched,
    is_graph_kept,
    keep_missing_gradients,
)
from remat.torch_border.scalars import python_numbers, refuse_changing_sizes
from remat.tracers.aot import read_joint
from remat.tracers.costs import CostModel
from remat.tracers.origin import source_of
from remat.tracers.recomputable import are_inference, mark_inference_inputs
from remat.tracers.traced_step import TracedStep


class Step(Protocol):
    """A step that can be planned: captured whole, joined from pieces, or fused."""

    @property
    def graph(self) -> Graph:
        """Its operators and storages."""


class FusedOperators(Step, Protocol):
    """A step whose operators are kernels of several operators."""

    def unfused(self, schedule: Schedule) -> Schedule:
        """Returns a schedule of kernels as a schedule of operators."""


# step -> solution; `unplanned_bytes=` reserves memory for what is not part of the step, and
# `known=` is a solution to use if it fits
Planner = Callable[..., Solution]


@dataclass(frozen=True)
class PlannedStep:
    """A step that was captured as one graph, with its plan and its halves.

    Attributes:
        step: the captured step.
        solution: its plan.
        split: its halves.
        meter: measures its first run.
        kernels: the graph that was planned, where operators are fused.
        kernels_peak_bytes: the peak of fused kernels, known before they run.
        kernels_room_bytes: how far the plan's budget is below the step's, because kernels hold more
            than planned.
        shared: the results that lie in memory that the forward saves.
    """

    step: TracedStep
    solution: Solution
    split: SplitStep
    meter: FirstStepMeter
    kernels: Graph | None = None
    kernels_peak_bytes: int | None = None
    kernels_room_bytes: int = 0
    shared: SharedResults = field(default_factory=SharedResults)

    def forward(self, run: BoxedFunction) -> BoxedFunction:
        """Returns a compiled forward, measured in the first step; it notes what results share."""
        return self.shared.noted(self.meter.forward(run), self.meter.num_results)

    @cached_property
    def tangents(self) -> Tangents:
        """The gradients that arrive for it."""
        return Tangents(self.step.module, self.step.num_forward_outputs)

    @property
    def budget_bytes(self) -> int:
        """What the step may hold."""
        return self.solution.budget_bytes + self.kernels_room_bytes

    @property
    def excess_bytes(self) -> int:
        """How much more than that the measured step held; negative if it held less."""
        return self.meter.tensor_bytes - self.budget_bytes

    @property
    def graph(self) -> Graph:
        """The graph that was planned."""
        return self.kernels or self.step.graph

    @classmethod
    def of(
        cls,
        step: TracedStep,
        plan: Planner,
        plain: PlainForward | None,
        kernels: FusedOperators | None = None,
    ) -> PlannedStep:
        """Plans a captured step and cuts it into its halves.

        Args:
            step: the captured step.
            plan: step -> solution.
            plain: can run the step as plain PyTorch, for which the plan leaves room.
            kernels: what is planned in its place, where operators are fused.

        Raises:
            TraceError: the planner found no schedule.
        """
        solution = plan(kernels or step, **(plain.room_beside(step) if plain else {}))
        schedule = solution.schedule
        if schedule is None:
            raise TraceError(f"the planner found no schedule ({solution.status})")
        if kernels:
            schedule = kernels.unfused(schedule)
        graph = kernels.graph if kernels else step.graph
        meter = FirstStepMeter(graph.device, graph.resident_bytes, step.num_forward_outputs)
        if plain:
            plain.forget = meter.forget
        halves = split(step, schedule, is_free_order=kernels is not None)
        return cls(step, solution, halves, meter, kernels.graph if kernels else None)


class GraphBreak(TraceError):
    """The step can't be captured as one graph; `place` is the reason and the line of code."""

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place


def make_backend(
    plan: Planner,
    costs: CostModel,
    on_planned: Callable[[PlannedStep], None],
    *,
    differentiate: str = "scalars",
    model_bytes: Callable[[], int] = lambda: 0,
    plain_steps: PlainSteps | None = None,
) -> Any:
    """Returns a `torch.compile` backend that runs each captured step as `plan` plans it.

    Args:
        plan: step -> solution.
        costs: the cost model of the graph.
        on_planned: called with each captured step once it is planned.
        differentiate: "scalars": where the model returns scalars that need a gradient (losses),
            gradients of its other outputs are not planned, and asking for one is an error. "all":
            gradients of every output are planned.
        model_bytes: returns the bytes of all parameters and buffers, whether or not the step reads
            them; called at each capture, since a forward may register more.
        plain_steps: runs the steps whose backward no plan can run; if None, these are errors.
    """
    check_differentiate(differentiate)

    def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        refuse_uncapturable(module)
        plain = PlainForward(module, example_inputs) if plain_steps else None
        with_refusals = refusals_of_outputs(module, differentiate)
        inference = are_inference(example_inputs)

        capture = _Capture(plan, costs, on_planned, model_bytes, plain, inference)
        compiled = compiled_by_aot(
            module,
            example_inputs,
            capture.compile_forward,
            capture.compile_backward,
            capture.partition,
        )

        if capture.planned:
            compiled = with_own_gradients(compiled, capture.planned[-1])
        if plain_steps and plain and capture.planned:
            compiled = plain_steps.around(plain, compiled)
        return with_refusals(compiled)

    return backend


@dataclass(eq=False)
class _Capture:
    """One capture: the three callbacks that AOTAutograd gets, and what they share."""

    plan: Planner
    costs: CostModel
    on_planned: Callable[[PlannedStep], None]
    model_bytes: Callable[[], int]
    plain: PlainForward | None
    inference: tuple[bool, ...]  # inputs made under `torch.inference_mode()`
    planned: list[PlannedStep] = field(default_factory=list)  # empty: nothing needs a gradient

    def partition(
        self,
        joint: fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Any = None,
        **_: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        check_joint(joint, self.inference)
        step = read_joint(
            joint,
            num_fwd_outputs,
            self.costs,
            static_inputs=tuple(static_lifetime_input_indices or ()),
            model_bytes=self.model_bytes(),
        )
        self.planned.append(PlannedStep.of(step, self.plan, self.plain))
        self.on_planned(self.planned[-1])
        return self.planned[-1].split.forward, self.planned[-1].split.backward

    def compile_forward(self, graph: fx.GraphModule, _: Any) -> Any:
        run = compile_graph(graph)
        return self.planned[-1].forward(run) if self.planned else run

    def compile_backward(self, graph: fx.GraphModule, _: Any) -> Any:
        last = self.planned[-1]
        return runs_once(last.meter.backward(last.tangents.backward(graph)), last, self.plain)


def check_joint(joint: fx.GraphModule, inference: Sequence[bool]) -> None:
    """Refuses a joint graph that no plan can run, and marks inputs made under inference mode."""
    refuse_changing_sizes(joint.graph)
    refuse_what_has_no_size(joint)
    mark_inference_inputs(joint, inference)


def refuse_uncapturable(module: fx.GraphModule) -> None:
    """Raises `TraceError` for what no plan can run, `GraphBreak` where the graph has to be cut."""
    refuse_scans(module)
    refuse_unplannable(module)


def refuse_unplannable(module: fx.GraphModule) -> None:
    """Does the same as `refuse_uncapturable`, but allows scans, which Inductor can run."""
    refuse_cudnn_rnns(module)
    refuse_fused_cells(module)
    refuse_changing_sizes(module.graph)
    refuse_nested(module)
    refuse_new_storage(module)
    cut_at_sizes(module)


def compiled_by_aot(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    compile_forward: Callable[[fx.GraphModule, Any], Any],
    compile_backward: Callable[[fx.GraphModule, Any], Any],
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
) -> Callable[..., Any]:
    """Compiles a dynamo graph with AOTAutograd; `partition` splits its joint graph."""
    trace_and_compile = aot_autograd(
        fw_compiler=compile_forward,
        bw_compiler=compile_backward,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    with (
        backward_without_autocast(),
        python_numbers(),
        plain_kernels(),
        autocast_cache(module, example_inputs),
    ):
        return trace_and_compile(module, example_inputs)


def cut_at_sizes(module: fx.GraphModule) -> None:
    """Raises `GraphBreak` at the first size that data decides, so that a piece ends there."""
    node = size_that_data_decides(module)
    if node is not None:
        line = source_of(node).split(": ")[0]
        raise GraphBreak(
            f"data decides the size of what {named(node)} returns, so this step can't be one graph "
            "with sizes known beforehand; pad to a known size, for example with torch.where, or "
            "let remat.checkpoint plan the pieces before and after it",
            f"Dynamic shape operator ({line})",  # in the words of dynamo's graph breaks
        )


def runs_once(
    backward: BoxedFunction, step: PlannedStep | None = None, plain: PlainForward | None = None
) -> BoxedFunction:
    """Returns a backward that refuses to keep the graph, and to run a second time.

    What was saved may be overwritten in place, and is freed at its last use.

    Args:
        backward: the planned backward.
        step: the step, where it was captured whole; None for a piece.
        plain: runs such backwards instead, where it can.
    """
    num_tangents = step.tangents.num if step else 0

    def run(args: list[Any]) -> Any:
        if is_graph_kept():
            abandon_node()
            raise TraceError(
                "a planned step runs its backward once: what it saved is freed, so "
                "retain_graph=True and create_graph=True (gradients of gradients) are not "
                "possible; add the losses up and call backward once, or use "
                f"remat.unwrap(model){_advice(step, plain)}"
            )
        if any(map(is_batched, args[len(args) - num_tangents :])):
            raise TraceError(
                "a planned step takes one gradient at a time, and many arrived at once "
                "(is_grads_batched=True, vectorize=True or torch.vmap); use "
                f"remat.unwrap(model), with one gradient after the other{_advice(step, plain)}"
            )
        refuse_changed_results()
        refuse_hooked_results()
        before_next_run(refuse_second_run)
        return backward(args)

    def refuse_second_run(gradients: Sequence[Any]) -> None:
        """Raises our own error, before autograd's, which advises retain_graph=True."""
        if any(gradient is not None for gradient in gradients):
            raise TraceError(
                "a second backward runs through one planned step, but the first freed what the "
                "step saved: a planned step runs its backward once; add its losses up and call "
                "backward once, or plan a function that returns their sum, or use "
                f"remat.unwrap(model){_advice(step, plain)}"
            )

    run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd then passes a list
    return run


def _advice(step: PlannedStep | None, plain: PlainForward | None) -> str:
    if step is None:
        return (
            '; on_unsupported="plain" works only for a step that is one graph, but this one runs '
            "in pieces: remat.report shows where it is cut"
        )
    if plain is None:
        return ', or use on_unsupported="plain", which runs such a step as plain PyTorch'
    return (
        f'; on_unsupported="plain" can\'t run this step: {plain.refusal}' if plain.refusal else ""
    )


def with_own_gradients(compiled: Callable[..., Any], planned: PlannedStep) -> Callable[..., Any]:
    """Returns a compiled step whose backward computes the gradients that plain PyTorch computes.

    Its backward gets None for gradients that did not arrive. Autograd would put zeros in their
    place. Parameters whose gradients are computed from these alone would then get gradients of
    zeros, and an optimizer would still apply its weight decay to them. In plain PyTorch their
    gradients stay None.

    Its backward refuses to run on results that were changed in place; see `SharedResults`.
    """

    def run(*args: Any) -> Any:
        results = compiled(*args)
        keep_missing_gradients(results)
        planned.shared.watch(results)
        return results

    return torch.compiler.disable(run, reason="it calls compiled code")  # type: ignore[no-any-return]
