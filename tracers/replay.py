"""Runs an operator call for real, on fresh tensors, for its time and its workspace.

Tensors have the shapes, strides and types of the call; floats are uniform in [0, 1), which
suits logarithms, roots and probabilities, and integers are 0, which is in range for any index.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from remat.torch_border.allocator import (
    hold_stream,
    is_profiling,
    run_counting_allocations,
)
from remat.torch_border.kernels import without_modes

from .calls import Call, OpOverload, TensorSpec

Run = Callable[[], Any]

_QUEUED = 10  # runs between two events; they take some 0.2 ms to queue

# Custom operators may wait for other processes, have effects, or trust their inputs: only torch's
# own are run.
_NAMESPACES = ("aten", "prims", "remat", "torch_nn")
# Those that read memory a library wrote for itself: with other bytes in it they crash.
_READ_OPAQUE_MEMORY = frozenset({
    torch.ops.aten.mkldnn_rnn_layer_backward, torch.ops.aten._cudnn_rnn_backward,
    torch.ops.aten.miopen_rnn_backward,
})  # fmt: skip
# What an operator raises for values it does not accept, such as a divisor of 0.
_REFUSALS = (RuntimeError, IndexError, ValueError, TypeError)


def results_of(call: Call) -> tuple[torch.Tensor, ...] | None:
    """Returns the tensors that a call returns, flat; None where it can't be run alone."""
    if not _can_run(call):
        return None
    with _without_traces(call.device_type):
        try:
            found = _run_of(call)()
        except _REFUSALS:
            return None
    items = found if isinstance(found, list | tuple) else [found]
    return tuple(item for item in items if isinstance(item, torch.Tensor))


def workspace_of(call: Call) -> int | None:
    """Returns the most bytes a call holds at once beyond what its outputs hold at its end.

    None where it can't be run alone, and on the CPU while another profiler runs.
    """
    if not _can_count(call):
        return None
    with _without_traces(call.device_type):
        try:
            run = _run_of(call)
            return _workspace_cuda(run) if call.device_type == "cuda" else _workspace_cpu(run)
        except _REFUSALS:
            return None


def seconds_of(call: Call, budget_s: float) -> float | None:
    """Returns the median time of a call.

    3 to 25 times after the first, within about `budget_s` seconds. On a GPU each is the mean of
    runs that were queued behind one another, so that Python's dispatch is no part of it.

    None where it can't be run alone.
    """
    if not _can_count(call):
        return None
    clock = _seconds_cuda if call.device_type == "cuda" else _seconds_cpu
    times: list[float] = []
    with _without_traces(call.device_type):
        try:
            run = _run_of(call)
            run()
        except _REFUSALS:
            return None
        end = time.perf_counter() + budget_s
        while len(times) < 3 or (len(times) < 25 and time.perf_counter() < end):
            times.append(clock(run))
    return statistics.median(times)


def _can_run(call: Call) -> bool:
    if not isinstance(call.target, OpOverload) or call.target.namespace not in _NAMESPACES:
        return False
    if call.packet in _READ_OPAQUE_MEMORY:
        return False
    specs = (*call.inputs, *call.outputs)
    return all(
        spec.layout == torch.strided and spec.device_type in ("cpu", "cuda") for spec in specs
    )


def _can_count(call: Call) -> bool:
    """True where it can be run, and no other profiler is in the way."""
    return _can_run(call) and not (call.device_type == "cpu" and is_profiling())


@contextmanager
def _without_traces(device_type: str) -> Iterator[None]:
    """Leaves random generators and autograd as they were, casts nothing, and runs for real though a
    trace on fake tensors asks.
    """
    devices = [torch.cuda.current_device()] if device_type == "cuda" else []
    uncast = torch.autocast(device_type, enabled=False)
    with without_modes(), torch.random.fork_rng(devices), torch.no_grad(), uncast:
        yield


def _run_of(call: Call) -> Run:
    is_zero = call.target.namespace == "remat"  # they look at their data: zeros take the most
    args = [_fresh(arg, is_zero) for arg in call.args]
    kwargs = {name: _fresh(value, is_zero) for name, value in call.kwargs}
    return lambda: call.target(*args, **kwargs)


def _fresh(value: Any, is_zero: bool) -> Any:
    if isinstance(value, tuple):
        return [_fresh(item, is_zero) for item in value]
    if not isinstance(value, TensorSpec):
        return value
    num_elements = value.extent_bytes // value.dtype.itemsize
    if not is_zero and value.dtype.is_floating_point and value.dtype.itemsize > 1:
        flat = torch.rand(num_elements, dtype=value.dtype, device=value.device_type)
    else:
        flat = torch.zeros(num_elements, dtype=value.dtype, device=value.device_type)
    tensor = flat.as_strided(value.shape, value.stride)
    if value.is_conj:
        tensor = tensor.conj()
    return torch.ops.aten._neg_view(tensor) if value.is_neg else tensor


def _workspace_cpu(run: Run) -> int:
    _outputs, events = run_counting_allocations(run)
    held = peak = 0
    for _, change in events:
        held += change
        peak = max(peak, held)
    return peak - held


def _workspace_cuda(run: Run) -> int:
    run()  # what a library keeps from its first call on belongs to no operator
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    _outputs = run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()


def _seconds_cpu(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _seconds_cuda(run: Run) -> float:
    """The device waits while the runs are queued; else a small kernel costs its launch."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    hold_stream()
    start.record()
    for _ in range(_QUEUED):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / _QUEUED
