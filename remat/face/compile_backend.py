"""The `torch.compile` backend `remat`, which torch finds by its entry point."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from remat.core.errors import TraceError
from remat.core.solution import Solution
from remat.pieces.unplanned_memory import there_bytes
from remat.plan.distributed import bucket_bytes
from remat.plan.planner import Options, Plans
from remat.run.capture import Step, make_backend
from remat.run.module_device import device_type_of, refuse_other_gpu
from remat.run.plain_steps import PlainSteps
from remat.torch_border.dynamo import compile_reason, is_ddp_optimizer_on
from remat.torch_border.scalars import is_symbol
from remat.tracers.cost_models import resolve_costs

_LOG = logging.getLogger(__name__)
_NAME = "the compiled model"  # in errors


def backend(
    module: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
) -> Callable[..., Any]:
    """The `torch.compile` backend `remat`.

    `torch.compile(model, backend="remat", options={"budget": "8GiB"})`.

    Options are those of `remat.checkpoint` without `blocks`; "auto" means "inductor", and `budget`
    is required on a CPU. Gradients that earlier steps left are within the budget only with
    `is_accumulating`, since the backend is called before they exist.
    """
    options = Options(**{"budget": None, **(kwargs.get("options") or {})})
    _refuse_other_graphs(module)

    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    plans, kind = Plans(options), device_type_of(tensors, _NAME)
    refuse_other_gpu(tensors, _NAME)
    plans.look_at_card(kind, lambda: there_bytes(module, tensors, kind))
    costs = resolve_costs(options.costs, kind)

    make: Callable[..., Any] = make_backend
    if options.executor in ("inductor", "auto"):
        from remat.inductor.backend import make_inductor_backend

        make = partial(make_inductor_backend, room_of=plans.room_of)

    def planned(step: Step, **beside: Any) -> Solution:
        return plans(step, gradient_bytes=plans.accumulated_bytes(step.graph), **beside)

    inner = make(
        planned,
        costs,
        lambda _: None,
        differentiate=options.differentiate,
        plain_steps=PlainSteps.asked(options.on_unsupported, _NAME),
    )
    compiled: Callable[..., Any] = inner(module, example_inputs)
    return compiled if options.is_accumulating else _noticing_gradients(compiled)


def _refuse_other_graphs(module: fx.GraphModule) -> None:
    """Refuses a graph that is only a part of a step, or that stands for several shapes."""
    if bucket_bytes() and is_ddp_optimizer_on():
        raise TraceError(
            "inside of DistributedDataParallel torch.compile cuts the graph at the borders of "
            "DDP's buckets, and this backend plans one graph at a time; set "
            "torch._dynamo.config.optimize_ddp = False, or use remat.checkpoint"
        )

    reason = compile_reason(module)
    if reason is not None and reason.graph_break:
        raise TraceError(
            f"the step has a graph break ({reason.reason}), and this backend plans one graph at "
            "a time; remat.checkpoint plans the pieces together"
        )

    if any(map(_has_changing_shape, module.graph.find_nodes(op="placeholder"))):
        raise TraceError(
            "the shape of an input changed, and torch.compile then makes one graph for all shapes, "
            "but each shape needs its own plan; compile with dynamic=False, or use remat.checkpoint"
        )


def _has_changing_shape(given: fx.Node) -> bool:
    value = given.meta.get("example_value")
    return isinstance(value, torch.Tensor) and any(map(is_symbol, value.shape))


def _noticing_gradients(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a compiled step that warns once if gradients of earlier steps exist while it runs."""
    has_warned = False

    def run(*args: Any) -> Any:
        nonlocal has_warned
        if not has_warned and any(map(_has_gradient, args)):
            has_warned = True
            _LOG.warning(
                "gradients of earlier steps exist while this step runs, and are not within its "
                'budget; give options={"is_accumulating": True, ...}, or drop them before each '
                "step (zero_grad(set_to_none=True)), or use remat.checkpoint, which leaves room "
                "for them"
            )
        return compiled(*args)

    return run


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_leaf and value.grad is not None
