"""How a call is timed and its workspace read on a GPU, which is made up here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from remat.tracers import replay


class Clock:
    """Stands for CUDA's events and stream: notes what happens, and says that 30 ms passed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.happened: list[str] = []
        self.events: list[Any] = []
        clock = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing
                self.name = ("start", "end")[len(clock.events)]
                clock.events.append(self)

            def record(self) -> None:
                clock.happened.append(f"{self.name} recorded")

            def synchronize(self) -> None:
                clock.happened.append(f"{self.name} reached")

            def elapsed_time(self, other: Event) -> float:
                clock.happened.append(f"{self.name} to {other.name}")
                return 30.0

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda _: self.happened.append("held"))

    def run(self) -> None:
        self.happened.append("run")


def test_ten_runs_are_queued_behind_a_kernel_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: one run between two events on an idle stream, which times Python's dispatch."""
    clock = Clock(monkeypatch)

    seconds = replay._seconds_cuda(clock.run)

    assert seconds == pytest.approx(0.003)  # 30 ms for ten
    assert clock.happened == [
        "held", "start recorded", *["run"] * 10, "end recorded", "end reached", "start to end",
    ]  # fmt: skip


class Memory:
    """Stands for CUDA's allocator while an operator runs.

    Each run holds 100 bytes and returns an output of 40. The first loads a library, which keeps
    1,000 bytes and holds 5,000 on the way.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held, self.peak, self.waiting = 7, 7, 0
        self.has_library = False
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", self.most)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: self.held)

    def run(self) -> Output:
        if not self.has_library:
            self.peak, self.held, self.has_library = self.held + 5000, self.held + 1000, True
        self.peak = max(self.peak, self.held + 140)
        self.waiting += 1
        return Output(self)

    def synchronize(self) -> None:
        self.waiting = 0

    def reset(self) -> None:
        assert self.waiting == 0, "the first run is not over"
        self.peak = self.held

    def most(self) -> int:
        assert self.waiting == 0, "the run is not over"
        return self.peak


class Output:
    """A result, whose 40 bytes are freed with it."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        memory.held += 40

    def __del__(self) -> None:
        self.memory.held -= 40


def test_workspace_on_a_gpu_is_what_a_second_run_holds_beside_its_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Naive: with the output, or with what a library allocates in its first call and keeps."""
    memory = Memory(monkeypatch)

    assert replay._workspace_cuda(memory.run) == 100
    assert memory.held == 1007
