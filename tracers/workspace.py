"""Workspace: the memory an operator holds while it runs, beyond its inputs and outputs.

On the CPU the workspace of most operators follows from torch's source (`cpu_workspace`). oneDNN
computes convolutions, and products in bfloat16 and float16; its memory layouts and scratch memory
depend on the processor. Such a call is run once per machine, and what the allocator counted is
stored on disk. Operators without a formula are measured in the same way.

On CUDA that of flash attention's backward follows from torch's source too (`cuda_workspace`). Other
workspace counts as 0 there: it depends on the library that is chosen at run time, and only
`profile()` measures it. In addition, cuBLAS holds a workspace for each handle and stream from its
first product on (8.1 MiB, 32 MiB on Hopper and later; `CUBLAS_WORKSPACE_CONFIG`). `checkpoint`
measures it and keeps it free (`remat/plan/card.py`); `fits` and `max_batch` take the
device table's number; `trace` and `solve` leave it to `reserve_bytes`.
"""

from __future__ import annotations

import dataclasses
import logging
from functools import cache

import torch

from . import cuda_workspace
from .cache import DiskCache, cache_path
from .calls import Call, TensorSpec, aten
from .counts import CONVOLUTIONS, bytes_moved, flop_of
from .cpu_workspace import formula_bytes
from .devices import machine
from .replay import workspace_of

_LOG = logging.getLogger(__name__)

# Calls above either limit, about a quarter of a second on two cores, are not run.
_MOST_BYTES = 1 << 28
_MOST_FLOP = 2e10
MOST_WORKSPACE_BYTES = float(1 << 50)  # per operator; more in a file means that it is damaged


def workspace_bytes(node: torch.fx.Node | Call, device_type: str) -> int:
    """Returns the bytes that an operator holds while it runs, beyond its inputs and outputs.

    Args:
        node: an fx node with fake tensors in its and its inputs' `meta["val"]`, or its call.
        device_type: where it will run, `cpu` or `cuda`.
    """
    if isinstance(node, torch.fx.Node) and node.op != "call_function":
        return 0
    call = node if isinstance(node, Call) else Call.of(node)
    if not call.computes:
        return 0
    if device_type != "cpu":
        return cuda_workspace.formula_bytes(call)
    known = formula_bytes(call)
    return measured_bytes(call) if known is None else known


def measured_bytes(call: Call) -> int:
    """Returns the workspace of a call, measured on this machine's CPU now or earlier."""
    key = f"{machine()}: {call}"
    known = _store().get(key, (0.0, MOST_WORKSPACE_BYTES))
    if known is not None:
        return int(known[0])

    measured = _measure(call)
    if measured is None:
        _LOG.warning("the workspace of %s can't be measured and counts as 0", call.target)
        return 0  # not stored: it may be possible later, when no other profiler runs

    _store().put(key, (float(measured),))
    return measured


@cache
def _store() -> DiskCache:
    return DiskCache(cache_path("workspace"))


def _measure(call: Call) -> int | None:
    if bytes_moved(call) <= _MOST_BYTES and flop_of(call) <= _MOST_FLOP:
        return workspace_of(call)
    if call.packet in CONVOLUTIONS and call.args[0].shape[0] > 1:
        return _measure_smaller_batches(call)
    _LOG.warning("the workspace of %s counts as 0: the call is too large to be run", call.target)
    return 0


def _measure_smaller_batches(call: Call) -> int:
    """Extrapolates the workspace of a convolution linearly from two smaller batches.

    The workspace is the maximum of a few sums of tensors and buffers, each linear in the batch.
    """
    batch: int = call.args[0].shape[0]
    share = max(bytes_moved(call) / _MOST_BYTES, flop_of(call) / _MOST_FLOP)
    large = max(1, int(batch / share))
    small = max(1, large // 2)
    at_large, at_small = (measured_bytes(_with_batch(call, size)) for size in (large, small))
    slope = (at_large - at_small) / (large - small) if large > small else at_large
    return round(at_large + slope * (batch - large))


def _with_batch(call: Call, batch: int) -> Call:
    """Returns the call of a convolution, or of its backward, with another number of images."""

    def of_batch(images: TensorSpec) -> TensorSpec:
        return dataclasses.replace(images, shape=(batch, *images.shape[1:]))

    is_backward = call.packet is aten.convolution_backward
    num_images = 2 if is_backward else 1
    args = (*map(of_batch, call.args[:num_images]), *call.args[num_images:])

    # the first result has images: the output, or the gradient of the input if it is asked for
    has_images = not is_backward or call.argument("output_mask")[0]
    outputs = (of_batch(call.outputs[0]), *call.outputs[1:]) if has_images else call.outputs
    return dataclasses.replace(call, args=args, outputs=outputs)
