"""The graph of a step as another device would run it, where that device is not available.

A CPU-only torch can't differentiate tensors of a GPU, not even fake ones. The step is traced on the
CPU, and what is known to differ is changed: CUDA's autocast casts for other operators, its dropout
keeps a byte an element in every precision, its allocator rounds sizes, the generator's state takes
none of the device's memory, and some kernels may not run twice. What stays different:
attention kernels save a little more or less (the logarithms of their sums), and cuDNN keeps a
reserve for batch norm that the CPU does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch

from remat.core.graph import Graph

from .aot import CUDA_GRANULARITY_BYTES
from .cuda_autocast import cuda_autocast
from .recomputable import is_nondeterministic


def retarget(graph: Graph, device_type: str) -> Graph:
    """Returns the graph for `device_type`, `cpu` or `cuda`.

    The graph itself where it was traced there.
    """
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
        replace(op, pinned="its CUDA kernel gives another result at every run")
        if not op.pinned and is_nondeterministic(op.target, device_type)
        else op
        for op in graph.operators
    )
    return replace(graph, values=values, operators=operators, device=device_type)


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // CUDA_GRANULARITY_BYTES) * CUDA_GRANULARITY_BYTES


def traced_on(device_type: str) -> str:
    """The type of device that the fake tensors of a step for `device_type` are on."""
    return device_type if torch.cuda.is_available() else "cpu"


@contextmanager
def as_on(device_type: str, *, autocast: torch.dtype | None = None) -> Iterator[None]:
    """Traces, on `traced_on(device_type)`, what a device of that type runs.

    Args:
        device_type: `cpu` or `cuda`.
        autocast: the type of `torch.autocast` there; without it if None.
    """
    on = traced_on(device_type)
    with (
        nullcontext() if device_type == on else as_on_cuda(),
        torch.autocast(on, autocast, enabled=autocast is not None),
    ):
        yield


_is_for_cuda: ContextVar[bool] = ContextVar("is_for_cuda", default=False)


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Traces on the CPU what CUDA runs: its attention, its dropout, and what its autocast casts
    for.
    """
    token = _is_for_cuda.set(True)
    try:
        with fused_attention(), cuda_autocast():
            yield
    finally:
        _is_for_cuda.reset(token)


def is_for_cuda() -> bool:
    """True where a step on the CPU's tensors is traced as CUDA would run it."""
    return _is_for_cuda.get()


@contextmanager
def fused_attention() -> Iterator[None]:
    """Traces attention on the CPU as the fused kernel that CUDA has for it, dropout or not.

    The CPU's fused kernel has no dropout, and torch falls back to one that saves every probability;
    CUDA's saves a seed.
    """
    plain: Any = torch.nn.functional.scaled_dot_product_attention

    def without_dropout(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> Any:
        return plain(query, key, value, attn_mask, 0.0, is_causal, **kwargs)

    functional: Any = torch.nn.functional
    functional.scaled_dot_product_attention = without_dropout
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = plain
