"""Measured memory.

The peak and timeline of a callable, on the CPU's allocator or a CUDA device's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from remat.core.cuda_peaks import CudaPeaks
from remat.run.cuda_mark import CudaMark
from remat.torch_border.allocator import is_profiling, run_counting_allocations
from remat.torch_border.kernels import StorageWeakRef


@dataclass(frozen=True)
class Measurement:
    """Memory that a callable held, above what was held before it.

    Attributes:
        peak_bytes: the most it held at once.
        end_bytes: what it left behind.
        times_s: when each allocation or release happened, from the first one on; shape
            (num_events,).
        bytes_held: bytes held after each; shape (num_events,).
        device: `cpu` or `cuda`.
        cuda_peaks: on CUDA what tensors asked for, were allocated, and what was reserved for them.
    """

    peak_bytes: int
    end_bytes: int
    times_s: tuple[float, ...]
    bytes_held: tuple[int, ...]
    device: str
    cuda_peaks: CudaPeaks | None = None


def measure(fn: Callable[[], Any], *, device: str | None = None) -> Measurement:
    """Runs `fn` once and returns the memory it held, on one device's allocator.

    Args:
        fn: what to run, such as `lambda: model(x).backward()`. Its result is dropped.
        device: "cpu" or "cuda"; by default CUDA where it is available.

    On the CPU every allocation of torch is counted to the byte (libraries with allocators of their
    own, such as oneDNN's scratch memory, are not seen). On CUDA allocations are read from the
    memory history, in the allocator's rounded sizes, and what it reserved without need is given
    back before.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} is neither 'cpu' nor 'cuda'")
    gc.collect()
    return _measure_cuda(fn) if device == "cuda" else _measure_cpu(fn)


def _measure_cpu(fn: Callable[[], Any]) -> Measurement:
    return from_events(run_counting_allocations(fn)[1], "cpu")


def _measure_cuda(fn: Callable[[], Any]) -> Measurement:
    mark = CudaMark.now()
    torch.cuda.memory._record_memory_history(context=None, stacks="python", max_entries=1_000_000)
    try:
        fn()
        torch.cuda.synchronize()
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    signs = {"alloc": 1, "free_completed": -1}
    events = [
        (e["time_us"] / 1e6, signs[e["action"]] * e["size"]) for e in trace if e["action"] in signs
    ]
    measured = from_events(events, "cuda")
    peaks = mark.peaks()  # the allocator's own word
    return replace(measured, peak_bytes=peaks.allocated_bytes, cuda_peaks=peaks)


def from_events(events: list[tuple[float, int]], device: str) -> Measurement:
    """Returns what (seconds, bytes allocated or, negative, released) in order add up to."""
    held, history, times = 0, [], []
    for time_s, change in events:
        held += change
        history.append(held)
        times.append(time_s - events[0][0])
    return Measurement(max([0, *history]), held, tuple(times), tuple(history), device)


@dataclass
class FirstStepMeter:
    """Measures the first step that really runs: a forward, and the backward that belongs to it.

    Each forward is measured until one of them has had its backward: what the profiler did not see
    allocated it does not see released. A backward belongs to the forward that saved what it is
    given. So a forward without a backward, several before one, and an error or Ctrl-C in either
    leave no number rather than a wrong one.

    Attributes:
        device: `cpu` or `cuda`.
        resident_bytes: what the step holds throughout, added to what is measured.
        num_results: how many of the forward's results the model returns; the others are saved.
        peak_bytes: the measured peak of the step, None until both halves ran.
        cuda_peaks: the same on CUDA, counted in three ways.
    """

    device: str
    resident_bytes: int
    num_results: int
    peak_bytes: int | None = None
    cuda_peaks: CudaPeaks | None = None
    _forward: _Forward | None = field(default=None, repr=False)  # whose backward is waited for

    def forward(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Returns `run`, measured until a step is."""
        return _boxed(lambda args: run(args) if self.peak_bytes else self._run_forward(run, args))

    def backward(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Returns `run`, measured once, for the forward that was measured last."""
        return _boxed(lambda args: run(args) if self.peak_bytes else self._run_backward(run, args))

    def forget(self) -> None:
        """Drops what was measured of a forward whose step does not run as planned."""
        self._forward = None

    def _run_forward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        self._forward = None
        if any(isinstance(arg, torch._subclasses.FakeTensor) for arg in args) or is_profiling():
            return run(args)
        peak_bytes, held_bytes, mark = 0, 0, None
        if self.device == "cuda":
            mark = CudaMark.now()
            results = run(args)
        else:
            results, peak_bytes, held_bytes = _profiled(run, args)
        saved = _references(results[self.num_results :])
        self._forward = _Forward(peak_bytes, held_bytes, saved, mark)
        return results

    def _run_backward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        # taken out first: an error below, or another forward's backward, leaves nothing of it
        forward, self._forward = self._forward, None
        is_its_own = forward is not None and forward.saved.keys() <= _references(args).keys()
        if forward is None or not is_its_own or is_profiling():
            return run(args)
        if forward.mark is not None:
            result = run(args)
            self.cuda_peaks = forward.mark.peaks().beside(self.resident_bytes)
            self.peak_bytes = self.cuda_peaks.allocated_bytes
            return result
        result, peak_bytes, _ = _profiled(run, args)
        self.peak_bytes = self.resident_bytes + max(
            forward.peak_bytes, forward.held_bytes + peak_bytes
        )
        return result


@dataclass(frozen=True)
class _Forward:
    """A forward that was measured.

    Attributes:
        peak_bytes: the most it held.
        held_bytes: what it left behind.
        saved: address -> reference of the storages that it saved for its backward. The reference
            keeps the address from being given to another one, not the memory.
        mark: what was held on the GPU before it.
    """

    peak_bytes: int
    held_bytes: int
    saved: dict[int, StorageWeakRef]
    mark: CudaMark | None


def _references(tensors: Iterable[Any]) -> dict[int, StorageWeakRef]:
    storages = [
        tensor.untyped_storage()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
    ]
    return {storage._cdata: StorageWeakRef(storage) for storage in storages}


def _boxed(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _profiled(run: Callable[[list[Any]], Any], args: list[Any]) -> tuple[Any, int, int]:
    with garbage_left_alone():
        result, events = run_counting_allocations(lambda: run(args))
    measured = from_events(events, "cpu")
    return result, measured.peak_bytes, measured.end_bytes


@contextmanager
def garbage_left_alone() -> Iterator[None]:
    """Runs no garbage collection inside.

    What an interrupted step left in a cycle would be released within the step that is measured,
    and be taken for memory that this one gave back.
    """
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()
