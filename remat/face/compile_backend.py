"""The `torch.compile` backend `remat`, which torch finds by its entry point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from remat.core.errors import TraceError
from remat.pieces.unplanned_memory import there_bytes
from remat.plan.distributed import bucket_bytes
from remat.plan.planner import Options, Plans
from remat.run.capture import make_backend
from remat.run.plain_steps import PlainSteps
from remat.torch_border.dynamo import compile_reason, is_ddp_optimizer_on
from remat.tracers.cost_models import resolve_costs


def backend(
    module: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
) -> Callable[..., Any]:
    """The `torch.compile` backend `remat`.

    `torch.compile(model, backend="remat", options={"budget": "8GiB"})`.

    Options are those of `remat.checkpoint`; `budget` is required on a CPU.
    """
    options = Options(**{"budget": None, **(kwargs.get("options") or {})})
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

    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    plans, kind = Plans(options), "cuda" if any(t.is_cuda for t in tensors) else "cpu"
    plans.look_at_card(kind, lambda: there_bytes(module, tensors, kind))
    costs = resolve_costs(options.costs, kind)

    make = make_backend
    if options.executor in ("inductor", "auto"):
        from remat.inductor.backend import make_inductor_backend as make

    inner = make(
        plans,
        costs,
        lambda _: None,
        differentiate=options.differentiate,
        plain_steps=PlainSteps.asked(options.on_unsupported, "the compiled model"),
    )
    return inner(module, example_inputs)  # type: ignore[no-any-return]
