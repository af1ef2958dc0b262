"""What torch's allocator would take from a GPU for a schedule: a model of its rules.

Source: `c10/cuda/CUDACachingAllocator.cpp` of PyTorch 2.11 to 2.13, with its default settings:
`round_size`, `get_pool`, `get_allocation_size`, `should_split`, `get_free_block`,
`try_merge_blocks`, and `try_allocate_expandable_block`.

Segments are what the allocator takes from the GPU, and blocks are their parts. A request takes the
smallest free block that is large enough, and the rest of that block stays free if it is large
enough for the pool. A block that is freed merges with free blocks beside it. Nothing is given back
to the GPU. With expandable segments, each pool is one segment that grows at its end.

The model leaves out several streams, garbage collection, and running out of memory, where the
allocator first gives back segments that are entirely free.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from remat.analysis.arena import Blocks
from remat.core.cuda_peaks import CudaPeaks
from remat.core.graph import Graph
from remat.core.schedule import Schedule

_MIB = 1 << 20
_GRAIN_BYTES = 512  # kMinBlockSize: all blocks are multiples of it
_SMALL_BYTES = _MIB  # kSmallSize: larger requests go to the pool of large blocks
_SMALL_SEGMENT_BYTES = 2 * _MIB  # kSmallBuffer
_LARGE_SEGMENT_BYTES = 20 * _MIB  # kLargeBuffer
_OWN_SEGMENT_BYTES = 10 * _MIB  # kMinLargeAlloc: from here on, a segment for one request
_SEGMENT_GRAIN_BYTES = 2 * _MIB  # kRoundLarge: the sizes of such segments are multiples of it


class Block(NamedTuple):
    """A part of a segment. Free blocks are ordered by size, then by place."""

    size_bytes: int
    segment: int
    start: int

    @property
    def end(self) -> int:
        """Where the next block begins."""
        return self.start + self.size_bytes


@dataclass(slots=True)
class Pool:
    """The segments of small or of large requests, and their free blocks.

    Attributes:
        is_small: whether requests are at most 1 MiB.
        is_expandable: whether there is one segment, which grows at its end.
        segments: the size of each segment in bytes.
    """

    is_small: bool
    is_expandable: bool
    segments: list[int] = field(default_factory=list)
    reserved_bytes: int = 0  # of all segments
    _free: list[Block] = field(default_factory=list)
    _starting: dict[tuple[int, int], Block] = field(default_factory=dict)
    _ending: dict[tuple[int, int], Block] = field(default_factory=dict)

    @property
    def free_blocks(self) -> tuple[Block, ...]:
        """The free blocks, the smallest first."""
        return tuple(self._free)

    def take(self, size_bytes: int) -> Block:
        """Returns a block for a request of whole grains, and keeps what it does not need."""
        place = bisect_left(self._free, (size_bytes,))
        if place < len(self._free) - 1 and self._grows(self._free[place]):
            place += 1  # a block that can grow counts as larger than any other
        block = self._free[place] if place < len(self._free) else self._grown(size_bytes)
        self._remove(block)

        rest_bytes = block.size_bytes - size_bytes
        is_split = (
            rest_bytes >= _GRAIN_BYTES
            if self.is_small or self.is_expandable
            else rest_bytes > _SMALL_BYTES
        )
        if not is_split:
            return block

        self._add(Block(rest_bytes, block.segment, block.start + size_bytes))
        return Block(size_bytes, block.segment, block.start)

    def give_back(self, block: Block) -> None:
        """Frees a block, merged with the free blocks beside it."""
        for beside in (
            self._ending.get((block.segment, block.start)),
            self._starting.get((block.segment, block.end)),
        ):
            if beside is not None:
                self._remove(beside)
                size_bytes = block.size_bytes + beside.size_bytes
                block = Block(size_bytes, block.segment, min(block.start, beside.start))
        self._add(block)

    def _grows(self, block: Block) -> bool:
        return self.is_expandable and block.end == self.segments[0]

    def _grown(self, size_bytes: int) -> Block:
        """Returns a free block of at least the size, in a new segment or at the end of the one."""
        if not self.is_expandable or not self.segments:
            self.segments.append(0)
        segment = len(self.segments) - 1
        end = self.segments[segment]
        tail = self._ending.get((segment, end))

        missing_bytes = size_bytes - (tail.size_bytes if tail else 0)
        more_bytes = self._segment_bytes(missing_bytes)
        self.segments[segment] += more_bytes
        self.reserved_bytes += more_bytes
        self.give_back(Block(self.segments[segment] - end, segment, end))
        return self._ending[segment, self.segments[segment]]

    def _segment_bytes(self, size_bytes: int) -> int:
        if self.is_small:
            least_bytes = grain_bytes = _SMALL_SEGMENT_BYTES
        elif self.is_expandable or size_bytes < _OWN_SEGMENT_BYTES:
            least_bytes = grain_bytes = _LARGE_SEGMENT_BYTES
        else:
            least_bytes, grain_bytes = size_bytes, _SEGMENT_GRAIN_BYTES
        return -(-max(size_bytes, least_bytes) // grain_bytes) * grain_bytes

    def _add(self, block: Block) -> None:
        insort(self._free, block)
        self._starting[block.segment, block.start] = block
        self._ending[block.segment, block.end] = block

    def _remove(self, block: Block) -> None:
        del self._free[bisect_left(self._free, block)]
        del self._starting[block.segment, block.start]
        del self._ending[block.segment, block.end]


class CudaAllocator:
    """Torch's caching allocator: gives blocks for requests, and counts them."""

    def __init__(self, *, is_expandable: bool = False) -> None:
        self.pools = tuple(Pool(is_small, is_expandable) for is_small in (True, False))
        self._requested = self._allocated = 0
        self._held: dict[int, tuple[Pool, Block, int]] = {}
        self._num_requests = 0
        self.peaks = CudaPeaks(0, 0, 0, is_expandable)

    @property
    def now(self) -> CudaPeaks:
        """The bytes that are requested, allocated and reserved now."""
        reserved = sum(pool.reserved_bytes for pool in self.pools)
        return CudaPeaks(self._requested, self._allocated, reserved)

    def allocate(self, size_bytes: int) -> int:
        """Allocates a request, and returns the number by which it is freed."""
        rounded = max(_GRAIN_BYTES, -(-size_bytes // _GRAIN_BYTES) * _GRAIN_BYTES)
        pool = self.pools[0 if rounded <= _SMALL_BYTES else 1]
        block = pool.take(rounded)

        self._num_requests += 1
        self._held[self._num_requests] = pool, block, size_bytes
        self._requested += size_bytes
        self._allocated += block.size_bytes
        self.peaks = self.peaks.most(self.now)
        return self._num_requests

    def free(self, request: int) -> None:
        """Frees a request."""
        pool, block, size_bytes = self._held.pop(request)
        pool.give_back(block)
        self._requested -= size_bytes
        self._allocated -= block.size_bytes


def expected_peaks(
    graph: Graph, schedule: Schedule, *, is_expandable: bool = False, num_steps: int = 3
) -> CudaPeaks:
    """Returns the most that steps of a schedule would take from a GPU with nothing else on it.

    Results are freed before the next step, as gradients are by `zero_grad`. Reserved bytes grow for
    a few steps, since the first one finds no free blocks.

    Complexity: O(B log B) a step for B blocks, if few are free at once.
    """
    allocator = CudaAllocator(is_expandable=is_expandable)
    for value in graph.values:
        if value.is_resident and value.size_bytes:
            allocator.allocate(value.size_bytes)

    blocks = Blocks.of(graph, schedule)
    moments = np.concatenate([2 * blocks.first, 2 * blocks.last + 1])
    events = np.argsort(moments, kind="stable").tolist()
    sizes = blocks.size_bytes.tolist()

    for _ in range(num_steps):
        held: dict[int, int] = {}
        for event in events:
            if event < len(sizes):
                held[event] = allocator.allocate(sizes[event])
            else:
                allocator.free(held.pop(event - len(sizes)))
    return allocator.peaks
