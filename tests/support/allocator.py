"""A fake allocator of a GPU, for tests without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch


class Allocator:
    """Counts requested, allocated and reserved bytes, as `torch.cuda.memory_stats` does."""

    def __init__(self, **held: int) -> None:
        self.held = {"requested": 0, "allocated": 0, "reserved": 0, **held}
        self.peaks = dict(self.held)
        self.calls: list[str] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Allocator:
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda name=name: self.calls.append(name))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.forget)
        monkeypatch.setattr(torch.cuda, "memory_stats", self.stats)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

        memory: Any = torch.cuda.memory
        monkeypatch.setattr(memory, "_record_memory_history", lambda *_, **__: None)
        monkeypatch.setattr(memory, "_snapshot", lambda: {"device_traces": [[]]})
        return self

    def forget(self) -> None:
        self.peaks = dict(self.held)

    def change(self, **changes: int) -> None:
        for name, change in changes.items():
            self.held[name] += change
            self.peaks[name] = max(self.peaks[name], self.held[name])

    def stats(self) -> dict[str, int]:
        return {f"{name}_bytes.all.current": held for name, held in self.held.items()} | {
            f"{name}_bytes.all.peak": peak for name, peak in self.peaks.items()
        }
