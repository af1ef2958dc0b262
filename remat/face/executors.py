"""Which executor runs a module's plans: operator by operator, or Inductor's fused kernels.

`install` puts it behind `module(...)`, in the place of what `model.compile()` put there.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from remat.core.errors import RematError
from remat.pieces.runner import Piecewise
from remat.plan.fixed_plan import FixedPlan
from remat.plan.planner import Plans
from remat.run.random_state import take_state
from remat.torch_border.modules import OwnCall, get_call, set_call
from remat.torch_border.other_compiles import keep_plans
from remat.tracers.costs import CostModel

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Before:
    """Buffers and random state before a step, which may have to run again from the start.

    Attributes:
        buffers: each buffer with a copy.
        random: the state of the CPU's generator, and of the current GPU's if the step runs there.
    """

    buffers: list[tuple[torch.Tensor, torch.Tensor]]
    random: list[tuple[torch.device, torch.Tensor]]

    @classmethod
    def of(cls, module: nn.Module, device_type: str) -> Before:
        """Returns the state of a module, and of the generators that its step draws from."""
        devices = [torch.device("cpu")]
        if device_type == "cuda":
            devices.append(torch.device("cuda", torch.cuda.current_device()))
        return cls(
            [(buffer, buffer.detach().clone()) for buffer in module.buffers()],
            [(device, take_state(device)) for device in devices],
        )

    def restore(self) -> None:
        """Puts everything back."""
        with torch.no_grad():
            for buffer, copy in self.buffers:
                buffer.copy_(copy)
        for device, state in self.random:
            if device.type == "cpu":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, device)


@dataclass(eq=False)
class Executor:
    """The executor of a planned module.

    Attributes:
        asked: `eager`, `inductor` or `auto`.
        name: `eager` or `inductor`: what runs.
        reason: why it was chosen, if `asked` is `auto`.
    """

    asked: str
    name: str
    reason: str = ""

    @classmethod
    def chosen(cls, asked: str, device_type: str, *, is_compiled: bool) -> Executor:
        """Returns the executor for a module on `cpu` or `cuda`.

        Args:
            asked: `eager`, `inductor` or `auto`.
            device_type: where the module is.
            is_compiled: whether the module was compiled before it was planned.
        """
        if asked != "auto":
            return cls(asked, asked)

        if device_type == "cpu" and shutil.which("g++") is None:
            return cls(asked, "eager", "Inductor needs a C++ compiler, g++, and there is none")
        if is_compiled:
            return cls(asked, "inductor", "the module was compiled before it was planned")
        if device_type == "cuda":
            return cls(asked, "inductor", "on a GPU fused kernels halve a step's time")
        return cls(
            asked, "eager", "on a CPU fused kernels save little, and take a minute to compile"
        )

    def piecewise(self, module: nn.Module, plan: Plans | FixedPlan, costs: CostModel) -> Piecewise:
        """Returns what runs a step in pieces."""
        if self.name == "inductor":
            # Inductor takes seconds to import
            from remat.inductor.fused_pieces import FusedPiecewise

            return FusedPiecewise(module, plan, costs)
        return Piecewise(module, plan, costs)

    @property
    def may_give_up(self) -> bool:
        """True if `eager` runs the step should Inductor fail."""
        return self.asked == "auto" and self.name == "inductor"

    def gives_up_kernels(self, failure: RematError) -> bool:
        """Changes from Inductor to `eager` after a failure, if `auto` was asked for."""
        if not self.may_give_up:
            return False
        self.name, self.reason = "eager", f"Inductor can't run it: {str(failure).splitlines()[0]}"
        _LOG.info("the step runs operator by operator; %s", self.reason)
        return True

    def text(self) -> str:
        """Returns what runs and why; empty if `eager` was asked for."""
        kernels = "Inductor's kernels" if self.name == "inductor" else "operator by operator"
        if self.asked == "eager":
            return ""
        return f"{kernels}: {self.reason}" if self.reason else kernels


def chosen_executor(
    modules: Sequence[nn.Module], plan: Plans | FixedPlan, device_type: str
) -> Executor:
    """Returns the executor for the plans of a module, or of its blocks."""
    asked = plan.options.executor if isinstance(plan, Plans) else "eager"
    return Executor.chosen(asked, device_type, is_compiled=any(map(is_compiled, modules)))


def is_compiled(module: nn.Module) -> bool:
    """True for a module that `model.compile()` compiled."""
    return get_call(module) is not None and not isinstance(get_call(module), OwnCall)


def install(module: nn.Module, call: OwnCall, *, is_inductor: bool) -> None:
    """Makes `module(...)` run `call`, even if the module is compiled later."""
    keep_plans()
    if is_compiled(module) and not is_inductor:
        _LOG.warning(
            "%s was compiled by model.compile(), which its plan replaces; for compiled kernels "
            'within the plan use executor="inductor"',
            type(module).__name__,
        )

    set_call(module, call)
