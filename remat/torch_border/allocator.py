"""Private names of torch that measure: its profiler counts allocations on the CPU.

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
    """The autograd node that this thread counts the allocations of.

    Attributes:
        events: those so far; None where none is counted.
        on_end: called with what the node returns by what runs inside of it, see `end_node`.
    """

    events: Events | None = None
    on_end: Callable[[Sequence[Any]], None] | None = None


_NODE = _Node()


def is_profiling() -> bool:
    """True where a profiler runs already, but for a node's count of ours, which gives way.

    A second one can't (`torch.autograd._profiler_enabled`, 2.13).
    """
    return bool(torch._C._autograd._profiler_enabled()) and _NODE.events is None


def run_counting_allocations(
    fn: Callable[[], Any], marks: dict[str, int] | None = None
) -> tuple[Any, Events]:
    """Runs `fn` and returns its result, and what was allocated as `stop_counting_allocations`
    does.
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
    """Counts the allocations of an autograd node that begins.

    It has to end within the node: autograd gives each a copy of the thread's settings.

    Args:
        on_end: what `end_node` calls.
    """
    _NODE.events, _NODE.on_end = [], on_end
    start_counting_allocations()


def end_node(made: Any) -> Any:
    """Returns what a node made, which ends where it is counted and waits for this.

    A hook on the node would keep the gradients that arrived, which go within it otherwise.
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
    """Ends the count of the node that runs, which is about to fail."""
    if _NODE.events is not None:
        stop_counting_node()
        no_node_runs()


def no_node_runs() -> None:
    """Says that none does: one that fails does not reach its end, and its settings end with it."""
    _NODE.events = _NODE.on_end = None


def start_counting_allocations() -> None:
    """Counts every allocation of this thread on the CPU from here on.

    The event profiler of torch's first years (`_enable_profiler_legacy`, 2.13): unlike the present
    one it says nothing on stderr, and starts in microseconds. What is released is seen where its
    allocation was.
    """
    _enable_profiler_legacy(
        ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    )


def stop_counting_allocations(marks: dict[str, int] | None = None) -> Events:
    """Returns (seconds since the start, bytes allocated or, negative, released) in order.

    Args:
        marks: gets the moments that were marked: name -> how many events came before.
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
    """Gives back what cuBLAS keeps for each handle and stream (`_cuda_clearCublasWorkspaces`,
    2.13).
    """
    torch._C._cuda_clearCublasWorkspaces()


def mark_moment() -> str:
    """Marks this moment in what is counted, and returns its name."""
    name = f"{_MARK}{next(_MARKS)}"
    with torch.profiler.record_function(name):
        return name


_MARK = "remat moment "
_MARKS = itertools.count()


def hold_stream(cycles: int = 2_000_000) -> None:
    """Keeps the current CUDA stream busy for about a millisecond (`torch.cuda._sleep`, 2.13)."""
    torch.cuda._sleep(cycles)
