"""Bounds near the least budget: window models over an even grid of the backward, with windows of every length above it.

Where a budget is tight, values are computed again all over the backward, and no few operators fail (`refinement`). So the backward is
cut into stages of equal length: 32, 16, 8, 4, 2 operators. Stages alone bound little: the linear relaxation computes half of a value
in one stage and half in the next, and holds half of it meanwhile. Windows of 2, 4, 8 ... stages, each length once from the
grid's start and once shifted by half a length, forbid that: whatever runs anywhere in a window counts once for its memory. Every
rung of the ladder is a linear program, and a relaxation of all schedules of the fixed order (`window`). The one that bounds
most is solved once more with integers, whose cuts at the root raise it further.

Where few operators fail, and on larger graphs, refined models bound more. Complexity: a rung of K stages has about 3 K windows of
O(V + E) rows each; rungs above `_MAX_COLUMNS` columns are not begun. Source: this package's own; the windows are those of a segment
tree, and the same shifted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

from ..graph import Graph
from .lazy_rows import LazyRows
from .on_demand import forward_length
from .window import Window, WindowModel

_FIRST_STAGES = 6  # at least, where the backward is long enough
_LEAST_OPERATORS = 2  # of a stage
_MAX_COLUMNS = 9_000
MOST_FORWARD = 250  # operators
_MAX_NODES = 20


@dataclass
class Hierarchy:
    """The ladder of one graph under one budget.

    Attributes:
        graph: any graph.
        budget_bytes: resident bytes included.
        first: where the backward begins.
        length: operators of a stage, on the next rung.
        is_integer: True where the next model is the best rung once more, with integers.
        is_over: True where no model is left, or none of a reasonable size.
    """

    graph: Graph
    budget_bytes: int
    first: int = field(init=False)
    length: int = field(init=False)
    is_integer: bool = field(default=False, init=False)
    is_over: bool = field(default=False, init=False)
    _best: tuple[float, int] = field(default=(-math.inf, 0), init=False)  # of the best rung: its bound, and the length of its stages

    def __post_init__(self) -> None:
        self.first = forward_length(self.graph)
        backward, self.length = self.graph.num_operators - self.first, _LEAST_OPERATORS
        while 2 * self.length * _FIRST_STAGES <= backward:
            self.length *= 2
        self.is_over = not 0 < self.first <= MOST_FORWARD or backward < 2 * _LEAST_OPERATORS

    @property
    def best_s(self) -> float:
        """The best bound by linear programs so far."""
        return self._best[0]

    def windows(self, length: int) -> tuple[list[Window], set[Window]]:
        """Returns the stages of `length` operators, and the windows of all lengths with them."""
        boundaries = [*range(self.first, self.graph.num_operators - _LEAST_OPERATORS + 1, length), self.graph.num_operators]
        stages, num_stages = list(pairwise(boundaries)), len(boundaries) - 1
        windows, width = {*stages, (boundaries[0], boundaries[-1])}, 2
        while width < num_stages:
            for begin in range(0, num_stages, width // 2):
                windows.add((boundaries[begin], boundaries[min(begin + width, num_stages)]))
            width *= 2
        return stages, windows

    def solve(self, *, deadline: float, cutoff_s: float | None = None) -> float:
        """Returns a lower bound on the cost of every schedule of the fixed order, from the next model; -inf where it has none.

        Args:
            deadline: of `time.perf_counter`, in seconds.
            cutoff_s: a schedule of this cost is known; cheaper ones alone are of interest.
        """
        forward, (stages, windows) = (0, self.first), self.windows(self._best[1] if self.is_integer else self.length)
        model = WindowModel(self.graph, sorted({forward, *windows}), priced=[forward, *stages], budget_bytes=self.budget_bytes)
        model.program.starts_from_last = True
        cutoff = None if cutoff_s is None else model.objective(cutoff_s)
        outcome = LazyRows(model).solve(deadline=deadline, is_relaxed=not self.is_integer, node_limit=_MAX_NODES, cutoff=cutoff)
        bound_s = model.bound_s(outcome)
        if self.is_integer:
            self.is_over = True
        else:
            self._climb(bound_s, model.program.num_columns / len(windows), is_finished=outcome.is_finished)
        return bound_s

    def _climb(self, bound_s: float, columns_a_window: float, *, is_finished: bool) -> None:
        """Prepares the model after a rung: the next one, where this was solved and that is not too large, then integers."""
        if is_finished:
            self._best = max(self._best, (bound_s, self.length))
        self.length //= 2
        is_last = self.length < _LEAST_OPERATORS or len(self.windows(self.length)[1]) * columns_a_window > _MAX_COLUMNS
        self.is_integer = is_last or not is_finished
        self.is_over = bound_s == math.inf or (self.is_integer and self._best[1] == 0)
