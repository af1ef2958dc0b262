"""A budget, and what of it is kept free for things that a plan does not know."""

from __future__ import annotations

from dataclasses import dataclass

from remat.core.budget import Budget, describe_bytes, format_bytes, is_percentage


@dataclass(frozen=True, slots=True)
class Room:
    """The budget of a training step, and what of it is not the plan's.

    Attributes:
        asked: the budget as it was given; None for what the GPU has.
        budget_bytes: in bytes.
        keep_all_bytes: what the whole step needs where everything is kept, all of the below
            included: what a percentage is of.
        gradient_bytes: gradients of earlier micro-steps, which accumulate.
        reserve_bytes: what the user keeps free, for the optimizer's state first of all.
        bucket_bytes: what `DistributedDataParallel` keeps gradients in.
        gap_bytes: what runs between compiled pieces, or beside a plan otherwise.
        library_bytes: what cuBLAS keeps on a GPU from its first product on.
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
        """What is kept free of the budget."""
        return sum(self.held().values())

    @property
    def plan_bytes(self) -> int:
        """What is left for the plan."""
        return self.budget_bytes - self.held_bytes

    def budget_text(self) -> str:
        """The budget as it was given, and in bytes.

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
        """What is kept free, by name; what is not there is left out."""
        parts = {
            "accumulated gradients": self.gradient_bytes,
            "reserve": self.reserve_bytes,
            "DDP's buckets": self.bucket_bytes,
            "beside the plan": self.gap_bytes,
            "cuBLAS's workspace": self.library_bytes,
        }
        return {name: size_bytes for name, size_bytes in parts.items() if size_bytes}

    def held_text(self) -> str:
        """The same in a line.

        >>> Room(500, 500, 1000, gradient_bytes=100, reserve_bytes=20).held_text()
        'accumulated gradients 100 B (100 bytes), reserve 20 B (20 bytes)'
        """
        return ", ".join(f"{name} {describe_bytes(size)}" for name, size in self.held().items())
