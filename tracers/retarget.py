"""The graph of a step as a GPU would run it, on a machine without one.

A CPU-only torch can't differentiate tensors of a GPU, not even fake ones. So the step is traced on
the CPU, and known differences are corrected: CUDA has other attention kernels, its autocast casts
for other operators, its dropout saves one byte per element in every precision, its allocator rounds
sizes, the generator's state takes no memory of the device, and some kernels may not run twice. One
difference remains: cuDNN saves a reserve for batch norm, which the CPU does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace

import torch

from remat.core.graph import Graph

from .cuda_attention import cuda_attention
from .cuda_autocast import cuda_autocast
from .devices import Device
from .recomputable import NONDETERMINISTIC, is_nondeterministic
from .step_values import CUDA_GRANULARITY_BYTES


def retarget(graph: Graph, device_type: str) -> Graph:
    """Returns the graph for `device_type`, `cpu` or `cuda`; unchanged where it was traced there."""
    if graph.device == device_type:
        return graph
    if device_type != "cuda":
        raise ValueError(
            f"a step traced on {graph.device} can be planned for cuda, not for {device_type!r}"
        )
    states = {
        value for op in graph.operators if op.target == "generator_state" for value in op.writes
    }
    values = tuple(
        replace(v, size_bytes=0 if i in states else _rounded(v.size_bytes))
        for i, v in enumerate(graph.values)
    )
    operators = tuple(
        replace(op, pinned=NONDETERMINISTIC)
        if not op.pinned and is_nondeterministic(op.target, device_type)
        else op
        for op in graph.operators
    )
    return replace(graph, values=values, operators=operators, device=device_type)


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // CUDA_GRANULARITY_BYTES) * CUDA_GRANULARITY_BYTES


def traced_on(device_type: str) -> str:
    """Returns the device type of the fake tensors on which a step for `device_type` is traced."""
    return device_type if torch.cuda.is_available() else "cpu"


@contextmanager
def as_on(device: Device, *, autocast: torch.dtype | None = None) -> Iterator[None]:
    """Traces on `traced_on(device.type)` what a device runs, in a `with` block.

    Args:
        device: one of the table, or this machine's.
        autocast: the dtype of `torch.autocast` there; if None, autocast is off.
    """
    on = traced_on(device.type)
    with (
        nullcontext() if device.type == on else as_on_cuda(device.name),
        torch.autocast(on, autocast, enabled=autocast is not None),
    ):
        yield


_is_for_cuda: ContextVar[bool] = ContextVar("is_for_cuda", default=False)


@contextmanager
def as_on_cuda(device_name: str) -> Iterator[None]:
    """Traces on the CPU what a card runs: its attention, its dropout and its autocast."""
    token = _is_for_cuda.set(True)
    try:
        with cuda_attention(device_name), cuda_autocast():
            yield
    finally:
        _is_for_cuda.reset(token)


def is_for_cuda() -> bool:
    """True while a step on CPU tensors is traced as CUDA would run it."""
    return _is_for_cuda.get()
