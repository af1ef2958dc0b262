"""Private names of torch that measure: its profiler counts allocations on the CPU.

Supported: torch 2.11 to 2.15; each name below was checked with the version beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig  # 2.13
from torch.autograd import _disable_profiler_legacy, _enable_profiler_legacy  # type: ignore[attr-defined]  # 2.13


def is_profiling() -> bool:
    """True where a profiler runs already.

    A second one can't (`torch.autograd._profiler_enabled`, 2.13).
    """
    return bool(torch._C._autograd._profiler_enabled())


def run_counting_allocations(fn: Callable[[], Any]) -> tuple[Any, list[tuple[float, int]]]:
    """Runs `fn` and returns its result, and what was allocated as `stop_counting_allocations`
    does.
    """
    start_counting_allocations()
    try:
        result = fn()
    finally:
        found = stop_counting_allocations()
    return result, found


def start_counting_allocations() -> None:
    """Counts every allocation of this thread on the CPU from here on.

    The event profiler of torch's first years (`_enable_profiler_legacy`, 2.13): unlike the present
    one it says nothing on stderr, and starts in microseconds. What is released is seen where its
    allocation was.
    """
    _enable_profiler_legacy(
        ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    )


def stop_counting_allocations() -> list[tuple[float, int]]:
    """Returns (seconds since the start, bytes allocated or, negative, released) in order."""
    threads = _disable_profiler_legacy()
    start = next(
        record for records in threads for record in records if record.name() == "__start_profile"
    )
    found = [
        (start.cpu_elapsed_us(record) / 1e6, int(record.cpu_memory_usage()))
        for records in threads
        for record in records
        if str(record.kind()) == "memory_alloc" and record.cpu_memory_usage()
    ]
    return found if len(threads) == 1 else sorted(found, key=lambda item: item[0])


def forget_cublas_workspaces() -> None:
    """Gives back what cuBLAS keeps for each handle and stream (`_cuda_clearCublasWorkspaces`,
    2.13).
    """
    torch._C._cuda_clearCublasWorkspaces()


def hold_stream(cycles: int = 2_000_000) -> None:
    """Keeps the current CUDA stream busy for about a millisecond (`torch.cuda._sleep`, 2.13)."""
    torch.cuda._sleep(cycles)
