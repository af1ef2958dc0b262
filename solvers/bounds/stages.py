"""What a refinement consists of: the backward's stages, known rows, its state, a model's result."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
        """Boundaries of the stages, without the forward; empty where there is no backward."""
        if not 0 < self.first < self.end:
            return []
        around = {boundary for v in self.singles for boundary in (v, v + 1)}
        return sorted({self.first, self.end, *self.cuts, *around})

    def __len__(self) -> int:
        """Returns the number of stages."""
        return max(0, len(self.boundaries) - 1)

    def with_single(self, operator: int) -> Self:
        """Returns these stages with an operator as a stage of its own."""
        return replace(self, singles=self.singles | {operator})

    def with_cut(self, operator: int) -> Self:
        """Returns these stages with a cut before an operator."""
        return replace(self, cuts=self.cuts | {operator})

    def without(self, operator: int, *, is_single: bool) -> Self:
        """Returns these stages without a stage of one operator, or without a cut."""
        if is_single:
            return replace(self, singles=self.singles - {operator})
        return replace(self, cuts=self.cuts - {operator})

    def cleared(self) -> Self:
        """Returns the backward as one stage."""
        return replace(self, singles=frozenset(), cuts=frozenset())

    def within(self, boundaries: Collection[int]) -> Self:
        """Returns only the cuts and stages of one operator whose boundaries are among these."""
        known = {*boundaries}
        return replace(
            self,
            singles=frozenset(v for v in self.singles if {v, v + 1} <= known),
            cuts=frozenset(v for v in self.cuts if v in known),
        )


@dataclass
class KnownRows:
    """Memory rows and moment sets that earlier models needed; the only state that accumulates.

    Attributes:
        rows: (window, operator) whose memory row was added.
        moments: (operator, operator) -> the sets that were added for it (`transient_rows`).
    """

    rows: set[tuple[Window, int]] = field(default_factory=set)
    moments: dict[tuple[int, int], set[int]] = field(default_factory=dict)

    def take(self, lazy: LazyRows) -> None:
        """Adds the rows and moments of a model."""
        self.take_rows(lazy)
        self.moments |= lazy.sets

    def take_rows(self, lazy: LazyRows) -> None:
        """Adds the rows of a model that did not start from the known moments."""
        self.rows |= lazy.rows

    def of(self, windows: Collection[Window]) -> list[tuple[Window, int]]:
        """Returns the rows of these windows."""
        return [row for row in self.rows if row[0] in windows]

    def copy(self) -> KnownRows:
        """Returns an independent copy."""
        return KnownRows(set(self.rows), {key: set(sets) for key, sets in self.moments.items()})


class State(Enum):
    """The state of a refinement."""

    OPEN = auto()  # the next model has the present stages
    EXACT = auto()  # as OPEN, but solved to a small gap: the schedule cost what the last model said
    CUT_SHORT = auto()  # a deadline ended the last model; it can be resumed
    DONE = auto()  # nothing is left to refine


@dataclass(frozen=True)
class Step:
    """The result of one model.

    Attributes:
        bound_s: no schedule of the fixed order costs less. With a cutoff it is at most the cutoff;
            without one it is `inf` where no schedule fits.
        steps: the schedule of its point, within the budget or not; None without a point.
        is_finished: False where a limit stopped the solver.
        kept: the values that the point keeps at each boundary of the backward.
    """

    bound_s: float
    steps: list[int] | None
    is_finished: bool
    kept: Mapping[int, Sequence[int]] = field(default_factory=dict)
