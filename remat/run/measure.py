"""Measures memory: the peak and timeline of a callable, and the peak of a first planned step.

It reads the CPU's allocator or that of a CUDA device.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from remat.core.cuda_peaks import CudaPeaks
from remat.run.cuda_graphs import refuse_first_steps
from remat.run.cuda_mark import CudaMark, of_step
from remat.run.measured_forward import (
    MeasuredForward,
    Storage,
    WholeStep,
    keep_peak_for,
    note_peak,
    storages_of,
)
from remat.torch_border.allocator import (
    Events,
    end_node,
    is_profiling,
    mark_moment,
    run_counting_allocations,
)
from remat.torch_border.cuda_allocator import memory_history, turn_of
from remat.torch_border.kernels import FakeTensor


@dataclass(frozen=True)
class Measurement:
    """Memory that a callable held, above what was held before it.

    Attributes:
        peak_bytes: the most it held at once; on CUDA in the allocator's blocks.
        end_bytes: what was still held at its end; on CUDA in the allocator's blocks.
        times_s: when each allocation or release happened, from the first one on; shape
            (num_events,).
        bytes_held: bytes held after each; shape (num_events,).
        device: `cpu` or `cuda`.
        cuda_peaks: on CUDA, the peaks of requested, allocated and reserved bytes.
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
        fn: the callable, such as `lambda: model(x).backward()`. Its result is dropped.
        device: "cpu" or "cuda"; by default CUDA where it is available.

    On the CPU every allocation of torch is counted to the byte. Memory that libraries allocate
    themselves, such as oneDNN's scratch memory, is not seen.

    On CUDA the timeline is read from torch's memory history, in the sizes that were requested. A
    history that you record already goes on, and must record all events. Before `fn` runs, unused
    cached memory is released and the allocator's peaks are reset.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} is neither 'cpu' nor 'cuda'")
    gc.collect()
    return _measure_cuda(fn) if device == "cuda" else _measure_cpu(fn)


def _measure_cpu(fn: Callable[[], Any]) -> Measurement:
    """Measures `fn`, and planned steps that run inside of it for the first time.

    Such steps can't be profiled on their own, since a profiler is already running.
    """
    outer, _MEASURED.now = _MEASURED.now, _Measured()
    measured = _MEASURED.now
    try:
        _, events = run_counting_allocations(fn, measured.marks)
    finally:
        _MEASURED.now = outer
    measured.tell(events)
    return from_events(events, "cpu")


def _measure_cuda(fn: Callable[[], Any]) -> Measurement:
    with memory_history() as history:
        mark = CudaMark.now()
        fn()
        peaks = mark.peaks()
        _, end_bytes = mark.held()
        trace = history()

    signs = {"alloc": 1, "free_completed": -1}
    events = [
        (e["time_us"] / 1e6, signs[e["action"]] * e["size"]) for e in trace if e["action"] in signs
    ]
    measured = from_events(events, "cuda")
    # a planned step that runs in `fn` for the first time resets the peaks
    peaks = peaks.most(CudaPeaks(0, 0, 0).beside(measured.peak_bytes))
    return replace(
        measured, peak_bytes=peaks.allocated_bytes, end_bytes=end_bytes, cuda_peaks=peaks
    )


def from_events(events: Events, device: str) -> Measurement:
    """Returns the measurement of events in order: (seconds, bytes allocated, negative if freed)."""
    held, history, times = 0, [], []
    for time_s, change in events:
        held += change
        history.append(held)
        times.append(time_s - events[0][0])
    return Measurement(max([0, *history]), held, tuple(times), tuple(history), device)


class _Measured:
    """A running measurement, which also measures parts of itself that are delimited by marks."""

    def __init__(self) -> None:
        self.marks: dict[str, int] = {}
        self._asked: list[tuple[Sequence[_Span], Callable[[list[Events]], None]]] = []

    def run(self, run: Callable[[list[Any]], Any], args: list[Any]) -> tuple[Any, _Span]:
        """Runs a part, and returns its result and its marks."""
        first = mark_moment()
        with garbage_left_alone():
            result = run(args)
        return result, (first, mark_moment())

    def ask(self, spans: Sequence[_Span], answer: Callable[[list[Events]], None]) -> None:
        """Calls `answer` with the events of the parts at the end of the measurement."""
        self._asked.append((spans, answer))

    def tell(self, events: Events) -> None:
        """Passes the events of each part to the callbacks."""
        for spans, answer in self._asked:
            if all(name in self.marks for span in spans for name in span):
                answer([events[self.marks[first] : self.marks[last]] for first, last in spans])


_Span = tuple[str, str]  # the marks of its first and its last moment


class _OfThread(threading.local):
    now: _Measured | None = None


_MEASURED = _OfThread()


