"""How long something takes, on machines that are busy with other programs too."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

Run = Callable[[], Any]
Clock = Callable[[Run], float]  # seconds of a run

_FEWEST, _MOST = 3, 25  # runs that are timed
# the longest that threads may wait for a processor while a run counts: seconds, share of the run.
# A scheduler's turn is at least 0.7 ms long; waking a thread up takes some microseconds
_LONGEST_WAIT_S, _LONGEST_WAIT = 2e-4, 0.1
_PATIENCE = 3  # budgets of time to look for runs without waiting in


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a run, and whether other programs kept its threads waiting meanwhile."""

    seconds: float
    is_disturbed: bool


def timed_on_cpu(run: Run, budget_s: float) -> Timing:
    """Returns the median time of 3 to 25 runs within about `budget_s` seconds.

    If threads waited for a processor meanwhile, only runs without waiting count. On a busy machine
    an operator of two threads takes as long as the scheduler's turns, even a hundred times its own
    time. If hardly any run counts, runs on one thread are timed instead.
    """
    # asking between the runs would empty the processor's caches, and tiny ones take 10 us longer
    before_s, start = waited_s(), time.perf_counter()
    found = timed(run, seconds_of, budget_s)
    if _is_calm(waited_s() - before_s, time.perf_counter() - start):
        return found

    found = timed(run, seconds_of, budget_s, waited_s)
    if not found.is_disturbed or (threads := torch.get_num_threads()) == 1:
        return found

    torch.set_num_threads(1)
    try:
        return replace(timed(run, seconds_of, budget_s, waited_s), is_disturbed=True)
    finally:
        torch.set_num_threads(threads)


def timed(
    run: Run, clock: Clock, budget_s: float, waiting: Callable[[], float] = lambda: 0.0
) -> Timing:
    """Returns the median of the runs without waiting, or the shortest run if they are too few.

    `waiting` returns seconds that threads have waited so far.
    """
    times: list[float] = []
    calm: list[float] = []
    start = time.perf_counter()

    while True:
        before_s = waiting()
        times.append(clock(run))
        if _is_calm(waiting() - before_s, times[-1]):
            calm.append(times[-1])

        spent_s = time.perf_counter() - start
        if len(calm) >= _FEWEST and (len(calm) >= _MOST or spent_s >= budget_s):
            return Timing(statistics.median(calm), is_disturbed=False)
        if len(times) >= _FEWEST and spent_s >= _PATIENCE * budget_s:
            return Timing(min(times), is_disturbed=True)


def _is_calm(waiting_s: float, took_s: float) -> bool:
    return waiting_s <= max(_LONGEST_WAIT_S, _LONGEST_WAIT * took_s)


def seconds_of(run: Run) -> float:
    """Returns the seconds of one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def waited_s() -> float:
    """Returns for how long this process's threads were ready to run without a processor.

    It is the second number of `/proc/self/task/*/schedstat`, in nanoseconds (Linux's
    `sched-stats`); elsewhere the result is always 0.
    """
    waited_ns = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, IndexError, ValueError):  # a thread that ended
            waited_ns += int(path.read_text().split()[1])
    return waited_ns / 1e9
