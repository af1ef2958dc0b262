"""The memory of an optimizer's state and step, measured on fake tensors.

The optimizer runs two steps on fake tensors with the shapes and types of the parameters, and every
storage that it makes is counted. This works for any `torch.optim.Optimizer`, including those of
other libraries.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from remat.run.counted_storages import CountStorages
from remat.torch_border.kernels import FakeTensorMode
from remat.torch_border.sharded import largest_shape
from remat.tracers.retarget import CUDA_GRANULARITY_BYTES

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """The memory of an optimizer.

    Attributes:
        name: its name.
        state_bytes: held between steps.
        step_bytes: held in addition during a step.
    """

    name: str
    state_bytes: int
    step_bytes: int


def optimizer_memory(
    optimizer: str | MakeOptimizer, parameters: Iterable[nn.Parameter], *, device_type: str = "cpu"
) -> OptimizerMemory:
    """Returns the memory of an optimizer for these parameters from its first step on.

    Args:
        optimizer: one of `OPTIMIZERS`, or a class or function that makes an optimizer, such as
            `lambda ps: SGD(ps, momentum=0.9)`.
        parameters: real, fake or meta; those without `requires_grad` are left out.
        device_type: where it will run; on `cuda` torch's optimizers update all parameters at once
            (`foreach`), which is faster and holds more.

    Raises:
        ValueError: there is no optimizer of this name.
        TypeError: the result is not an optimizer, or can't step on fake tensors.

    AdamW has two states per parameter, and a count of steps:

    >>> optimizer_memory("adamw", [nn.Parameter(torch.zeros(1000))]).state_bytes
    8004
    """
    make, name = _maker(optimizer)
    counted = CountStorages(
        rounded_to=CUDA_GRANULARITY_BYTES if device_type == "cuda" else 1, makes_numbers_up=True
    )

    needed = [p for p in parameters if p.requires_grad]
    if not needed:
        return OptimizerMemory(name, 0, 0)

    with FakeTensorMode():
        trained = [nn.Parameter(torch.empty(largest_shape(p), dtype=p.dtype)) for p in needed]
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
            counted.ignore(parameter, parameter.grad)

        with counted:
            made = _made(make, trained, name)
            _take_all_at_once(made, is_cuda=device_type == "cuda")
            _step(made, name)
            counted.peak_bytes = state_bytes = counted.held_bytes
            _step(made, name)

    return OptimizerMemory(name, state_bytes, counted.peak_bytes - state_bytes)


def state_bytes_of(optimizer: Optimizer) -> int:
    """Returns the bytes that an optimizer's state takes from its first step on.

    They are measured on a new optimizer of the same class and defaults. Wrappers of other libraries
    (`accelerate`, Lightning) are removed first.
    """
    while not type(optimizer).__module__.startswith("torch.optim") and isinstance(
        getattr(optimizer, "optimizer", None), Optimizer
    ):
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    accepted = inspect.signature(type(optimizer)).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def make(trained: Iterable[nn.Parameter]) -> Optimizer:
        return type(optimizer)(trained, **defaults)

    make.__name__ = type(optimizer).__name__
    return optimizer_memory(make, parameters).state_bytes


def bytes_to_keep_free(optimizer: Optimizer, *, of_card: bool) -> int:
    """Returns the bytes to reserve for an optimizer's state.

    Of a given budget, that is all of its state. Of the memory that a GPU has left (`of_card`), it
    is only the state that does not exist yet: a resumed run has its state on the GPU already.
    """
    to_come = state_bytes_of(optimizer)
    if not of_card:
        return to_come
    there = (t for state in optimizer.state.values() for t in state.values())
    return max(0, to_come - sum(t.nbytes for t in there if isinstance(t, torch.Tensor)))


def _maker(optimizer: str | MakeOptimizer) -> tuple[MakeOptimizer, str]:
    if isinstance(optimizer, str):
        if optimizer.lower() not in OPTIMIZERS:
            raise ValueError(
                f"unknown optimizer {optimizer!r}; choose one of {', '.join(OPTIMIZERS)}, or pass "
                "its class"
            )
        return OPTIMIZERS[optimizer.lower()], optimizer.lower()

    if not callable(optimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; pass a name, a class, or `lambda "
            "parameters: SGD(parameters)`"
        )
    return optimizer, getattr(optimizer, "__name__", type(optimizer).__name__)


def _made(make: MakeOptimizer, trained: Sequence[nn.Parameter], name: str) -> Optimizer:
    made = make(trained)
    if not isinstance(made, Optimizer):
        raise TypeError(f"{name} made a {type(made).__name__}; a torch.optim.Optimizer is needed")
    return made


def _take_all_at_once(optimizer: Optimizer, *, is_cuda: bool) -> None:
    """Sets `foreach` as torch does: True on CUDA unless `foreach` or `fused` is set."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = is_cuda


def _step(optimizer: Optimizer, name: str) -> None:
    try:
        optimizer.step()
    except (RuntimeError, NotImplementedError, TypeError, AssertionError) as error:
        raise TypeError(
            f"{name} can't step on fake tensors, so its memory can't be measured ({error}); pass "
            'its bytes as reserve_bytes, and to fits, max_batch and doctor optimizer="none"'
        ) from error


class _States(Optimizer):
    """Stands for an optimizer of another library: makes its state, and does nothing else."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], states_of: Callable[[nn.Parameter], Any]
    ) -> None:
        super().__init__(parameters, {})
        self.states_of = states_of

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Makes the state of each parameter in the first step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.state[parameter]["states"] = self.states_of(parameter)


def _eight_bit(parameter: nn.Parameter) -> list[torch.Tensor]:
    """Returns two states with one byte per element and a 32-bit scale per block of 256.

    Parameters with fewer than 4096 elements have 32-bit states.

    Source: bitsandbytes 0.45, optim/optimizer.py: `Optimizer2State.init_state`,
    `min_8bit_size=4096`, `blocksize=256`.
    """
    if parameter.numel() < 4096:
        return [torch.empty(parameter.shape, dtype=torch.float32) for _ in range(2)]
    states = [torch.empty(parameter.shape, dtype=torch.uint8) for _ in range(2)]
    return states + [
        torch.empty(-(-parameter.numel() // 256), dtype=torch.float32) for _ in range(2)
    ]


def _no_states(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return _States(parameters, lambda _: ())


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "none": _no_states,
    "sgd": torch.optim.SGD,
    "momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adamw-8bit": lambda parameters: _States(parameters, _eight_bit),  # bitsandbytes, torchao
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    # one momentum per parameter; Chen et al. (2023)
    "lion": lambda parameters: _States(parameters, lambda p: [torch.empty_like(p)]),
}
