"""The graph of a step as a GPU would run it, on a machine without that GPU.

A CPU-only torch can't differentiate tensors of a GPU, not even fake ones, and another GPU has other
kernels. So the step is traced on the CPU, and the known differences are corrected. On CUDA:

- attention has other kernels, RMS norm is one operator where input and weight have one type, and
  autocast casts for other operators;
- dropout saves one byte per element in every precision, and layer and batch norms save their
  statistics in float32;
- the allocator rounds sizes, and the generator's state takes no memory of the device;
- some kernels may not run twice.

One difference remains: the workspace of libraries, such as cuDNN's for convolutions, which only the
card knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx

from remat.torch_border.kernels import with_cpu_kernel

from .cuda_attention import cuda_attention
from .cuda_autocast import cuda_autocast
from .devices import Device

aten = torch.ops.aten

CUDA_GRANULARITY_BYTES = 512  # c10/cuda/CUDACachingAllocator: kMinBlockSize

_NORMS = frozenset({
    aten.native_layer_norm, aten.native_batch_norm, aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional, aten._batch_norm_with_update,
    aten._batch_norm_with_update_functional,
})  # fmt: skip


def traced_on(device: Device) -> str:
    """Returns the device type of the fake tensors on which a step for `device` is traced.

    A GPU of this machine decides which kernels are traced on it, so a step for a card of another
    compute capability is traced on the CPU.
    """
    if device.type == "cpu" or not torch.cuda.is_available():
        return "cpu"
    major, minor = torch.cuda.get_device_capability()
    return device.type if float(f"{major}.{minor}") == device.capability else "cpu"


@contextmanager
def as_on(device: Device, *, autocast: torch.dtype | None = None) -> Iterator[None]:
    """Makes a `with` block trace what `device` would run, on `traced_on(device)`.

    Args:
        device: one of the table, or this machine's.
        autocast: the dtype of `torch.autocast` there; if None, autocast is off.
    """
    on = traced_on(device)
    with (
        nullcontext() if device.type == on else as_on_cuda(device),
        torch.autocast(on, autocast, enabled=autocast is not None),
    ):
        yield


_is_for_cuda: ContextVar[bool] = ContextVar("is_for_cuda", default=False)


@contextmanager
def as_on_cuda(device: Device) -> Iterator[None]:
    """Traces on the CPU what a card runs: its attention, its norms, its dropout, its autocast."""
    token = _is_for_cuda.set(True)
    try:
        with (
            cuda_attention(device),
            cuda_autocast(),
            with_cpu_kernel(aten._fused_rms_norm.default),
        ):
            yield
    finally:
        _is_for_cuda.reset(token)


def is_for_cuda() -> bool:
    """True while a step on CPU tensors is traced as CUDA would run it."""
    return _is_for_cuda.get()


def allocated_bytes(size_bytes: int, device_type: str) -> int:
    """Returns the bytes that the allocator of `device_type` takes for a storage.

    CUDA's allocator rounds sizes up to multiples of 512 bytes. Sizes are rounded in the same way
    while a step on CPU tensors is traced for a card.
    """
    if device_type != "cuda" and not is_for_cuda():
        return size_bytes
    return -(-size_bytes // CUDA_GRANULARITY_BYTES) * CUDA_GRANULARITY_BYTES


def statistics_on_cuda(node: fx.Node) -> tuple[Any, ...]:
    """Returns the results of a layer or batch norm that CUDA's kernels give in float32.

    The CPU's kernels give them in the type of the input.
    """
    if getattr(node.target, "overloadpacket", None) not in _NORMS:
        return ()
    return tuple(node.meta["val"][1:3])
