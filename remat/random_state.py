"""Replaying random operators: the generator's state is taken before the first run and set for each later one."""

from __future__ import annotations

from typing import Any

import torch


def take_state(device: torch.device) -> torch.Tensor:
    """Returns the state of the device's default generator as a CPU tensor of bytes."""
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def replay(operator: Any, state: torch.Tensor, device: torch.device, /, *args: Any, **kwargs: Any) -> Any:
    """Runs `operator` with the generator in `state`, and leaves the generator as it was."""
    before = bytearray(take_state(device).numpy())  # outside of torch's allocator: no memory of the step's
    _set_state(device, state)
    try:
        return operator(*args, **kwargs)
    finally:
        _set_state(device, torch.frombuffer(before, dtype=torch.uint8))


def _set_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)
