"""Measures the peaks of a step on the current GPU, from the statistics of torch's allocator.

Its documentation names the keys of `torch.cuda.memory_stats` that are used here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from remat.core.cuda_peaks import CudaPeaks


@dataclass(frozen=True, slots=True)
class CudaMark:
    """What was held on the current GPU when a measurement began."""

    requested_bytes: int
    allocated_bytes: int

    @classmethod
    def now(cls) -> CudaMark:
        """Begins a measurement: resets the peaks, and releases cached memory that is unused."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        stats = torch.cuda.memory_stats()
        return cls(
            stats.get("requested_bytes.all.current", 0), stats.get("allocated_bytes.all.current", 0)
        )

    def peaks(self) -> CudaPeaks:
        """Returns the peaks since the measurement began, less what was held at that time."""
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        return CudaPeaks(
            stats.get("requested_bytes.all.peak", 0) - self.requested_bytes,
            stats.get("allocated_bytes.all.peak", 0) - self.allocated_bytes,
            stats.get("reserved_bytes.all.peak", 0) - self.allocated_bytes,
        )
