"""Private names of torch's profiler, which counts allocations on the CPU.

Supported: torch 2.11 to 2.15; each name below was checked with the version beside it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig  # 2.13
from torch.autograd import _disable_profiler_legacy, _enable_profiler_legacy  # type: ignore[attr-defined]  # 2.13

Events = list[tuple[float, int]]  # (seconds since a start, bytes allocated or released)


class _Node(threading.local):
    """The autograd node whose allocations this thread counts.

    Attributes:
        events: its allocations so far; None while no node is measured.
        on_end: called by `end_node` with what the node returns.
    """

    events: Events | None = None
    on_end: Callable[[Sequence[Any]], None] | None = None


_NODE = _Node()


def is_profiling() -> bool:
    """True where another profiler runs, so that ours can't (`_profiler_enabled`, 2.13).

    Our own count of a node is no obstacle: the next measurement interrupts it.
    """
    return bool(torch._C._autograd._profiler_enabled()) and _NODE.events is None


def run_counting_allocations(
    fn: Callable[[], Any], marks: dict[str, int] | None = None
) -> tuple[Any, Events]:
    """Runs `fn`, and returns its result and what `stop_counting_allocations` returns.

    If a node is being counted, its count includes the allocations of `fn`.
    """
    of_node = _NODE.events
    if of_node is not None:
        of_node += stop_counting_allocations()
        _NODE.events = None

    start_counting_allocations()
    try:
        result = fn()
    finally:
        found = stop_counting_allocations(marks)
        if of_node is not None:
            of_node += found
            _NODE.events = of_node
            start_counting_allocations()
    return result, found


def start_counting_node(on_end: Callable[[Sequence[Any]], None] | None = None) -> None:
    """Starts counting the allocations of the autograd node that begins.

    The count has to end within the node, since autograd gives each node a copy of the thread's
    settings.

    Args:
        on_end: called by `end_node`.
    """
    _NODE.events, _NODE.on_end = [], on_end
    start_counting_allocations()


def end_node(made: Any) -> Any:
    """Ends a node whose count waits for this call, and returns what the node made.

    A hook on the node would keep alive the gradients that arrived, which the node frees otherwise.
    """
    on_end = _NODE.on_end
    if on_end is not None:
        _NODE.on_end = None
        on_end(made)
    return made


def stop_counting_node() -> Events:
    """Returns what the node allocated and released, in order."""
    events = [*(_NODE.events or []), *stop_counting_allocations()]
    _NODE.events = None
    return events


def abandon_node() -> None:
    """Ends the count of the running node, which is about to fail."""
    if _NODE.events is not None:
        stop_counting_node()
        no_node_runs()


def no_node_runs() -> None:
    """Forgets a node that failed before its end; its settings ended with it."""
    _NODE.events = _NODE.on_end = None


def start_counting_allocations() -> None:
    """Starts counting every allocation of this thread on the CPU.

    It uses torch's legacy profiler (`_enable_profiler_legacy`, 2.13), which unlike the present one
    writes nothing to stderr and starts in microseconds. It only sees the release of memory whose
    allocation it saw.
    """
    _enable_profiler_legacy(
        ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    )


def stop_counting_allocations(marks: dict[str, int] | None = None) -> Events:
    """Stops counting, and returns (seconds since the start, bytes allocated or freed) in order.

    Freed bytes are negative.

    Args:
        marks: filled with the marked moments: name -> number of events before.
    """
    threads = _disable_profiler_legacy()
    start = next(
        record for records in threads for record in records if record.name() == "__start_profile"
    )

    found: Events = []
    for record in (record for records in threads for record in records):
        if str(record.kind()) == "memory_alloc" and record.cpu_memory_usage():
            found.append((start.cpu_elapsed_us(record) / 1e6, int(record.cpu_memory_usage())))
        elif marks is not None and len(threads) == 1 and record.name().startswith(_MARK):
            marks.setdefault(record.name(), len(found))
    return found if len(threads) == 1 else sorted(found, key=lambda item: item[0])


def forget_cublas_workspaces() -> None:
    """Releases the workspaces of cuBLAS (`_cuda_clearCublasWorkspaces`, 2.13)."""
    torch._C._cuda_clearCublasWorkspaces()


def mark_moment() -> str:
    """Marks this moment among the counted events, and returns the mark's name."""
    name = f"{_MARK}{next(_MARKS)}"
    with torch.profiler.record_function(name):
        return name


_MARK = "remat moment "
_MARKS = itertools.count()


def hold_stream(cycles: int = 2_000_000) -> None:
    """Keeps the current CUDA stream busy for about a millisecond (`torch.cuda._sleep`, 2.13)."""
    torch.cuda._sleep(cycles)
