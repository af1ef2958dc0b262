"""Runs an operator call for real, on new tensors, to measure its time and workspace.

Tensors have the shapes, strides and types of the call; floats are uniform in [0, 1), which
suits logarithms, roots and probabilities, and integers are 0, which is in range for any index.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from remat.torch_border.allocator import (
    hold_stream,
    is_profiling,
    run_counting_allocations,
)
from remat.torch_border.cuda_allocator import reset_peaks
from remat.torch_border.kernels import without_modes

from .calls import Call, OpOverload, TensorSpec
from .timing import Run, Timing, timed, timed_on_cpu

_QUEUED = 10  # runs between two events; they take some 0.2 ms to queue

# Only torch's operators and ours are run: custom ones may wait for other processes, have effects,
# or crash for other inputs.
_NAMESPACES = ("aten", "prims", "remat", "torch_nn")
# Operators that read memory in a library's own format, and crash on other bytes.
_READ_OPAQUE_MEMORY = frozenset({
    torch.ops.aten.mkldnn_rnn_layer_backward, torch.ops.aten._cudnn_rnn_backward,
    torch.ops.aten.miopen_rnn_backward,
})  # fmt: skip
# Errors that operators raise for values that they do not accept, such as a divisor of 0.
_REFUSALS = (RuntimeError, IndexError, ValueError, TypeError)


def results_of(call: Call) -> tuple[torch.Tensor, ...] | None:
    """Returns the tensors that a call returns, flat; None where it can't be run alone."""
    if not _can_run(call):
        return None

    with without_traces(call.device_type):
        try:
            found = _run_of(call)()
        except _REFUSALS:
            return None

    items = found if isinstance(found, list | tuple) else [found]
    return tuple(item for item in items if isinstance(item, torch.Tensor))


def workspace_of(call: Call) -> int | None:
    """Returns the peak bytes that a call holds, minus what its outputs hold at its end.

    None where it can't be run alone, and on the CPU while another profiler runs.
    """
    if not _can_count(call):
        return None
    with without_traces(call.device_type):
        try:
            run = _run_of(call)
            return _workspace_cuda(run) if call.device_type == "cuda" else _workspace_cpu(run)
        except _REFUSALS:
            return None


def timing_of(call: Call, budget_s: float) -> Timing | None:
    """Returns the median time of a call; None where it can't be run alone.

    After a first run, 3 to 25 runs are timed within about `budget_s` seconds. On a GPU each time is
    the mean of runs that were queued one after the other, which leaves out Python's dispatch.

    On the CPU, runs that waited for a processor don't count (`timed_on_cpu`).
    """
    if not _can_count(call):
        return None

    with without_traces(call.device_type):
        try:
            run = _run_of(call)
            run()
        except _REFUSALS:
            return None

        if call.device_type == "cuda":
            return timed(run, _seconds_cuda, budget_s)
        return timed_on_cpu(run, budget_s)


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
    """True where a call can be run and no other profiler prevents counting."""
    return _can_run(call) and not (call.device_type == "cpu" and is_profiling())


@contextmanager
def without_traces(device_type: str) -> Iterator[None]:
    """Runs operators for real in a `with` block, even during a trace on fake tensors.

    Random generators are restored; autograd and autocast are off.
    """
    devices = [torch.cuda.current_device()] if device_type == "cuda" else []
    uncast = torch.autocast(device_type, enabled=False)
    with without_modes(), torch.random.fork_rng(devices), torch.no_grad(), uncast:
        yield


def _run_of(call: Call) -> Run:
    # our operators look at their data, and need the most memory for zeros
    is_zero = call.target.namespace == "remat"
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
    run()  # what a library allocates in its first call and keeps is not workspace
    torch.cuda.synchronize()
    reset_peaks()
    _outputs = run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()


def _seconds_cuda(run: Run) -> float:
    """Holds the device while runs are queued, so that launches of small kernels are not timed."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    hold_stream()
    start.record()
    for _ in range(_QUEUED):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / _QUEUED
