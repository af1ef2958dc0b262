"""Errors for steps that Inductor would compute wrongly."""

from __future__ import annotations

import torch
from torch import fx

from remat.core.errors import TraceError
from remat.torch_border.inductor_passes import taken_settings


def refuse_taken_settings() -> None:
    """Refuses settings of Inductor that decide what a plan decides."""
    for name in taken_settings():
        raise TraceError(
            f"torch._inductor.config.{name} is set, and a plan decides the same: what is saved, "
            'and the order of kernels; unset it, or use executor="eager"'
        )


def refuse_lost_updates(module: fx.GraphModule) -> None:
    """Refuses a graph that changes a float64 tensor without dimensions on the CPU.

    Inductor treats such tensors as numbers, so the new value is lost (torch 2.13). The version of
    dynamo's fake tensor shows whether it was changed.
    """
    for node in module.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if (
            isinstance(value, torch.Tensor)
            and value.dim() == 0
            and value.dtype == torch.float64
            and value.device.type == "cpu"
            and value._version
        ):
            raise TraceError(
                f"the step changes {node.name}, a float64 tensor without dimensions on the CPU, "
                "and Inductor would lose the new value (torch 2.13); make it float32 or of shape "
                '(1,), or use executor="eager"'
            )
