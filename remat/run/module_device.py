"""The device that a step is on; refuses devices that no step can be planned for."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from remat.core.errors import TraceError


def device_type(module: nn.Module) -> str:
    """Returns the device type of a module's parameters and buffers, `cuda` if any is on a GPU.

    Raises:
        TraceError: the module is on a device that can't be planned for, or on several GPUs.
    """
    return device_type_of(own_tensors(module), type(module).__name__)


def own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yields a module's parameters and buffers."""
    return itertools.chain(module.parameters(), module.buffers())


def device_type_of(tensors: Iterable[torch.Tensor], name: str) -> str:
    """Returns the device type of a step's tensors, `cuda` if any is on a GPU.

    Args:
        tensors: the tensors that exist before the step.
        name: what they belong to, for the error.

    Raises:
        TraceError: they are on a device that can't be planned for, or on several GPUs.
    """
    devices = {tensor.device for tensor in tensors}
    types = {device.type for device in devices}
    if others := types - {"cpu", "cuda", "meta"}:
        raise TraceError(
            f"{name} is on {', '.join(sorted(others))}; remat plans steps on a CPU or a CUDA "
            "device: move the module there, or train it without remat"
        )

    num_gpus = sum(device.type == "cuda" for device in devices)
    if num_gpus > 1:
        raise TraceError(
            f"{name} is spread over {num_gpus} GPUs of one process, and a budget is for one GPU; "
            "plan the part on each GPU separately, or use one process per GPU"
        )
    return "cuda" if num_gpus else "cpu"


def refuse_other_gpu(tensors: Iterable[torch.Tensor], name: str) -> None:
    """Raises `TraceError` for tensors on a GPU that is not the current one, which is measured."""
    index = next((tensor.device.index for tensor in tensors if tensor.is_cuda), None)
    if index is not None and index != torch.cuda.current_device():
        raise TraceError(
            f"{name} is on cuda:{index}, and the current GPU, whose memory is measured, is "
            f"cuda:{torch.cuda.current_device()}; call torch.cuda.set_device({index}) first"
        )
