"""Memory at every step by category: parameters, saved, recomputed, gradients, workspace.

>>> from remat.core.graph import Graph
>>> from remat.core.schedule import Schedule
>>> graph = Graph.from_arrays([1, 1, 2], [8, 8, 4], [(0, 1), (1, 2)], first_backward=2)
>>> parts = Composition.of(graph, Schedule.keep_all(graph))
>>> parts.at(1)[Category.SAVED], parts.at(1)[Category.TEMPORARY]
(8, 8)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from remat.core.graph import Graph
from remat.core.operators import Phase, ValueKind
from remat.core.schedule import Schedule, effective_sizes, lifetimes, simulate

Ints = NDArray[np.int64]


class Category(StrEnum):
    """What memory is held for, in the order in which charts stack it, from the bottom."""

    PARAMETERS = "parameters"
    INPUTS = "buffers and inputs"
    SAVED = "saved for the backward"
    RECOMPUTED = "computed again"
    TEMPORARY = "short-lived, forward"
    PARAMETER_GRADIENTS = "gradients returned"
    GRADIENTS = "intermediate gradients"
    WORKSPACE = "workspace of operators"


class Held(NamedTuple):
    """A value in memory.

    Attributes:
        value: its index in the graph.
        category: what it is held for.
        first: the step that computed it.
        last: the last step during which it is in memory.
    """

    value: int
    category: Category
    first: int
    last: int


@dataclass(frozen=True)
class Composition:
    """Memory of a schedule by category.

    Attributes:
        graph: the step.
        bytes_of: bytes of each category at each step; shape (num_categories, num_steps), in the
            order of `Category`. The columns sum to the simulator's `bytes_at`.
        value, first, last, category: one entry per computation of a value, as in `Lifetimes`; shape
            (num_instances,). `category` is an index into `Category`.
    """

    graph: Graph
    bytes_of: Ints
    value: Ints
    first: Ints
    last: Ints
    category: Ints

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule) -> Composition:
        """Returns the memory of `schedule` by category; O(E log S) for E reads and S steps.

        Raises:
            ScheduleError: the schedule does not fit the graph.
        """
        steps, order = schedule.array, list(Category)
        value, first, last = lifetimes(graph, steps)
        category = _categories(graph, schedule, value, first, last)
        size = effective_sizes(graph.arrays, steps)[value]

        bytes_of = np.zeros((len(order), len(steps)), np.int64)
        for index in range(len(order)):
            mine = category == index
            bytes_of[index] = _over_time(first[mine], last[mine], size[mine], len(steps))

        for kind, place in (
            (ValueKind.PARAMETER, Category.PARAMETERS),
            (ValueKind.BUFFER, Category.INPUTS),
            (ValueKind.INPUT, Category.INPUTS),
        ):
            bytes_of[order.index(place)] += sum(
                v.size_bytes for v in graph.values if v.kind is kind
            )
        bytes_of[order.index(Category.WORKSPACE)] += graph.arrays.workspace_bytes[steps]

        parts = cls(graph, bytes_of, value, first, last, category)
        parts._take_over(schedule)
        return parts

    def _take_over(self, schedule: Schedule) -> None:
        """Subtracts the bytes that a step saves by working in place.

        They come off the category of the value whose memory is taken over.
        """
        saved = self.bytes_of.sum(0) - simulate(self.graph, schedule).bytes_at
        for step in np.flatnonzero(saved).tolist():
            candidates = self.graph.operators[schedule.steps[step]].reuses
            dying = (self.last == step) & np.isin(self.value, candidates)

            taken = next(
                i
                for i in np.flatnonzero(dying)
                if self.graph.values[self.value[i]].size_bytes == saved[step]
            )
            self.bytes_of[self.category[taken], step] -= saved[step]

    def at(self, step: int) -> dict[Category, int]:
        """Returns the bytes of each category while a step runs."""
        return {
            category: int(size)
            for category, size in zip(Category, self.bytes_of[:, step], strict=True)
        }

    def held_at(self, step: int) -> list[Held]:
        """Returns the values in memory while a step runs, largest first, without resident ones."""
        is_held = (self.first <= step) & (step <= self.last)
        order = list(Category)
        held = [
            Held(int(self.value[i]), order[self.category[i]], int(self.first[i]), int(self.last[i]))
            for i in np.flatnonzero(is_held)
        ]
        return sorted(held, key=lambda h: -self.graph.values[h.value].size_bytes)


def _over_time(first: Ints, last: Ints, size: Ints, num_steps: int) -> Ints:
    # exact below 2**53 bytes
    change = np.bincount(first, size, num_steps + 2) - np.bincount(last + 1, size, num_steps + 2)
    return np.cumsum(change[:num_steps]).astype(np.int64)


def _categories(graph: Graph, schedule: Schedule, value: Ints, first: Ints, last: Ints) -> Ints:
    order, steps = list(Category), schedule.array
    operator = steps[first]
    earliest = np.full(graph.num_operators, len(steps))
    np.minimum.at(earliest, steps, np.arange(len(steps)))

    is_output = np.zeros(len(graph.values), np.bool_)
    is_output[graph.arrays.output] = True
    is_backward = np.array([op.phase is Phase.BACKWARD for op in graph.operators], np.bool_)[
        operator
    ]

    cases = [
        (is_backward & is_output[value], Category.PARAMETER_GRADIENTS),
        (is_backward, Category.GRADIENTS),
        (first > earliest[operator], Category.RECOMPUTED),
        (last >= schedule.num_forward_steps, Category.SAVED),
    ]

    places = [np.int64(order.index(category)) for _, category in cases]
    return np.select([case for case, _ in cases], places, np.int64(order.index(Category.TEMPORARY)))
