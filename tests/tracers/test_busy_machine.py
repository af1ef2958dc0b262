"""Times of single calls on a machine that is busy with other programs."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from remat.tracers import profiled
from remat.tracers.cache import DiskCache
from remat.tracers.calls import Call, TensorSpec
from remat.tracers.profiled import Profile
from remat.tracers.timing import Run, Timing, timed, waited_s


def timing_of(runs: Sequence[tuple[float, float]]) -> Timing:
    """Times runs that take and wait for the given seconds; the last one is repeated."""
    coming, waiting_s = list(runs), 0.0

    def clock(_: Run) -> float:
        nonlocal waiting_s
        took_s, more_s = coming.pop(0) if len(coming) > 1 else coming[0]
        waiting_s += more_s
        return took_s

    return timed(lambda: None, clock, 0.001, lambda: waiting_s)


def test_runs_that_waited_for_a_processor_do_not_count() -> None:
    """Naive: the median of all runs, which on a busy machine are the scheduler's turns."""
    waiting = (0.008, 0.0075)
    assert timing_of([waiting] * 6 + [(0.0003, 1e-5)]) == Timing(0.0003, is_disturbed=False)


def test_a_short_wait_in_a_long_run_counts_as_none() -> None:
    assert timing_of([(0.5, 0.004)]) == Timing(0.5, is_disturbed=False)


def test_the_shortest_run_is_taken_where_all_waited() -> None:
    assert timing_of([(0.012, 0.01), (0.008, 0.007), (0.02, 0.02)]) == Timing(
        0.008, is_disturbed=True
    )


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux's sched-stats")
def test_waiting_for_a_processor_is_seen() -> None:
    cores = os.sched_getaffinity(0)
    one = {min(cores)}
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(spinning.pid, one)
        os.sched_setaffinity(0, one)
        before_s, end = waited_s(), time.perf_counter() + 0.5
        while time.perf_counter() < end:
            pass
        assert waited_s() - before_s > 0.05
    finally:
        os.sched_setaffinity(0, cores)
        spinning.kill()
        spinning.wait()


def test_times_of_a_busy_machine_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Naive: the next process plans with costs that were wrong once."""
    monkeypatch.setattr(profiled, "timing_of", lambda *_: Timing(0.02, is_disturbed=True))
    monkeypatch.setattr(profiled, "workspace_of", lambda *_: 8)
    path = tmp_path / "costs.json"
    calls = [
        Call(torch.ops.aten.sin.default, (spec,), (), (spec,))
        for spec in (TensorSpec((8,), (1,), torch.float32), TensorSpec((9,), (1,), torch.float32))
    ]

    with caplog.at_level(logging.WARNING):
        busy = Profile("cpu", store=DiskCache(path))
        assert [busy.cost_of(call).cost_s for call in calls * 2] == [0.02] * 4
        busy.store.flush()
    assert caplog.text.count("kept the processor busy") == 1
    assert not path.exists()
