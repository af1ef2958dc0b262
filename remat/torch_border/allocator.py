"""Private names of torch that measure: its profiler counts allocations on the CPU.

Supported: torch 2.11 to 2.15; each name below was checked with the version beside it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig  # 2.13
from torch.autograd import _disable_profiler_legacy, _enable_profiler_legacy  # type: ignore[attr-defined]  # 2.13

Events = list[tuple[float, int]]  # (seconds since the start, bytes allocated or released)


def is_profiling() -> bool:
    """True where a profiler runs already that can't be taken turns with.

    A second one can't run (`torch.autograd._profiler_enabled`, 2.13). A tally of ours gives way,
    but inside of a backward, which has a copy of this thread's settings.
    """
    is_on = bool(torch._C._autograd._profiler_enabled())
    return is_on and (tally_of_thread() is None or is_in_backward())


def is_in_backward() -> bool:
    """True inside of a backward (`_current_graph_task_id`, 2.13)."""
    return bool(torch._C._current_graph_task_id() != -1)


def run_counting_allocations(fn: Callable[[], Any]) -> tuple[Any, Events]:
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
    """Counts every allocation of this thread on the CPU from here on, for a tally too.

    The event profiler of torch's first years (`_enable_profiler_legacy`, 2.13): unlike the present
    one it says nothing on stderr, and starts in microseconds. What is released is seen where its
    allocation was.
    """
    tally = tally_of_thread()
    if tally is not None:
        tally.pause()
        tally.has_ended = tally.is_over
        _OF_THREAD.tally = None if tally.is_over else tally
    _enable()


def stop_counting_allocations() -> Events:
    """Returns (seconds since the start, bytes allocated or, negative, released) in order."""
    found, tally = _disable(), tally_of_thread()
    if tally is not None:
        tally.events.extend(found)
        _enable()
    return [event for event in found if not _is_mark(event[1])]


def _enable() -> None:
    _enable_profiler_legacy(
        ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    )


def _disable() -> Events:
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


@dataclass
class Tally:
    """What this thread allocates on the CPU from `begin` to `end`, whatever runs in between.

    It has to end outside of a backward, where the thread's settings are those it began with. What
    is asked for up to a moment inside of one is asked for by a mark.

    Attributes:
        events: what was allocated and released, in order; complete once it ended.
        is_over: nothing that follows is asked for: whoever counts next may end it.
        has_ended: `events` is complete.
    """

    events: Events = field(default_factory=list)
    is_over: bool = False
    has_ended: bool = False

    def begin(self) -> None:
        """Begins to count, or goes on; one tally runs in a thread at a time."""
        _OF_THREAD.tally = self
        _enable()

    def pause(self) -> None:
        """Stops to count for a while."""
        _OF_THREAD.tally = None
        self.events.extend(_disable())

    def end(self) -> None:
        """Ends to count."""
        self.pause()
        self.has_ended = True

    def mark(self) -> int:
        """Returns the name of this moment: bytes that nothing else allocates at once."""
        size_bytes = next(_MARKS)
        torch.empty(size_bytes, dtype=torch.uint8)
        return size_bytes

    def peak_bytes(self, first: int | None, last: int) -> int:
        """The most that was held between two marks, above what was held at the first of them."""
        held = peak = 0
        is_within = first is None
        for _, change in self.events:
            if change == last:
                break
            if change == first:
                is_within = True
            elif is_within and not _is_mark(change):
                held += change
                peak = max(peak, held)
        return peak


# odd numbers of bytes, which no tensor of numbers has, of memory that is never touched
_FIRST_MARK = (1 << 20) + 1
_MARKS = itertools.cycle(range(_FIRST_MARK, _FIRST_MARK + 200_000, 2))
_OF_THREAD = threading.local()


def _is_mark(change: int) -> bool:
    return abs(change) % 2 == 1 and _FIRST_MARK <= abs(change) < _FIRST_MARK + 200_000


def tally_of_thread() -> Tally | None:
    """Returns the tally that runs in this thread."""
    return getattr(_OF_THREAD, "tally", None)


@contextmanager
def uncounted() -> Iterator[None]:
    """What runs inside is in no tally: capturing and planning belong to no step."""
    tally = tally_of_thread()
    if tally is None or is_in_backward():
        yield
        return
    tally.pause()
    try:
        yield
    finally:
        tally.begin()


def hold_stream(cycles: int = 2_000_000) -> None:
    """Keeps the current CUDA stream busy for about a millisecond (`torch.cuda._sleep`, 2.13)."""
    torch.cuda._sleep(cycles)
