"""CUDA's allocator: whose peaks its statistics hold; private names of `torch.cuda.memory`.

A GPU has one set of peaks, which every measurement reads and resets. Supported: torch 2.11 to 2.15;
each private name below was checked with the version beside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

_MOST_EVENTS = 1_000_000  # that a memory history of ours keeps


class Turn:
    """A time in which one owner's planned steps run, and nobody else's.

    It ends when a planned step of another owner runs, or when other code of remat resets the peaks.
    Until then the peaks of CUDA's allocator are this owner's, with what runs outside of plans.
    """

    def __init__(self, owner: object, gpu: int) -> None:
        self.owner, self.gpu = owner, gpu

    @property
    def is_over(self) -> bool:
        """True once another turn began; it never becomes False again."""
        return _TURNS.get(self.gpu) is not self


_TURNS: dict[int, Turn] = {}  # by GPU: each has its own statistics


def turn_of(owner: object) -> Turn:
    """Notes that a planned step of `owner` runs on the current GPU; returns the owner's turn."""
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    turn = _TURNS.get(gpu)
    if turn is None or turn.owner is not owner:
        turn = _TURNS[gpu] = Turn(owner, gpu)
    return turn


def reset_peaks(owner: object = None) -> Turn:
    """Resets the peaks of CUDA's allocator; ends the turn of any owner but this one."""
    torch.cuda.reset_peak_memory_stats()
    return turn_of(object() if owner is None else owner)


@contextmanager
def memory_history() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Records the current GPU's memory history inside of a `with` block.

    It yields a function that returns the events so far. If the user records a history already, its
    events are read, and it goes on (`_cuda_isHistoryEnabled`, `_record_memory_history`, 2.13). Once
    that history has reached its own limit, the earliest events are missing.
    """
    is_ours = not torch._C._cuda_isHistoryEnabled()
    record: Any = torch.cuda.memory._record_memory_history
    if is_ours:
        record(context=None, stacks="python", max_entries=_MOST_EVENTS)
    try:
        num_before = len(_history())
        yield lambda: _history()[num_before:]
    finally:
        if is_ours:
            record(enabled=None)


def expands_segments() -> bool:
    """True if the allocator uses `expandable_segments` now, from whichever setting (2.13)."""
    if torch.cuda.memory.get_allocator_backend() != "native":
        return False
    return bool(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])


def will_expand_segments() -> bool:
    """True if the environment asks for `expandable_segments`; no GPU is needed."""
    return any("expandable_segments:True" in os.environ.get(name, "") for name in _SETTINGS)


def _history() -> list[dict[str, Any]]:
    traces: list[list[dict[str, Any]]] = torch.cuda.memory._snapshot()["device_traces"]
    return traces[torch.cuda.current_device()]
