"""The device that a module is on; refuses devices that no step can be planned for."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from remat.core.errors import TraceError


def device_type(module: nn.Module) -> str:
    """Returns the device type of a module's parameters and buffers, `cuda` if any is on a GPU.

    Raises:
        TraceError: the module is on a device that can't be planned for, or on several GPUs.
    """
    tensors = [*module.parameters(), *module.buffers()]
    types = {tensor.device.type for tensor in tensors}
    if others := types - {"cpu", "cuda", "meta"}:
        raise TraceError(
            f"{type(module).__name__} is on {', '.join(sorted(others))}; remat plans steps on a "
            "CPU or a CUDA device: move the module there, or train it without remat"
        )
    gpus = {tensor.device.index for tensor in tensors if tensor.is_cuda}
    if len(gpus) > 1:
        raise TraceError(
            f"{type(module).__name__} is spread over {len(gpus)} GPUs of one process, and a budget "
            "is for one GPU; plan the part on each GPU separately, or use one process per GPU"
        )
    return "cuda" if "cuda" in types else "cpu"


def refuse_other_gpu(module: nn.Module) -> None:
    """Raises `TraceError` for a module on a GPU that is not the current one, which is measured."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    index = next((tensor.device.index for tensor in tensors if tensor.is_cuda), None)
    if index is not None and index != torch.cuda.current_device():
        raise TraceError(
            f"{type(module).__name__} is on cuda:{index}, and the current GPU, whose memory is "
            f"measured, is cuda:{torch.cuda.current_device()}; call torch.cuda.set_device({index}) "
            "first"
        )
