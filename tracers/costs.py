"""Cost models: the time that an operator takes, and the workspace that it needs.

- `Flops` counts floating-point operations and has no unit of time.
- `Roofline` is the longer of arithmetic at the device's peak rate and bytes moved at its bandwidth,
  plus a launch. This machine need not have the device.
- `Profile`, in `profiled`, runs every distinct operator call on this machine's device.

`cost_models` finds them by the names that `costs=` takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch

from . import devices
from .calls import Call
from .counts import CONVOLUTIONS, bytes_moved, draws_of, flop_of, is_contraction
from .workspace import workspace_bytes


class OperatorCost(NamedTuple):
    """Seconds (FLOP in the unit-free model) and bytes of computing one operator once."""

    cost_s: float
    workspace_bytes: int


_FREE = OperatorCost(0.0, 0)


@dataclass(eq=False)
class CostModel(ABC):
    """The costs of operators; equal calls are measured once with the same settings of torch."""

    _known: dict[tuple[str, Call], OperatorCost] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the model and its device."""

    @abstractmethod
    def cost_of(self, call: Call) -> OperatorCost:
        """Returns the cost of a call that runs a kernel."""

    def measure(self, node: torch.fx.Node) -> OperatorCost:
        """Returns the cost of an fx node; it and its inputs have fake tensors in `meta["val"]`.

        Views, `getitem`, arithmetic on sizes, placeholders and outputs cost nothing.
        """
        if node.op != "call_function":
            return _FREE
        call = Call.of(node)
        key = devices.settings_of(call.device_type), call
        if key not in self._known:
            self._known[key] = self.cost_of(call) if call.computes else _FREE
        return self._known[key]

    def workspace_of(self, call: Call) -> int:
        """Returns the workspace of a call that is made while another program is compiled.

        On a GPU it is 0 unless the same call was measured before.
        """
        if call.device_type == "cpu":
            return workspace_bytes(call, "cpu")
        return self._known.get((devices.settings_of(call.device_type), call), _FREE).workspace_bytes


@final
@dataclass(eq=False)
class Flops(CostModel):
    """Floating-point operations; elementwise operators count one per element."""

    name = "flops"

    def cost_of(self, call: Call) -> OperatorCost:
        """Returns the FLOP of a call and its workspace on the device of its tensors."""
        return OperatorCost(float(flop_of(call)), workspace_bytes(call, call.device_type))


@final
@dataclass(eq=False)
class Roofline(CostModel):
    """Arithmetic or memory traffic, whichever takes longer, plus a launch.

    Source: Williams, Waterman, Patterson (2009).

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
        draws = draws_of(call)
        arithmetic_s = (
            draws / self.device.draws_per_s if draws else flop_of(call) / self._flop_per_s(call)
        )

        traffic_s = bytes_moved(call) / self.device.bandwidth
        return OperatorCost(
            max(arithmetic_s, traffic_s) + self.device.launch_s,
            workspace_bytes(call, self.device.type),
        )

    def _flop_per_s(self, call: Call) -> float:
        if not is_contraction(call):
            return self.device.fp32
        is_convolution = call.packet in CONVOLUTIONS
        dtype = next(
            (t.dtype for t in (*call.inputs, *call.outputs) if t.dtype.is_floating_point),
            torch.float32,
        )
        return self.device.flop_per_s(dtype, allow_tf32=self.allow_tf32[is_convolution])