@dataclass(eq=False)
class FirstStepMeter:
    """Measures the first planned step: a forward, and the backward that belongs to it.

    Each forward is measured until the backward of one of them has run, since the profiler only sees
    the release of memory whose allocation it saw. A backward belongs to the forward that saved its
    inputs. So there is no number, rather than a wrong one, after a forward without a backward,
    after several forwards before a backward, or after an error or Ctrl-C in either half.

    On CUDA, each half has a peak of its own, so that what ran between them is left out.

    Attributes:
        device: `cpu` or `cuda`.
        resident_bytes: what the step holds throughout; it is added to what is measured.
        num_results: how many of the forward's results the model returns; the others are saved.
        peak_bytes: the measured peak of the step; None until forward and backward ran.
        cuda_peaks: the peak on CUDA, counted in three ways.
        whole: the measured whole step, with its loss and other calls; None where that was not
            measured.
        waiting: the last forward that was measured, until its backward runs.
        num_backwards: how many planned backwards ran.
        num_unmeasured: how many forwards still run before one is measured.
        owner: what all steps of one planned module have in common.
    """

    device: str
    resident_bytes: int
    num_results: int
    peak_bytes: int | None = None
    cuda_peaks: CudaPeaks | None = None
    whole: WholeStep | None = None
    waiting: MeasuredForward | None = field(default=None, repr=False)
    num_backwards: int = 0
    num_unmeasured: int = 0
    owner: object = field(default_factory=object, repr=False)

    @property
    def tensor_bytes(self) -> int:
        """What tensors held at the peak, as plans count them; 0 if it was not measured.

        On CUDA the allocator's blocks are larger: by 0.02 % for GPT-2 medium, 0.7 % for GPT-2 XL.
        """
        return self.cuda_peaks.requested_bytes if self.cuda_peaks else self.peak_bytes or 0

    def forward(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Returns `run`, measured at each call until a whole step has been measured."""

        def measured(args: list[Any]) -> Any:
            self._note_turn()
            return run(args) if self.peak_bytes else self._run_forward(run, args)

        return _boxed(measured)

    def backward(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Returns `run`, measured once, for the forward that was measured last."""

        def counted(args: list[Any]) -> Any:
            self._note_turn()
            self.num_backwards += 1
            return end_node(run(args) if self.peak_bytes else self._run_backward(run, args))

        return _boxed(counted)

    def forget(self) -> None:
        """Drops the measured forward, whose step does not run as planned."""
        self.waiting = None

    def _note_turn(self) -> None:
        if self.device == "cuda":
            turn_of(self.owner)

    def _run_forward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        self.waiting = None
        outer = _MEASURED.now if self.device == "cpu" else None
        is_fake = any(isinstance(arg, FakeTensor) for arg in args)
        if is_fake or (is_profiling() and outer is None):
            return run(args)
        if self.num_unmeasured:
            refuse_first_steps()
            self.num_unmeasured -= 1
            return run(args)

        forward = MeasuredForward(storages_of(args))

        if self.device == "cuda":
            results = self._forward_on_cuda(forward, run, args)
        elif outer is not None:
            results, span = outer.run(run, args)
            forward.span = outer, span
        else:
            results, events = _profiled(run, args)
            measured = from_events(events, "cpu")
            forward.peak_bytes, forward.held_bytes = measured.peak_bytes, measured.end_bytes

        forward.end(results, self.num_results)
        self.waiting = forward
        return results

    def _forward_on_cuda(
        self, forward: MeasuredForward, run: Callable[[list[Any]], Any], args: list[Any]
    ) -> Any:
        note_peak()
        forward.mark = CudaMark.now(self.owner)
        keep_peak_for(forward)
        results = run(args)
        note_peak(forward)
        forward.cuda_peaks, forward.cuda_held = forward.mark.peaks(), forward.mark.held()
        return results

    def _run_backward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        # removed first, so that nothing is left after an error or another forward's backward
        forward, self.waiting = self.waiting, None
        is_its_own = forward is not None and forward.saved.keys() <= storages_of(args).keys()
        if forward is None or not is_its_own:
            return run(args)

        known = forward.saved.keys() | forward.args.keys()
        arrived = [s for key, s in storages_of(args).items() if key not in known]
        if forward.cuda_peaks is not None and not is_profiling():
            arrived_bytes = sum(storage.size_bytes for storage in arrived)
            own = forward.cuda_held[0] + arrived_bytes, forward.cuda_held[1] + arrived_bytes
            note_peak()
            mark = CudaMark.now(self.owner, own)
            result = run(args)
            self.cuda_peaks = of_step(forward.cuda_peaks.most(mark.peaks()), self.resident_bytes)
            self.peak_bytes = self.cuda_peaks.allocated_bytes
            note_peak(forward)
            return result

        outer = _MEASURED.now
        if forward.span is not None and outer is not None and forward.span[0] is outer:
            result, span = outer.run(run, args)
            outer.ask([forward.span[1], span], partial(self._is_measured, _gone(arrived)))
            return result

        if forward.span is not None or is_profiling():
            return run(args)
        result, events = _profiled(run, args)
        self._add(forward.peak_bytes, forward.held_bytes, events, _gone(arrived))
        return result

    def _is_measured(self, gone: list[int], parts: list[Events]) -> None:
        forward, backward = parts
        measured = from_events(forward, "cpu")
        self._add(measured.peak_bytes, measured.end_bytes, backward, gone)

    def _add(self, peak_bytes: int, held_bytes: int, backward: Events, gone: list[int]) -> None:
        """Sets the peak from forward and backward, without the release of arrived gradients."""
        events = list(backward)
        for size_bytes in gone:
            place = next((i for i, (_, change) in enumerate(events) if change == -size_bytes), None)
            if place is not None:
                del events[place]
        backward_bytes = from_events(events, "cpu").peak_bytes
        self.peak_bytes = self.resident_bytes + max(peak_bytes, held_bytes + backward_bytes)


def _gone(storages: Iterable[Storage]) -> list[int]:
    """Returns the sizes of the storages that were released."""
    return [storage.size_bytes for storage in storages if storage.is_gone()]


def _boxed(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _profiled(run: Callable[[list[Any]], Any], args: list[Any]) -> tuple[Any, Events]:
    with garbage_left_alone():
        return run_counting_allocations(lambda: run(args))


@contextmanager
def garbage_left_alone() -> Iterator[None]:
    """Disables garbage collection inside of a `with` block.

    It could release what an earlier, interrupted step left in a cycle, and this would be counted as
    memory that the measured step released.
    """
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()
