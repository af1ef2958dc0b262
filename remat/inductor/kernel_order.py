"""Kernels of a half in the order of its plan, and which loops may share one.

Inductor writes a half as loops, and fuses loops into kernels. Most loops are one operator of the
plan, with others inlined into it. A kernel runs at one place. So if fused loops are far apart in
the plan, one of them holds what it reads longer than planned, or writes its result earlier. Here
the bytes held at each kernel are known before any code is written. If they exceed a limit, each
loop to blame gets a maximum distance to the other loops of its kernel.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Kernel = Sequence[int]  # its loops
Span = tuple[int, int]  # the first and the last kernel at which a buffer exists


@dataclass(frozen=True)
class Loop:
    """A loop that Inductor may fuse with others into a kernel, or a library operator.

    Attributes:
        place: the place of its last operator in the plan's order.
        after: loops that must run before it.
        reads: buffers that it reads.
        writes: buffers that it writes, or writes a part of.
        is_fusible: whether it is a loop, whose code Inductor writes.
        overwrites: buffers whose memory a result of the same size may take, if this loop is the
            last to read them.
        workspace_bytes: held while it runs.
    """

    place: int
    after: frozenset[int]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    is_fusible: bool = True
    overwrites: frozenset[int] = frozenset()
    workspace_bytes: int = 0


class _Step(NamedTuple):
    held_bytes: int  # while a kernel runs
    new_bytes: int  # the part that the kernel allocates


@dataclass(frozen=True)
class Loops:
    """The loops of a half.

    Attributes:
        loops: in any order in which each buffer is written before it is read.
        size_bytes: the size of each buffer.
        inputs: buffers that exist at the beginning, and are freed after their last use.
        outputs: buffers that exist at the end.
    """

    loops: tuple[Loop, ...]
    size_bytes: tuple[int, ...]
    inputs: frozenset[int]
    outputs: frozenset[int]

    @property
    def alone(self) -> list[list[int]]:
        """Each loop as a kernel of its own."""
        return [[index] for index in range(len(self.loops))]

    def in_order(self, kernels: Sequence[Kernel]) -> list[Kernel]:
        """Returns the kernels in the order of their last loops' places; O(E log E).

        Raises:
            ValueError: two kernels need each other.
        """
        kernel_of = {loop: number for number, kernel in enumerate(kernels) for loop in kernel}
        before = [
            {kernel_of[other] for loop in kernel for other in self.loops[loop].after} - {number}
            for number, kernel in enumerate(kernels)
        ]
        users: list[list[int]] = [[] for _ in kernels]
        for number, others in enumerate(before):
            for other in others:
                users[other].append(number)

        waiting = [len(others) for others in before]
        ready = [(self._place(k), n) for n, k in enumerate(kernels) if not waiting[n]]
        heapq.heapify(ready)
        order = []
        while ready:
            _, number = heapq.heappop(ready)
            order.append(kernels[number])
            for user in users[number]:
                waiting[user] -= 1
                if not waiting[user]:
                    heapq.heappush(ready, (self._place(kernels[user]), user))

        if len(order) < len(kernels):
            raise ValueError("two kernels need each other")
        return order

    def _place(self, kernel: Kernel) -> int:
        return max(self.loops[loop].place for loop in kernel)

    def spans(self, order: Sequence[Kernel]) -> dict[int, Span]:
        """Returns the span of each buffer; a buffer that only its own kernel reads has none.

        An input that no kernel reads exists to the end.
        """
        first = dict.fromkeys(self.inputs, 0)
        read = {buffer for loop in self.loops for buffer in loop.reads}
        last = {buffer: 0 if buffer in read else len(order) - 1 for buffer in self.inputs}

        for time, kernel in enumerate(order):
            for loop in kernel:
                written = dict.fromkeys(self.loops[loop].writes, time)
                first = written | first
                last |= written

        for time, kernel in enumerate(order):
            for loop in kernel:
                for buffer in self.loops[loop].reads:
                    if buffer in last:
                        last[buffer] = max(last[buffer], time)
        last |= {buffer: len(order) - 1 for buffer in self.outputs if buffer in last}

        return {
            buffer: (first[buffer], last[buffer])
            for buffer in first
            if buffer in self.inputs | self.outputs
            or first[buffer] < last[buffer]
            or len(order[first[buffer]]) == 1
        }

    def bytes_at(self, order: Sequence[Kernel]) -> list[int]:
        """Returns the bytes while each kernel runs."""
        return [step.held_bytes for step in self._steps(order)]

    def launches(self, order: Sequence[Kernel], limit_bytes: int) -> list[list[Kernel]]:
        """Joins consecutive kernels, as long as they stay within a limit.

        Inductor writes such kernels as one function for a CPU: all of their buffers exist while
        that function runs.
        """
        found: list[list[Kernel]] = []
        together_bytes = 0
        for kernel, step in zip(order, self._steps(order), strict=True):
            together_bytes += step.new_bytes
            is_joined = (
                found
                and together_bytes <= limit_bytes
                and all(self.loops[loop].is_fusible for loop in (*kernel, *found[-1][-1]))
            )

            if is_joined:
                found[-1].append(kernel)
            else:
                found.append([kernel])
                together_bytes = step.held_bytes
        return found

    def bytes_together(self, launches: Sequence[Sequence[Kernel]]) -> list[int]:
        """Returns the bytes while each function runs: the buffers of all its kernels exist."""
        steps = self._steps([kernel for launch in launches for kernel in launch])
        of_launch = [[next(steps) for _ in launch] for launch in launches]
        return [
            first.held_bytes + sum(step.new_bytes for step in later) for first, *later in of_launch
        ]

    def _steps(self, order: Sequence[Kernel]) -> Iterator[_Step]:
        spans = self.spans(order)
        change = [0] * (len(order) + 1)
        for buffer, (first, last) in spans.items():
            change[first] += self.size_bytes[buffer]
            change[last + 1] -= self.size_bytes[buffer]

        held_bytes = 0
        for time, kernel in enumerate(order):
            written = {
                buffer
                for loop in kernel
                for buffer in self.loops[loop].writes
                if buffer in spans and spans[buffer][0] == time
            }
            overwritten_bytes = self._overwritten(time, kernel, spans)
            workspace_bytes = max(self.loops[loop].workspace_bytes for loop in kernel)

            held_bytes += change[time]
            yield _Step(
                held_bytes + workspace_bytes - overwritten_bytes,
                sum(self.size_bytes[b] for b in written) - overwritten_bytes,
            )

    def _overwritten(self, time: int, kernel: Kernel, spans: dict[int, Span]) -> int:
        """Returns the bytes of the kernel's results that are written over buffers it frees.

        Inductor does so if the kernel's other loops that read the buffer run before the loop.
        """
        total, taken = 0, set[int]()
        for index in kernel:
            loop = self.loops[index]
            later = set(kernel) - self._before(index, kernel) - {index}
            read_later = {b for other in later for b in self.loops[other].reads}

            for buffer in (b for b in loop.writes if b in spans):
                dying = (
                    other
                    for other in loop.overwrites - taken - self.outputs
                    if other in spans
                    and spans[other][0] < time == spans[other][1]
                    and other not in read_later
                    and self.size_bytes[other] == self.size_bytes[buffer]
                )

                overwritten = next(dying, None)
                if overwritten is not None:
                    taken.add(overwritten)
                    total += self.size_bytes[buffer]
        return total

    def _before(self, loop: int, kernel: Kernel) -> set[int]:
        """Returns the loops of a kernel that have to run before one of its loops."""
        found: set[int] = set()
        open_ = [loop]
        while open_:
            needed = self.loops[open_.pop()].after & set(kernel) - found
            found |= needed
            open_ += needed
        return found

    def to_blame(self, order: Sequence[Kernel], limit_bytes: int) -> dict[int, int]:
        """Returns the loops to blame where the limit is exceeded.

        They hold more than planned there. Each is mapped to its new maximum distance to the other
        loops of its kernel: half of the present one.
        """
        planned = self.in_order(self.alone)
        planned_spans = self.spans(planned)
        places = [self.loops[kernel[0]].place for kernel in planned]

        time_of = {loop: time for time, kernel in enumerate(order) for loop in kernel}
        fused = [loop for loop in time_of if len(order[time_of[loop]]) > 1]
        spans = self.spans(order)
        found = {}
        for time, size_bytes in enumerate(self.bytes_at(order)):
            if size_bytes <= limit_bytes:
                continue

            place = self._place(order[time])
            then = max(0, bisect_right(places, place) - 1)
            extra = {
                buffer
                for buffer, (first, last) in spans.items()
                if first <= time <= last and not _contains(planned_spans.get(buffer), then)
            }

            for loop in fused:
                is_late = time_of[loop] >= time and self.loops[loop].place <= place
                is_early = time_of[loop] <= time and self.loops[loop].place >= place
                if (is_late and not extra.isdisjoint(self.loops[loop].reads)) or (
                    is_early and not extra.isdisjoint(self.loops[loop].writes)
                ):
                    found[loop] = max(self._distances(loop, order[time_of[loop]])) // 2
        return found

    def _distances(self, loop: int, kernel: Kernel) -> Iterator[int]:
        return (abs(self.loops[other].place - self.loops[loop].place) for other in kernel)


def _contains(span: Span | None, time: int) -> bool:
    return span is not None and span[0] <= time <= span[1]
