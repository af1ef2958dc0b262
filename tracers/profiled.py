"""Costs measured on this machine's device: every distinct call is run on new tensors.

The measured time is that of the operator alone, with inputs in the processor's cache where they
fit. Results are stored on disk by device, torch version and call (operator, shapes, strides, types,
numbers), unless other programs kept the processor busy meanwhile.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import final

import torch

from . import devices
from .cache import DiskCache, cache_path
from .calls import Call
from .costs import CostModel, OperatorCost, Roofline
from .counts import bytes_moved, flop_of
from .replay import timing_of, workspace_of
from .timing import Timing
from .workspace import MOST_WORKSPACE_BYTES

_LOG = logging.getLogger(__name__)
_MOST_SECONDS = 1e6  # per operator; a larger number in the file means that it is damaged


@final
@dataclass(eq=False)
class Profile(CostModel):
    """Median seconds and workspace of each call on this machine's CPU or GPU.

    Operators that can't be run alone (collectives, custom and higher-order operators) are estimated
    by the roofline of the device, or by the A100's if the table lacks it, with a warning.

    Attributes:
        device_type: `cpu` or `cuda`; calls on another device are estimated as well.
        operator_budget_s: about how long one call is measured, in seconds.
        store: the measurements; by default those in the user's cache folder.
    """

    device_type: str
    operator_budget_s: float = 0.02
    store: DiskCache = field(default_factory=lambda: DiskCache(cache_path("profile")), repr=False)
    _is_told: bool = field(default=False, init=False, repr=False)

    @property
    def name(self) -> str:
        """The name: `profile:` and the device."""
        device = "cpu" if self.device_type == "cpu" else torch.cuda.get_device_name()
        return f"profile:{device}"

    def cost_of(self, call: Call) -> OperatorCost:
        """Returns seconds and workspace of a call, from the cache or from running it."""
        key = f"{self._where}: {call}"
        known = self.store.get(key, (0.0, _MOST_SECONDS), (0.0, MOST_WORKSPACE_BYTES))
        if known is None:
            measured = self._measure(call)
            if measured is None:
                return self._estimate(call)
            timing, workspace = measured
            known = timing.seconds, float(workspace)
            self.store.put(key, known, is_kept=not timing.is_disturbed)
            if timing.is_disturbed:
                self._tell_of_other_programs()
        return OperatorCost(known[0], int(known[1]))

    @property
    def _where(self) -> str:
        if self.device_type == "cpu":
            return devices.machine()
        return devices.cuda_settings()

    def _measure(self, call: Call) -> tuple[Timing, int] | None:
        if call.device_type != self.device_type:
            return None
        timing = timing_of(call, self.operator_budget_s)
        workspace = None if timing is None else workspace_of(call)
        return None if timing is None or workspace is None else (timing, workspace)

    def _tell_of_other_programs(self) -> None:
        if not self._is_told:
            _LOG.warning(
                "other programs kept the processor busy while operators were timed; such costs may "
                "be off, and are measured again by the next process. Plan on a quieter machine, or "
                'with costs="roofline"'
            )
        self._is_told = True

    def _estimate(self, call: Call) -> OperatorCost:
        _LOG.warning(
            "%s can't be run alone; its cost is an estimate (%d FLOP, %d bytes)",
            call.target,
            flop_of(call),
            bytes_moved(call),
        )

        try:
            return Roofline(devices.local_device(self.device_type)).cost_of(call)
        except ValueError:  # a GPU that is not in the table
            return Roofline(devices.device("A100")).cost_of(call)


def profile(device_type: str = "") -> Profile:
    """Returns the model that measures on `cpu` or `cuda`; by default on a GPU if there is one.

    Raises:
        ValueError: another device type, or "cuda" on a machine without a usable GPU.
    """
    has_cuda = torch.cuda.is_available()
    if device_type not in ("", "cpu", "cuda") or (device_type == "cuda" and not has_cuda):
        raise ValueError(
            f"costs can't be measured on {device_type!r} here, only on "
            f'{"cpu or cuda" if has_cuda else "cpu"}; use that, or costs="roofline:DEVICE"'
        )
    return Profile(device_type or ("cuda" if has_cuda else "cpu"))
