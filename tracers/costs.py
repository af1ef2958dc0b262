"""Cost models: what it costs to compute an operator once, and the memory it needs meanwhile.

- `flops()` counts floating-point operations and has no unit of time.
- `roofline(device)` is the longer of arithmetic at the device's peak rate and bytes moved at its
  bandwidth, plus a launch. It plans for a device that is not there.
- `profile()` runs every distinct operator call on the device at hand.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch.utils.flop_counter import flop_registry

from . import devices
from .calls import Call, TensorSpec, aten
from .workspace import workspace_bytes


class OperatorCost(NamedTuple):
    """Seconds (FLOP in the unit-free model) and bytes of computing one operator once."""

    cost_s: float
    workspace_bytes: int


_FREE = OperatorCost(0.0, 0)


@dataclass(eq=False)
class CostModel(ABC):
    """What an operator costs. Equal calls are measured once."""

    _known: dict[Call, OperatorCost] = field(default_factory=dict, init=False, repr=False)

    @property
    @abstractmethod
    def name(self) -> str:
        """The model and its device, as `resolve_costs` reads it."""

    @abstractmethod
    def cost_of(self, call: Call) -> OperatorCost:
        """Returns the cost of a call that runs a kernel."""

    def measure(self, node: torch.fx.Node) -> OperatorCost:
        """Returns the cost of an fx node; `meta["val"]` of it and of its inputs are fake tensors.

        Views, `getitem`, arithmetic on sizes, placeholders and outputs cost nothing.
        """
        if node.op != "call_function":
            return _FREE
        call = Call.of(node)
        if call not in self._known:
            self._known[call] = self.cost_of(call) if call.computes else _FREE
        return self._known[call]


@final
@dataclass(eq=False)
class Flops(CostModel):
    """Floating-point operations; elementwise operators count one an element."""

    name = "flops"

    def cost_of(self, call: Call) -> OperatorCost:
        """Returns the FLOP of a call and its workspace on the device of its tensors."""
        return OperatorCost(float(flop_of(call)), workspace_bytes(call, call.device_type))


@final
@dataclass(eq=False)
class Roofline(CostModel):
    """Williams, Waterman, Patterson (2009): arithmetic or memory traffic, whichever takes longer, plus a launch.

    Attributes:
        device: the device to plan for.
        allow_tf32: whether matrix products and convolutions of float32 use TF32 units.
    """

    device: devices.Device
    allow_tf32: tuple[bool, bool] = (False, True)

    @property
    def name(self) -> str:
        """`roofline:` and the device."""
        return f"roofline:{self.device.name}"

    def cost_of(self, call: Call) -> OperatorCost:
        """Returns seconds and workspace of a call on this device."""
        arithmetic_s = flop_of(call) / self._flop_per_s(call)
        traffic_s = bytes_moved(call) / self.device.bandwidth
        return OperatorCost(max(arithmetic_s, traffic_s) + self.device.launch_s, workspace_bytes(call, self.device.type))

    def _flop_per_s(self, call: Call) -> float:
        if not _is_contraction(call):
            return self.device.fp32
        is_convolution = call.packet in _CONVOLUTIONS
        dtype = next((t.dtype for t in (*call.inputs, *call.outputs) if t.dtype.is_floating_point), torch.float32)
        return self.device.flop_per_s(dtype, allow_tf32=self.allow_tf32[is_convolution])


def flops() -> Flops:
    """Returns the unit-free model that counts floating-point operations."""
    return Flops()


def roofline(device: str | devices.Device = "") -> Roofline:
    """Returns the roofline model of a device: a name of the table, or the device at hand if empty.

    Whether float32 products use TF32 is what torch's settings say now.
    """
    if isinstance(device, str):
        device = devices.device(device) if device else devices.device_at_hand()
    backends: Any = torch.backends
    return Roofline(device, (backends.cuda.matmul.fp32_precision == "tf32", backends.cudnn.conv.fp32_precision == "tf32"))


def resolve_costs(spec: CostModel | str, device_type: str = "") -> CostModel:
    """Returns the cost model that `spec` names.

    Args:
        spec: a model, or "flops", "roofline", "roofline:DEVICE", "profile".
        device_type: the type of the device at hand that "roofline" and "profile" mean,
            `cpu` or `cuda`; its GPU, where there is one, if empty.

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
        return roofline(device or devices.device_at_hand(device_type))
    raise ValueError(f'unknown costs {spec!r}; known are "flops", "roofline", "roofline:DEVICE" (roofline:H100) and "profile"')


