"""A budget, split into the plan's part and the parts kept free for other memory."""

from __future__ import annotations

from dataclasses import dataclass

from remat.core.budget import Budget, describe_bytes, format_bytes, is_percentage


@dataclass(frozen=True, slots=True)
class Room:
    """The budget of a training step, and the parts of it that the plan may not use.

    Attributes:
        asked: the budget as it was given; None for the memory that the GPU has.
        budget_bytes: the budget in bytes.
        keep_all_bytes: the peak of the step if everything is kept, with all parts below; a
            percentage refers to it.
        gradient_bytes: gradients accumulated in earlier micro-steps.
        reserve_bytes: what the user keeps free, mostly for the optimizer's state.
        bucket_bytes: the gradient buckets of `DistributedDataParallel`.
        gap_bytes: held by code between compiled pieces, or otherwise outside of the plan.
        library_bytes: the workspace that cuBLAS keeps on a GPU from its first matrix product on.
    """

    asked: Budget | None
    budget_bytes: int
    keep_all_bytes: int
    gradient_bytes: int = 0
    reserve_bytes: int = 0
    bucket_bytes: int = 0
    gap_bytes: int = 0
    library_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of the budget that the plan may not use."""
        return sum(self.held().values())

    @property
    def plan_bytes(self) -> int:
        """Bytes of the budget that are left for the plan."""
        return self.budget_bytes - self.held_bytes

    def budget_text(self) -> str:
        """Returns the budget as it was given, and in bytes.

        >>> Room("50%", 500, 1000).budget_text()
        '500 B (500 bytes), 50% of 1000 B'
        """
        size = describe_bytes(self.budget_bytes)
        if self.asked is None:
            return f"{size}, what the GPU had when the first step was planned"
        if not is_percentage(self.asked):
            return size
        return f"{size}, {str(self.asked).strip()} of {format_bytes(self.keep_all_bytes)}"

    def held(self) -> dict[str, int]:
        """Returns the bytes that are kept free, by name, without zeros.

        A negative size adds to the plan's part: fused kernels hold that much less than the plan.

        >>> Room(500, 500, 1000, gap_bytes=-100).held()
        {'saved by fused kernels': -100}
        """
        gap = "outside of the plan" if self.gap_bytes >= 0 else "saved by fused kernels"
        parts = {
            "accumulated gradients": self.gradient_bytes,
            "reserve": self.reserve_bytes,
            "DDP's buckets": self.bucket_bytes,
            gap: self.gap_bytes,
            "cuBLAS's workspace": self.library_bytes,
        }
        return {name: size_bytes for name, size_bytes in parts.items() if size_bytes}

    def held_text(self) -> str:
        """Returns `held` on one line.

        >>> Room(500, 500, 1000, gradient_bytes=100, reserve_bytes=20).held_text()
        'accumulated gradients 100 B (100 bytes), reserve 20 B (20 bytes)'
        """
        return ", ".join(f"{name} {describe_bytes(size)}" for name, size in self.held().items())
