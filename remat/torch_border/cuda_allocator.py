"""CUDA's allocator: whose peaks its statistics hold.

A GPU has one set of peaks, which every measurement reads and resets.
"""

from __future__ import annotations

import torch


class Turn:
    """A time in which one owner's planned steps run, and nobody else's.

    It ends when a planned step of another owner runs, or when other code of remat resets the peaks.
    Until then the peaks of CUDA's allocator are this owner's, with what runs outside of plans.
    """

    def __init__(self, owner: object) -> None:
        self.owner = owner

    @property
    def is_over(self) -> bool:
        """True once another turn began; it never becomes False again."""
        return _Now.turn is not self


class _Now:
    turn = Turn(None)


def turn_of(owner: object) -> Turn:
    """Notes that a planned step of `owner` runs, and returns the owner's turn."""
    if _Now.turn.owner is not owner:
        _Now.turn = Turn(owner)
    return _Now.turn


def reset_peaks(owner: object = None) -> Turn:
    """Resets the peaks of CUDA's allocator; ends the turn of any owner but this one."""
    torch.cuda.reset_peak_memory_stats()
    return turn_of(object() if owner is None else owner)
