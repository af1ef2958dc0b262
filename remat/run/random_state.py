"""Replaying random operators.

Each draws from the generator's state that was taken before its first run.

On the CPU both runs draw from a generator of their own that starts in that state, and the first run
hands its end on to the default generator. So what other threads draw at the same time, from the one
default generator of the process, cannot come between a state and the numbers drawn from it. CUDA's
fused kernels know the default generator only: its state is set for the replay and put back, by one
thread at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_CUDA_REPLAYS = threading.Lock()


def take_state(device: torch.device) -> torch.Tensor:
    """Returns the state of the device's default generator as a CPU tensor of bytes.

    It is read from a copy. `Generator.get_state` makes a Python tensor while it holds the
    generator's mutex and the GIL; where that starts the garbage collector, a finalizer can hand the
    GIL to a thread that then waits for the mutex, for good (torch 2.13). A copy's mutex is nobody
    else's, and copying makes no object that Python's garbage collector counts.
    """
    return _default_generator(device).clone_state().get_state()


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[
        torch.cuda.current_device() if device.index is None else device.index  # type: ignore[redundant-expr]  # None: the current one
    ]


def draw(
    operator: Any, state: torch.Tensor, device: torch.device, /, *args: Any, **kwargs: Any
) -> Any:
    """Runs `operator` for the first time, from `state`, which was just taken, and moves the default
    generator on.
    """
    if device.type != "cpu":
        return operator(*args, **kwargs)
    return _with_generator(operator)(*args, **kwargs, generator=_generator_in(state), move_on=True)


def replay(
    operator: Any, state: torch.Tensor, device: torch.device, /, *args: Any, **kwargs: Any
) -> Any:
    """Runs `operator` again from `state`, and leaves the default generator as it is."""
    if device.type == "cpu":
        return _with_generator(operator)(
            *args, **kwargs, generator=_generator_in(state), move_on=False
        )
    with _CUDA_REPLAYS:
        before = take_state(device)
        torch.cuda.set_rng_state(state, device)
        try:
            return operator(*args, **kwargs)
        finally:
            torch.cuda.set_rng_state(before, device)


def _generator_in(state: torch.Tensor) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(state)
    return generator


def _move_default_on(generator: torch.Generator) -> None:
    torch.default_generator.set_state(generator.get_state())


@cache
def _with_generator(operator: Any) -> Callable[..., Any]:
    """Returns the operator as a function that draws from `generator`, and with `move_on` leaves the
    default one where that ends.
    """
    if operator is torch.ops.aten.native_dropout.default:
        return _native_dropout
    overload = _overload_with_generator(operator)

    def run(*args: Any, generator: torch.Generator, move_on: bool, **kwargs: Any) -> Any:
        result = overload(*args, **{**kwargs, "generator": generator})
        if move_on:
            _move_default_on(generator)
        return result

    return run


def _overload_with_generator(operator: Any) -> Any:
    names = {argument.name for argument in operator._schema.arguments}
    if "generator" in names:
        return operator
    packet = operator.overloadpacket
    others = [getattr(packet, name) for name in packet.overloads()]
    types = _types(operator)
    return next(
        other for other in others if _types(other) == types | {"generator": "Optional[Generator]"}
    )


def _types(operator: Any) -> dict[str, str]:
    return {argument.name: str(argument.type) for argument in operator._schema.arguments}


def _native_dropout(
    x: torch.Tensor, p: float, train: bool | None, *, generator: torch.Generator, move_on: bool
) -> Any:
    """What `native_dropout` does on the CPU (ATen/native/Dropout.cpp, torch 2.13), to the bit.

    It takes no generator.
    """
    if train is False or not x.numel():
        return torch.ops.aten.native_dropout.default(x, p, train)
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    if move_on:
        _move_default_on(generator)
    return (x * mask).mul_(_scale(p, x.dtype)), mask


@cache
def _scale(p: float, dtype: torch.dtype) -> float:
    """What dropout multiplies by, rounded to the type of what it multiplies."""
    return torch.tensor(0.0 if p == 1 else 1 / (1 - p), dtype=dtype).item()
