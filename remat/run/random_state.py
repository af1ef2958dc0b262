"""Replays random operators: each draws from the generator state taken before its first run.

On the CPU both runs draw from a new generator that starts in that state, and the first run sets the
default generator to the state where it ends. So other threads, which draw from the same default
generator, can't change the numbers between taking a state and drawing from it. CUDA's fused kernels
use the default generator only: for a replay its state is set and restored afterwards, by one thread
at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from remat.run.cuda_graphs import refuse_random_replay

_CUDA_REPLAYS = threading.Lock()


def take_state(device: torch.device) -> torch.Tensor:
    """Returns the state of the device's default generator as a CPU tensor of bytes.

    It is read from a copy, to avoid a deadlock. `Generator.get_state` makes a Python tensor while
    it holds the generator's mutex and the GIL. If that starts the garbage collector, a finalizer
    can pass the GIL to a thread that then waits for the mutex forever (torch 2.13). Nobody else
    waits for a copy's mutex, and copying creates no object that the garbage collector tracks.

    Raises:
        TraceError: a CUDA graph is captured, during which CUDA's states can't be read.
    """
    if device.type == "cuda":
        refuse_random_replay()
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
    """Runs `operator` for the first time, from the state just taken.

    Afterwards the default generator is in the state where the operator ended.
    """
    if device.type != "cpu":
        return operator(*args, **kwargs)
    return _drawn(operator, args, kwargs, state, move_on=True)


def replay(
    operator: Any, state: torch.Tensor, device: torch.device, /, *args: Any, **kwargs: Any
) -> Any:
    """Runs `operator` again from `state`, and leaves the default generator as it is."""
    if device.type == "cpu":
        return _drawn(operator, args, kwargs, state, move_on=False)

    with _CUDA_REPLAYS:
        before = take_state(device)
        torch.cuda.set_rng_state(state, device)
        try:
            return operator(*args, **kwargs)
        finally:
            torch.cuda.set_rng_state(before, device)


def _drawn(
    operator: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: torch.Tensor,
    *,
    move_on: bool,
) -> Any:
    """Runs `operator` with a generator in `state`, in place of the `generator=None` it may have.

    A user's own generator never arrives here, since it ends the captured graph.
    """
    given = {**kwargs, "generator": _generator_in(state), "move_on": move_on}
    return _with_generator(operator)(*args, **given)


def _generator_in(state: torch.Tensor) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(state)
    return generator


def _move_default_on(generator: torch.Generator) -> None:
    torch.default_generator.set_state(generator.get_state())


@cache
def _with_generator(operator: Any) -> Callable[..., Any]:
    """Returns the operator as a function that draws from `generator`.

    With `move_on`, it sets the default generator to the state where `generator` ends.
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
    """Computes the same bits as `native_dropout` on the CPU, which takes no generator.

    See ATen/native/Dropout.cpp, torch 2.13.
    """
    if train is False or not x.numel():
        return torch.ops.aten.native_dropout.default(x, p, train)
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    if move_on:
        _move_default_on(generator)
    return (x * mask).mul_(_scale(p, x.dtype)), mask


@cache
def _scale(p: float, dtype: torch.dtype) -> float:
    """Returns the factor of dropout, rounded to the dtype of its input."""
    return torch.tensor(0.0 if p == 1 else 1 / (1 - p), dtype=dtype).item()
