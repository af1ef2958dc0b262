"""Schedules, and the simulator of their peak and cost.

The rules, which `validate` implements a second time:

- A schedule is a sequence of steps; each computes one operator. First computations come in the
  graph's order; an operator may be recomputed unless it is pinned.
- A value is in memory from the step that computes it to the last step that reads it before it is
  recomputed. A read takes the latest computation. The graph's outputs stay to the end. Resident
  values are always in memory.
- While a step runs, its workspace and everything it reads and writes are in memory. An operator
  that may work in place takes over the memory of an input that nothing reads afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from remat.core import limits, serialize
from remat.core.arrays import Arrays
from remat.core.errors import ScheduleError
from remat.core.graph import FORMAT_VERSION, Graph
from remat.core.limits import shown


@dataclass(frozen=True)
class Schedule:
    """A sequence of computations.

    Attributes:
        steps: indices of operators; each occurrence is one computation.
        num_forward_steps: how many of the steps belong to the forward pass.
    """

    steps: tuple[int, ...]
    num_forward_steps: int
    version: int = field(default=FORMAT_VERSION)

    def __post_init__(self) -> None:
        if self.version != FORMAT_VERSION:
            raise ScheduleError(
                f"this schedule has format version {shown(self.version)}; this remat reads version "
                f"{FORMAT_VERSION}"
            )

        if fault := limits.indices_fault(self.steps):
            raise ScheduleError(f"a schedule names the operator {fault}")
        if not 0 <= self.num_forward_steps <= len(self.steps):
            raise ScheduleError(
                f"{shown(self.num_forward_steps)} forward steps were given, of "
                f"{len(self.steps)} steps in all"
            )

    @classmethod
    def keep_all(cls, graph: Graph) -> Schedule:
        """Returns the schedule that computes everything once and keeps it."""
        return cls(tuple(range(graph.num_operators)), graph.num_forward)

    @classmethod
    def from_steps(cls, graph: Graph, steps: tuple[int, ...] | list[int]) -> Schedule:
        """Returns the schedule of `steps`; its forward ends before the first backward operator."""
        is_backward = graph.arrays.is_backward
        boundary = next((i for i, op in enumerate(steps) if is_backward[op]), len(steps))
        return cls(tuple(map(int, steps)), boundary)

    @cached_property
    def array(self) -> NDArray[np.int64]:
        """The steps as an array."""
        return np.array(self.steps, np.int64)

    @property
    def num_recomputations(self) -> int:
        """How many steps compute an operator that was computed before."""
        return len(self.steps) - len(set(self.steps))

    def save(self, path: str | Path) -> None:
        """Writes the schedule as JSON, whole or not at all."""
        serialize.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Schedule:
        """Reads a schedule that `save` wrote, or raises `ScheduleError` with one line."""
        return serialize.load(cls, path, ScheduleError)


@dataclass(frozen=True)
class Simulation:
    """The memory and cost of a schedule.

    Attributes:
        bytes_at: memory while each step runs, resident values included; shape (num_steps,).
        peak_bytes: the largest of `bytes_at`, and at least the resident bytes.
        peak_step: the first step with the largest `bytes_at`; -1 if there are no steps.
        cost_s: the sum of the costs of all steps.
    """

    bytes_at: NDArray[np.int64]
    peak_bytes: int
    peak_step: int
    cost_s: float


class Lifetimes(NamedTuple):
    """One entry per computation of a value: the value, its first and its last step in memory.

    Shape (num_instances,).
    """

    value: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]


def simulate(graph: Graph, schedule: Schedule) -> Simulation:
    """Returns the bytes at every step, the peak and its step, and the cost.

    Complexity: O(E log S) for S steps with E reads in all; a few milliseconds for 10,000 operators.

    Raises:
        ScheduleError: a step reads a value that was never computed, or names no operator.
    """
    steps = schedule.array
    if len(steps) == 0:
        return Simulation(np.zeros(0, np.int64), graph.resident_bytes, -1, 0.0)

    arrays = graph.arrays
    lives = lifetimes(graph, steps)
    size = effective_sizes(arrays, steps)
    weight = size[lives.value].astype(np.float64)  # exact below 2**53 bytes

    count = len(steps)
    change = np.bincount(lives.first, weight, count + 2) - np.bincount(
        lives.last + 1, weight, count + 2
    )
    bytes_at = (
        np.cumsum(change[:count]).astype(np.int64)
        + graph.resident_bytes
        + arrays.workspace_bytes[steps]
    )
    bytes_at -= _reused_bytes(arrays, steps, lives, size)

    peak_step = int(np.argmax(bytes_at))
    cost_s = float(np.dot(np.bincount(steps, minlength=graph.num_operators), arrays.cost_s))
    return Simulation(
        bytes_at, max(int(bytes_at[peak_step]), graph.resident_bytes), peak_step, cost_s
    )


def keep_all_peak(graph: Graph) -> int:
    """Returns the peak in bytes of keeping everything; O(V + E)."""
    return simulate(graph, Schedule.keep_all(graph)).peak_bytes


def lifetimes(graph: Graph, steps: NDArray[np.int64]) -> Lifetimes:
    """Returns the first and the last step that each computation of a value is in memory.

    Entries are ordered by step, then as in the operator's writes. `last` is the last read before
    the value is recomputed, the step itself if nothing reads it, and `len(steps)` for the last
    computation of an output.

    Raises:
        ScheduleError: a step reads a value that was never computed, or names no operator.
    """
    arrays = graph.arrays
    if len(steps) and not (0 <= steps.min() and steps.max() < graph.num_operators):
        raise ScheduleError(f"the schedule names an operator outside 0..{graph.num_operators - 1}")

    value, first, slot_of_step = _gather(arrays.write_start, arrays.write, steps)
    last = first.copy()
    read, position, _ = _gather(arrays.read_start, arrays.read, steps)
    computed_at = _latest_before(arrays.producer[read], position, steps)
    if len(computed_at) and computed_at.min() < 0:
        _raise_unread(graph, steps, read, position, computed_at)
    # positions ascend, so the last read of each computation is the one that is kept
    last[slot_of_step[computed_at] + arrays.write_rank[read]] = position

    if len(arrays.output):
        end = np.full(len(arrays.output), len(steps))
        final = _latest_before(arrays.producer[arrays.output], end, steps)
        if final.min() < 0:
            missing = graph.values[int(arrays.output[int(np.argmin(final))])].name
            raise ScheduleError(f"the output {missing!r} is never computed")
        last[slot_of_step[final] + arrays.write_rank[arrays.output]] = len(steps)

    return Lifetimes(value, first, last)


def _raise_unread(
    graph: Graph,
    steps: NDArray[np.int64],
    read: NDArray[np.int64],
    position: NDArray[np.int64],
    computed_at: NDArray[np.int64],
) -> None:
    first = int(np.argmax(computed_at < 0))
    step = int(position[first])
    reader, value = graph.operators[int(steps[step])].name, graph.values[int(read[first])].name
    raise ScheduleError(
        f"step {step} computes {reader!r}, which reads {value!r} before it was ever computed"
    )


def _gather(
    start: NDArray[np.int64], items: NDArray[np.int64], steps: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns all steps' items in order, the step of each, and where each step's items start."""
    counts = start[steps + 1] - start[steps]
    begin = np.zeros(len(steps), np.int64)
    np.cumsum(counts[:-1], out=begin[1:])
    position = np.repeat(np.arange(len(steps)), counts)
    index = np.arange(len(position)) - begin[position] + start[steps][position]
    return items[index], position, begin


