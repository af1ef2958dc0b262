"""The peak of one step on a GPU, in the three ways that torch and `nvidia-smi` count it."""

from __future__ import annotations

from dataclasses import dataclass

from remat.core.budget import format_bytes

_FRAGMENTED_SHARE = 0.05  # of allocated bytes; `advice` reports a larger excess of reserved bytes


@dataclass(frozen=True, slots=True)
class CudaPeaks:
    """The most that a step held on a GPU, counted in three ways.

    Attributes:
        requested_bytes: the sizes of its tensors.
        allocated_bytes: the allocator's blocks that hold them, which are rounded up and sometimes
            larger than needed: `torch.cuda.max_memory_allocated()`.
        reserved_bytes: the memory that torch's allocator took from the GPU for these blocks:
            `torch.cuda.max_memory_reserved()`; `nvidia-smi` adds CUDA's own memory.
        is_expandable: whether the allocator used `expandable_segments`.
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    is_expandable: bool = False

    def most(self, other: CudaPeaks) -> CudaPeaks:
        """Returns the larger of both peaks, for each count."""
        return CudaPeaks(
            max(self.requested_bytes, other.requested_bytes),
            max(self.allocated_bytes, other.allocated_bytes),
            max(self.reserved_bytes, other.reserved_bytes),
            self.is_expandable or other.is_expandable,
        )

    def beside(self, size_bytes: int) -> CudaPeaks:
        """Returns the peaks plus bytes that were held before the step and belong to it."""
        return CudaPeaks(
            self.requested_bytes + size_bytes,
            self.allocated_bytes + size_bytes,
            self.reserved_bytes + size_bytes,
            self.is_expandable,
        )

    def text(self) -> str:
        """Returns all three on one line.

        >>> CudaPeaks(1000, 1024, 4096).text()
        'requested 1000 B, allocated 1 KiB, reserved 4 KiB'
        """
        return (
            f"requested {format_bytes(self.requested_bytes)}, "
            f"allocated {format_bytes(self.allocated_bytes)}, "
            f"reserved {format_bytes(self.reserved_bytes)}"
        )

    def advice(self) -> str:
        """Returns what to do if much memory is reserved but not allocated; otherwise empty."""
        unused_bytes = self.reserved_bytes - self.allocated_bytes
        if self.is_expandable or unused_bytes <= _FRAGMENTED_SHARE * self.allocated_bytes:
            return ""

        return (
            f"{format_bytes(unused_bytes)} more are reserved than allocated: set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before torch is imported"
        )
