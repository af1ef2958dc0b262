"""Measured memory.

The peak and timeline of a callable, on the CPU's allocator or a CUDA device's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from remat.torch_border.allocator import (
    Tally,
    is_in_backward,
    is_profiling,
    run_counting_allocations,
    tally_of_thread,
)
from remat.torch_border.autograd import at_end_of_backward
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
    """

    peak_bytes: int
    end_bytes: int
    times_s: tuple[float, ...]
    bytes_held: tuple[int, ...]
    device: str


def measure(fn: Callable[[], Any], *, device: str | None = None) -> Measurement:
    """Runs `fn` once and returns the memory it held, on one device's allocator.

    Args:
        fn: what to run, such as `lambda: model(x).backward()`. Its result is dropped.
        device: "cpu" or "cuda"; by default CUDA where it is available.

    On the CPU every allocation of torch is counted to the byte (libraries with allocators of their
    own, such as oneDNN's scratch memory, are not seen). On CUDA allocations are read from the
    memory history, in the allocator's rounded sizes.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} is neither 'cpu' nor 'cuda'")
    gc.collect()
    return _measure_cuda(fn) if device == "cuda" else _measure_cpu(fn)


def _measure_cpu(fn: Callable[[], Any]) -> Measurement:
    return from_events(run_counting_allocations(fn)[1], "cpu")


def _measure_cuda(fn: Callable[[], Any]) -> Measurement:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
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
    peak_bytes = torch.cuda.max_memory_allocated() - before  # the allocator's own word
    return Measurement(
        peak_bytes, measured.end_bytes, measured.times_s, measured.bytes_held, "cuda"
    )


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
        resident_bytes: what the step holds throughout, on the CPU added to what is measured.
        num_results: how many of the forward's results the model returns; the others are saved.
        whole: measures what the step holds beside these two as well.
    """

    device: str
    resident_bytes: int
    num_results: int
    whole: WholeStepMeter = field(init=False)
    _forward: _Forward | None = field(default=None, repr=False)  # whose backward is waited for
    _peak_bytes: int | None = field(default=None, repr=False)
    # where a tally runs: what it is asked for once it has ended
    _asked: Callable[[], int | None] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.whole = WholeStepMeter(self.device, self.resident_bytes)

    @property
    def peak_bytes(self) -> int | None:
        """The measured peak of the step, None until both halves ran."""
        if self._peak_bytes is None and self._asked is not None:
            self._peak_bytes = self._asked()
        return self._peak_bytes

    @property
    def is_done(self) -> bool:
        """True where nothing is left to measure."""
        return self._peak_bytes is not None or self._asked is not None

    def forward(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Returns `run`, measured until a step is."""
        return _boxed(lambda args: run(args) if self.is_done else self._run_forward(run, args))

    def backward(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Returns `run`, measured once, for the forward that was measured last."""

        def measured(args: list[Any]) -> Any:
            self.whole.backward_begins()
            return run(args) if self.is_done else self._run_backward(run, args)

        return _boxed(measured)

    def _run_forward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        self._forward = None
        if any(isinstance(arg, torch._subclasses.FakeTensor) for arg in args) or is_profiling():
            return run(args)
        peak_bytes = held_bytes = 0
        self.whole.forward_begins()
        if self.device == "cuda":
            if not self.whole.is_open:
                torch.cuda.reset_peak_memory_stats()
            results = run(args)
        else:
            results, peak_bytes, held_bytes = _profiled(run, args)
        self._forward = _Forward(peak_bytes, held_bytes, _references(results[self.num_results :]))
        return results

    def _run_backward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        # taken out first: an error below, or another forward's backward, leaves nothing of it
        forward, self._forward = self._forward, None
        is_its_own = forward is not None and forward.saved.keys() <= _references(args).keys()
        tally = tally_of_thread()
        if forward is None or not is_its_own or (tally is None and is_profiling()):
            return run(args)
        if self.device == "cuda":
            result = run(args)
            torch.cuda.synchronize()
            self._peak_bytes = torch.cuda.max_memory_allocated()
            return result
        if tally is not None:
            first = tally.mark()
            result = run(args)
            self._asked = partial(self._peak_of, forward, tally, first, tally.mark())
            return result
        result, peak_bytes, _ = _profiled(run, args)
        self._peak_bytes = self._peak_of_halves(forward, peak_bytes)
        return result

    def _peak_of(self, forward: _Forward, tally: Tally, first: int, last: int) -> int | None:
        """What a tally says of the step between two of its marks, None while it goes on."""
        is_there = tally is tally_of_thread() and not is_in_backward()
        if is_there and tally.is_over:
            tally.end()
        if not tally.has_ended:
            return None
        return self._peak_of_halves(forward, tally.peak_bytes(first, last))

    def _peak_of_halves(self, forward: _Forward, backward_bytes: int) -> int:
        return self.resident_bytes + max(forward.peak_bytes, forward.held_bytes + backward_bytes)


_MOST_CALLS = 64  # forwards without a backward, after which none is waited for


@dataclass
class WholeStepMeter:
    """Measures all that is held from a planned forward to the end of the backward that it gets.

    That is the step as its user sees it: the loss where it is computed outside, other calls of the
    module before the backward, whatever else runs in between. What was held when it began, but for
    the step's own tensors, is left out.

    Attributes:
        device: `cpu` or `cuda`.
        resident_bytes: the step's parameters, buffers and inputs.
        num_calls: forwards in the step.
    """

    device: str
    resident_bytes: int
    num_calls: int = 0
    _peak_bytes: int | None = field(default=None, repr=False)
    _tally: Tally | None = field(default=None, repr=False)
    _begun_bytes: int = field(default=0, repr=False)
    _end_mark: int = field(default=0, repr=False)
    _is_ending: bool = field(default=False, repr=False)

    @property
    def peak_bytes(self) -> int | None:
        """The most that was held, None until a step was measured."""
        if self._tally is not None and self._tally.is_over:
            self._close()
        return self._peak_bytes

    @property
    def is_open(self) -> bool:
        """True between a forward and the end of its backward."""
        return self._tally is not None and not self._tally.is_over

    def forward_begins(self) -> None:
        """A planned forward is about to run: the first of a step, or another one."""
        if is_in_backward() or self.peak_bytes is not None:
            return
        if self.is_open and self.num_calls < _MOST_CALLS:
            self.num_calls += 1
            return
        self._close()
        if self.num_calls >= _MOST_CALLS or is_profiling():
            return
        other = tally_of_thread()
        if other is not None:
            if not other.is_over:
                return  # another module's step, which this forward is part of
            other.end()

        self._tally, self.num_calls, self._is_ending = Tally(), 1, False
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._begun_bytes = torch.cuda.memory_allocated()
        else:
            self._tally.begin()

    def backward_begins(self) -> None:
        """A planned backward is about to run: the step ends with it."""
        if self.is_open and not self._is_ending:
            self._is_ending = True
            at_end_of_backward(self._end)

    def _end(self) -> None:
        tally = self._tally
        if tally is None:
            return
        tally.is_over = True
        if self.device == "cuda":
            torch.cuda.synchronize()
            held_bytes = torch.cuda.max_memory_allocated() - self._begun_bytes
            self._tally, self._peak_bytes = None, self.resident_bytes + held_bytes
        else:
            self._end_mark = tally.mark()

    def _close(self) -> None:
        tally = self._tally
        if tally is None:
            return
        if tally is tally_of_thread():
            if is_in_backward():
                return
            tally.end()
        self._tally = None
        if self._end_mark and tally.has_ended:
            self._peak_bytes = self.resident_bytes + tally.peak_bytes(None, self._end_mark)


@dataclass(frozen=True)
class _Forward:
    """A forward that was measured.

    Attributes:
        peak_bytes: the most it held.
        held_bytes: what it left behind.
        saved: address -> reference of the storages that it saved for its backward. The reference
            keeps the address from being given to another one, not the memory.
    """

    peak_bytes: int
    held_bytes: int
    saved: dict[int, StorageWeakRef]


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
