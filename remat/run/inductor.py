"""Plans that Inductor runs.

Fused kernels, and what is saved and computed again decided by the plan.

Inductor lets another partitioner cut its joint graph into forward and backward
(`torch._inductor.config.custom_partitioner_fn`). By then dropout draws from seeds that the forward
makes (`inductor_seeds`): they are saved, and masks are made again from them, the same in every
recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from remat.core.errors import TraceError
from remat.run.capture import (
    PlannedStep,
    Planner,
    detach_non_scalars,
    refuse_gradients,
    runs_once,
    with_missing_gradients,
)
from remat.run.fusion import fuse
from remat.run.measure import FirstStepMeter
from remat.run.plain_forward import PlainForward
from remat.run.plain_steps import PlainSteps
from remat.run.refusals import refuse_what_has_no_size
from remat.run.rewrite import split
from remat.torch_border.autograd import backward_without_autocast
from remat.torch_border.inductor import inductor_compilers, inductor_partitioner
from remat.tracers.aot import read_joint
from remat.tracers.costs import CostModel

compile_fx, compile_fx_inner = inductor_compilers()


def make_inductor_backend(
    plan: Planner,
    costs: CostModel,
    on_planned: Callable[[PlannedStep], None],
    *,
    differentiate: str = "scalars",
    model_bytes: Callable[[], int] = lambda: 0,
    plain_steps: PlainSteps | None = None,
) -> Any:
    """Returns a `torch.compile` backend that runs what `plan` answers through Inductor.

    See `make_backend`.
    """

    def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        plain = PlainForward(module, example_inputs) if plain_steps else None
        refused = detach_non_scalars(module) if differentiate == "scalars" else []
        pieces: list[PlannedStep] = []

        def note(piece: PlannedStep) -> None:
            pieces.append(piece)
            on_planned(piece)

        def compile_half(graph: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
            compiled = compile_fx_inner(graph, inputs, **kwargs)
            if pieces:
                run = compiled.current_callable
                step, meter = pieces[-1].step, pieces[-1].meter
                compiled.current_callable = (
                    runs_once(meter.backward(run), step, plain)
                    if kwargs.get("is_backward")
                    else meter.forward(run)
                )
            return compiled

        partitioner = _partitioner(plan, costs, note, model_bytes, plain)
        with backward_without_autocast():
            patches = {"custom_partitioner_fn": partitioner, "fx_graph_cache": False}
            compiled: Callable[..., Any] = compile_fx(
                module, list(example_inputs), inner_compile=compile_half, config_patches=patches
            )
        if pieces:
            compiled = with_missing_gradients(compiled, pieces[-1].step)
        if plain_steps and plain and pieces:
            compiled = plain_steps.around(plain, compiled)
        return refuse_gradients(compiled, refused) if refused else compiled

    return backend


def _partitioner(
    plan: Planner,
    costs: CostModel,
    on_planned: Callable[[PlannedStep], None],
    model_bytes: Callable[[], int],
    plain: PlainForward | None,
) -> Any:
    """Returns what cuts Inductor's joint graph by a plan; one a compilation."""

    def cut(
        joint: fx.GraphModule,
        _: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Any = None,
        **__: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        refuse_what_has_no_size(joint)
        static = tuple(static_lifetime_input_indices or ())
        fused = fuse(
            read_joint(
                joint, num_fwd_outputs, costs, static_inputs=static, model_bytes=model_bytes()
            )
        )
        solution = plan(fused, **(plain.room_beside(fused.step) if plain else {}))
        if solution.schedule is None:
            raise TraceError(f"the planner found no schedule ({solution.status})")
        halves = split(fused.step, fused.unfused(solution.schedule), is_free_order=True)
        meter = FirstStepMeter(fused.graph.device, fused.graph.resident_bytes, num_fwd_outputs)
        if plain:
            plain.forget = meter.forget
        on_planned(PlannedStep(fused.step, solution, halves, meter, fused.graph))
        return halves.forward, halves.backward

    return inductor_partitioner(cut)
