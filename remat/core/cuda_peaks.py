"""Peaks of memory on a GPU, as the tools of a user show them, of one step alone."""

from __future__ import annotations

import os
from dataclasses import dataclass

from remat.core.budget import format_bytes

_FRAGMENTED_SHARE = 0.05  # reserved above allocated, from which on another setting is worth a word


@dataclass(frozen=True, slots=True)
class CudaPeaks:
    """The most that a step held on a GPU, counted in three ways.

    Attributes:
        requested_bytes: what tensors asked for.
        allocated_bytes: the blocks they lie in, which are rounded, and some left whole: what
            `torch.cuda.max_memory_allocated()` shows.
        reserved_bytes: what torch's allocator took of the GPU for them: what
            `torch.cuda.max_memory_reserved()` shows, and `nvidia-smi` but for CUDA's own.
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int

    def beside(self, size_bytes: int) -> CudaPeaks:
        """The same with what was there before and belongs to the step."""
        return CudaPeaks(
            self.requested_bytes + size_bytes,
            self.allocated_bytes + size_bytes,
            self.reserved_bytes + size_bytes,
        )

    def text(self) -> str:
        """All three in a line.

        >>> CudaPeaks(1000, 1024, 4096).text()
        'requested 1000 B, allocated 1 KiB, reserved 4 KiB'
        """
        return (
            f"requested {format_bytes(self.requested_bytes)}, "
            f"allocated {format_bytes(self.allocated_bytes)}, "
            f"reserved {format_bytes(self.reserved_bytes)}"
        )

    def advice(self) -> str:
        """What to do where much is reserved that nothing lies in; empty where nothing is."""
        unused_bytes = self.reserved_bytes - self.allocated_bytes
        settings = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        is_set = any("expandable_segments:True" in os.environ.get(name, "") for name in settings)
        if is_set or unused_bytes <= _FRAGMENTED_SHARE * self.allocated_bytes:
            return ""
        return (
            f"{format_bytes(unused_bytes)} were reserved beyond what was allocated: set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before torch is imported"
        )
