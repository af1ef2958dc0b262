"""Outputs other than the losses: they get no gradient, and asking for one is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from remat.core.errors import TraceError
from remat.run.hooked_results import results_read_by_others, watch_hooks


def check_differentiate(given: str) -> None:
    """Raises `ValueError` for an unknown value of the option `differentiate`."""
    if given not in ("scalars", "all"):
        raise ValueError(f'differentiate={given!r} is neither "scalars" nor "all"')


def detach_non_scalars(module: fx.GraphModule) -> list[tuple[int, int]]:
    """Detaches every output that is not a scalar, if there are scalar outputs with a gradient.

    Returns pairs (index of a detached output, index of a scalar). Without this, AOTAutograd would
    fill the missing gradient of, say, logits with zeros, and run their backward.
    """
    output = module.graph.output_node()
    results = output.args[0]
    assert isinstance(results, list | tuple)
    values = [
        node.meta.get("example_value") if isinstance(node, fx.Node) else None for node in results
    ]

    has_gradient = [isinstance(value, torch.Tensor) and value.requires_grad for value in values]
    scalars = [
        i
        for i, value in enumerate(values)
        if has_gradient[i] and value is not None and value.dim() == 0
    ]
    others = [i for i in range(len(values)) if has_gradient[i] and i not in scalars]
    if not scalars or not others:
        return []

    replaced = list(results)
    with module.graph.inserting_before(output):
        for place in others:
            source = results[place]
            assert isinstance(source, fx.Node)
            detached = module.graph.call_method("detach", (source,))
            detached.meta = {**source.meta, "example_value": source.meta["example_value"].detach()}
            replaced[place] = detached

    output.args = (tuple(replaced),)
    module.recompile()
    return [(place, scalars[0]) for place in others]


class _RefuseGradient(torch.autograd.Function):
    """Returns an output unchanged; a gradient that arrives for it is an error, never dropped."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return result.detach()  # unlike a view, it may be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        shape = tuple(gradients[0].shape)
        raise TraceError(
            f"a gradient arrived for an output of shape {shape}, but only gradients of scalar "
            'outputs are planned; pass differentiate="all" to remat.checkpoint, or call backward '
            "on the loss that the model returns"
        )


_refuse: Any = _RefuseGradient.apply


def refusals_of_outputs(
    module: fx.GraphModule, differentiate: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Detaches outputs that get no gradient; returns what adds the errors to a compiled module.

    Asking for the gradient of an output that was detached is an error, and so is a hook on one from
    which another is computed (`watch_hooks`).
    """
    read = results_read_by_others(module)
    refused = detach_non_scalars(module) if differentiate == "scalars" else []

    def with_refusals(compiled: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            results = list(compiled(*args))
            for place, anchor in refused:
                if results[anchor].requires_grad:
                    results[place] = _refuse(results[place], results[anchor])
            watch_hooks(results, read)
            return tuple(results)

        if not (read or refused):
            return compiled
        return torch.compiler.disable(run, reason="it calls compiled code")  # type: ignore[no-any-return]

    return with_refusals
