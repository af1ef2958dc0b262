"""The cost models by name: the values of `costs=`."""

from __future__ import annotations

from typing import Any

import torch

from . import devices
from .costs import CostModel, Flops, Roofline
from .profiled import profile


def flops() -> Flops:
    """Returns the unit-free model that counts floating-point operations."""
    return Flops()


def roofline(device: str | devices.Device = "") -> Roofline:
    """Returns the roofline model of a device of the table; this machine's if none is named.

    Whether float32 products use TF32 follows torch's current settings.
    """
    if isinstance(device, str):
        device = devices.device(device) if device else devices.local_device()

    backends: Any = torch.backends
    return Roofline(
        device,
        (
            backends.cuda.matmul.fp32_precision == "tf32",
            backends.cudnn.conv.fp32_precision == "tf32",
        ),
    )


def resolve_costs(spec: CostModel | str, device_type: str = "") -> CostModel:
    """Returns the cost model that `spec` names.

    Args:
        spec: a model, or "flops", "roofline", "roofline:DEVICE", "profile".
        device_type: for "roofline" and "profile", the type of this machine's device, `cpu` or
            `cuda`; by default its GPU if it has one.

    Raises:
        ValueError: there is no such model or device.

    >>> resolve_costs("roofline:h100").name
    'roofline:H100'
    """
    if isinstance(spec, CostModel):
        return spec

    kind, _, device = spec.partition(":")
    if kind == "flops" and not device:
        return flops()
    if kind == "roofline":
        return roofline(device or devices.local_device(device_type))
    if kind == "profile" and not device:
        return profile(device_type)

    raise ValueError(
        f'unknown costs {spec!r}; choose "flops", "roofline", "roofline:DEVICE" '
        '(such as roofline:H100) or "profile"'
    )
