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
        self.is_expandable = self.is_recording = False
        self.history: list[dict[str, Any]] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Allocator:
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda name=name: self.calls.append(name))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.forget)
        monkeypatch.setattr(torch.cuda, "memory_stats", self.stats)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

        memory: Any = torch.cuda.memory
        monkeypatch.setattr(memory, "get_allocator_backend", lambda: "native")
        monkeypatch.setattr(memory, "_record_memory_history", self.record)
        monkeypatch.setattr(memory, "_snapshot", self.snapshot)
        is_on = "torch._C._cuda_isHistoryEnabled"
        monkeypatch.setattr(is_on, lambda: self.is_recording, raising=False)
        return self

    def record(self, enabled: str | None = "all", **_: Any) -> None:
        self.is_recording = enabled is not None
        if enabled is None:
            self.history.clear()

    def snapshot(self) -> dict[str, Any]:
        settings = {"expandable_segments": self.is_expandable}
        return {"device_traces": [list(self.history)], "allocator_settings": settings}

    def forget(self) -> None:
        self.peaks = dict(self.held)

    def change(self, **changes: int) -> None:
        for name, change in changes.items():
            self.held[name] += change
            self.peaks[name] = max(self.peaks[name], self.held[name])
        change = changes.get("requested", 0)
        if self.is_recording and change:
            action = "alloc" if change > 0 else "free_completed"
            event = {"action": action, "size": abs(change), "time_us": len(self.history)}
            self.history.append(event)

    def stats(self) -> dict[str, int]:
        return {f"{name}_bytes.all.current": held for name, held in self.held.items()} | {
            f"{name}_bytes.all.peak": peak for name, peak in self.peaks.items()
        }