def bytes_moved(call: Call) -> int:
    """Returns the bytes a call reads and writes: its inputs' distinct elements and its outputs."""
    if call.packet in _UNINITIALISED:
        return 0
    written = sum(t.nbytes for t in call.outputs)
    if call.packet in _LOOKUPS:
        return 2 * written + sum(t.unique_bytes for t in call.inputs[1:])
    return written + sum(t.unique_bytes for t in call.inputs)


def flop_of(call: Call) -> int:
    """Returns the floating-point operations of a call.

    Products and convolutions are counted by torch's own formulas where they are right and by
    those below where it has none; everything else counts one an element of its largest tensor.
    """
    packet = call.packet
    if packet in _FORMULAS:
        return _FORMULAS[packet](call)
    if packet in flop_registry:
        return _registered_flop(call)
    if packet in _UNINITIALISED:
        return 0
    if packet in _LOOKUPS:
        return sum(t.numel for t in call.outputs)
    return max((t.numel for t in (*call.inputs, *call.outputs)), default=0)


def _is_contraction(call: Call) -> bool:
    return call.packet in _FORMULAS or call.packet in flop_registry


def _registered_flop(call: Call) -> int:
    args, kwargs = _as_meta(call.args), {name: _as_meta(value) for name, value in call.kwargs}
    out: Any = tuple(map(_as_meta, call.outputs))
    return int(flop_registry[call.packet](*args, **kwargs, out_val=out[0] if len(out) == 1 else out))


def _as_meta(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, tuple):
        return tuple(map(_as_meta, value))
    return value


def _convolution_backward_flop(call: Call) -> int:
    """One convolution's worth for each of the input's and the weight's gradient.

    torch's formula for the weight's gradient ignores groups (torch 2.13: 960 times too much for a
    depthwise convolution of 960 channels).
    """
    grad_output, _, weight = call.args[:3]
    pixels = grad_output if not call.argument("transposed") else call.args[1]
    once = 2 * pixels.shape[0] * math.prod(pixels.shape[2:]) * weight.numel
    return int(once * sum(call.argument("output_mask")[:2]))


def _attention_forward_flop(call: Call) -> int:
    query, key, value = call.args[:3]
    return int(2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1]))


def _attention_backward_flop(call: Call) -> int:
    """Scores again, then the gradients of scores, values, queries and keys; the mask is not counted."""
    _, query, key, value = call.args[:4]
    return int(2 * math.prod(query.shape[:-1]) * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1]))


def _product_flop(call: Call) -> int:
    """2 k an element of the output, where k is the last dimension of the first matrix."""
    left = call.args[1 if call.packet is aten.addmv else 0]
    return int(2 * left.shape[-1] * sum(t.numel for t in call.outputs))


_FORMULAS: dict[Any, Callable[[Call], int]] = {
    aten.convolution_backward: _convolution_backward_flop,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_forward_flop,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flop,
    aten._scaled_dot_product_fused_attention_overrideable: _attention_forward_flop,
    aten._scaled_dot_product_fused_attention_overrideable_backward: _attention_backward_flop,
    **dict.fromkeys((aten.mv, aten.addmv, aten.dot, aten._int_mm, aten._grouped_mm, aten._scaled_grouped_mm), _product_flop),
}
_CONVOLUTIONS = {aten.convolution, aten.convolution_backward}
# They allocate and write nothing.
_UNINITIALISED = {aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided, aten.empty_permuted}
# They read as much of the first input as they write.
_LOOKUPS = {aten.embedding, aten.index, aten.index_select, aten.gather, aten._unsafe_index}
