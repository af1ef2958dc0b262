"""Measures the peaks of a step on the current GPU, from the statistics of torch's allocator.

Its documentation names the keys of `torch.cuda.memory_stats` that are used here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from remat.core.cuda_peaks import CudaPeaks
from remat.run.cuda_graphs import refuse_first_steps
from remat.torch_border.cuda_allocator import Turn, expands_segments, reset_peaks


@dataclass(frozen=True, slots=True)
class CudaMark:
    """What was held on the current GPU when a measurement began, and is not part of it.

    Attributes:
        requested_bytes: the sizes of tensors.
        allocated_bytes: the allocator's blocks.
        turn: how long the peaks are those of this measurement.
    """

    requested_bytes: int
    allocated_bytes: int
    turn: Turn

    @classmethod
    def now(cls, owner: object = None, own: tuple[int, int] = (0, 0)) -> CudaMark:
        """Begins a measurement: resets the peaks, and releases cached memory that is unused.

        Args:
            owner: whose planned steps are measured, if any are.
            own: requested and allocated bytes that are held already, and are part of it.

        Raises:
            TraceError: a CUDA graph is captured, during which nothing can wait for the GPU.
        """
        refuse_first_steps()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        turn = reset_peaks(owner)
        requested_bytes, allocated_bytes = _held()
        return cls(requested_bytes - own[0], allocated_bytes - own[1], turn)

    def held(self) -> tuple[int, int]:
        """Returns the requested and allocated bytes that are held now and are part of it."""
        requested_bytes, allocated_bytes = _held()
        return requested_bytes - self.requested_bytes, allocated_bytes - self.allocated_bytes

    def peaks(self) -> CudaPeaks:
        """Returns the peaks since the measurement began, of what is part of it."""
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        return CudaPeaks(
            stats.get("requested_bytes.all.peak", 0) - self.requested_bytes,
            stats.get("allocated_bytes.all.peak", 0) - self.allocated_bytes,
            stats.get("reserved_bytes.all.peak", 0) - self.allocated_bytes,
        )


def of_step(peaks: CudaPeaks, resident_bytes: int) -> CudaPeaks:
    """Returns a step's peaks with what it holds throughout, and with the allocator's setting."""
    return replace(peaks.beside(resident_bytes), is_expandable=expands_segments())


def _held() -> tuple[int, int]:
    stats = torch.cuda.memory_stats()
    kinds = ("requested_bytes.all.current", "allocated_bytes.all.current")
    return stats.get(kinds[0], 0), stats.get(kinds[1], 0)