def _latest_before(
    operator: NDArray[np.int64], position: NDArray[np.int64], steps: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Returns for each pair the last step before `position` that computes `operator`, or -1."""
    count = len(steps)
    order = np.argsort(steps, kind="stable")
    keys = steps[order] * (count + 1) + order
    found = np.searchsorted(keys, operator * (count + 1) + position) - 1
    latest = order[np.maximum(found, 0)]
    return np.where((found >= 0) & (steps[latest] == operator), latest, -1)


def effective_sizes(arrays: Arrays, steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the sizes of values, 0 for snapshots that no recomputed operator reads."""
    if not arrays.is_snapshot.any():
        return arrays.size_bytes
    is_repeated = np.bincount(steps, minlength=len(arrays.cost_s)) > 1
    counts = np.diff(arrays.read_start)
    is_needed = np.zeros(len(arrays.size_bytes), np.bool_)
    is_needed[arrays.read[np.repeat(is_repeated, counts)]] = True
    of_snapshot = (arrays.producer >= 0) & arrays.is_snapshot[np.maximum(arrays.producer, 0)]
    return np.where(of_snapshot & ~is_needed, 0, arrays.size_bytes)


def _reused_bytes(
    arrays: Arrays, steps: NDArray[np.int64], lives: Lifetimes, size: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Returns the bytes that each step saves by working in place.

    An operator takes over at most one value: the largest candidate that is freed after the step.
    """
    saved = np.zeros(len(steps), np.int64)
    candidate, position, _ = _gather(arrays.reuse_start, arrays.reuse, steps)
    if len(candidate) == 0:
        return saved

    dying = np.unique(lives.value * (len(steps) + 1) + lives.last)
    keys = candidate * (len(steps) + 1) + position
    is_dying = dying[np.minimum(np.searchsorted(dying, keys), len(dying) - 1)] == keys
    np.maximum.at(saved, position[is_dying], size[candidate[is_dying]])
    return saved
