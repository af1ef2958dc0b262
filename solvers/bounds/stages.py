"""Stages of the backward, frozen; the rows of earlier models; and where refining stands."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property
from typing import Self

from remat.solvers.bounds.lazy_rows import LazyRows
from remat.solvers.bounds.window import Window


@dataclass(frozen=True)
class Stages:
    """Where the backward is cut into stages.

    Attributes:
        first: the backward's first operator.
        end: the number of operators.
        singles: operators that are stages of their own.
        cuts: operators before which a stage ends.
    """

    first: int
    end: int
    singles: frozenset[int] = frozenset()
    cuts: frozenset[int] = frozenset()

    @cached_property
    def boundaries(self) -> list[int]:
        """Where stages begin and end, without the forward; empty where there is no backward."""
        if not 0 < self.first < self.end:
            return []
        around = {boundary for v in self.singles for boundary in (v, v + 1)}
        return sorted({self.first, self.end, *self.cuts, *around})

    def __len__(self) -> int:
        """How many stages there are."""
        return max(0, len(self.boundaries) - 1)

    def with_single(self, operator: int) -> Self:
        """The same with an operator as a stage of its own."""
        return replace(self, singles=self.singles | {operator})

    def with_cut(self, operator: int) -> Self:
        """The same with a cut before an operator."""
        return replace(self, cuts=self.cuts | {operator})

    def without(self, operator: int, *, is_single: bool) -> Self:
        """The same without a stage of one operator, or without a cut."""
        if is_single:
            return replace(self, singles=self.singles - {operator})
        return replace(self, cuts=self.cuts - {operator})

    def cleared(self) -> Self:
        """The backward as one stage."""
        return replace(self, singles=frozenset(), cuts=frozenset())

    def within(self, boundaries: Collection[int]) -> Self:
        """Only what ends at these boundaries."""
        known = {*boundaries}
        return replace(
            self,
            singles=frozenset(v for v in self.singles if {v, v + 1} <= known),
            cuts=frozenset(v for v in self.cuts if v in known),
        )


@dataclass
class KnownRows:
    """Memory rows and sets of moments that models needed: the one thing that accumulates.

    Attributes:
        rows: (window, operator) whose memory row was added.
        moments: (operator, operator) -> the sets that were added for it (`transient_rows`).
    """

    rows: set[tuple[Window, int]] = field(default_factory=set)
    moments: dict[tuple[int, int], set[int]] = field(default_factory=dict)

    def take(self, lazy: LazyRows) -> None:
        """Adds what a model has."""
        self.rows |= lazy.rows
        self.moments |= lazy.sets

    def of(self, windows: Collection[Window]) -> list[tuple[Window, int]]:
        """The rows of these windows."""
        return [row for row in self.rows if row[0] in windows]

    def copy(self) -> KnownRows:
        """The same, to be added to apart."""
        return KnownRows(set(self.rows), {key: set(sets) for key, sets in self.moments.items()})


class State(Enum):
    """Where refining stands."""

    OPEN = auto()  # the next model is over the present stages
    EXACT = auto()  # the same, and it is solved to the end: the schedule is as good as it says
    CUT_SHORT = auto()  # a deadline ended the last model; it may go on
    DONE = auto()  # nothing is left to refine
