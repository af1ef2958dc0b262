"""PyTorch's `activation_memory_budget`: a knapsack over saved bytes.

Other names: the min-cut partitioner with a memory budget,
`torch._functorch.config.activation_memory_budget`.
Source: PyTorch 2.13, `torch/_functorch/partitioners.py` (`choose_saved_values_set`) and
`torch/_functorch/_activation_checkpointing/knapsack.py` (`dp_knapsack`, `ilp_knapsack`),
reimplemented on arrays.
Optimal: as a knapsack, up to the quantization of sizes to 1/10,000 of all saved bytes (`dp`) or
exactly (`ilp`); never proved for the training step.
Complexity: `dp` O(10,000 n) once for all fractions; `ilp` one integer program per fraction.
Imperfections: the budget is a fraction of the saved bytes and ignores the step's peak, parameters,
gradients and the memory of recomputing; a value counts its own operator's cost, though recomputing
it can need its ancestors too. PyTorch also runs its min-cut again on the values that the knapsack
does not save, and never saves what Inductor fuses; neither is done here.

A budget in bytes is met as a user would meet it: fractions are tried from 1 downwards, then
bisected, and the cheapest schedule whose simulated peak fits is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray

from remat.core.errors import SolverError
from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution
from remat.solvers.baselines.segment_family import cheapest_that_fits, forward_operators
from remat.solvers.core.base import Solver
from remat.solvers.core.on_demand import forward_length, steps_on_demand, values_always_kept
from remat.solvers.lp.linear import Program

_QUANTA = 10_000  # `S` of `dp_knapsack`
_NUM_FRACTIONS = 32  # tried besides 0, evenly spread; a round number, not measured
_NUM_BISECTIONS = 5  # down to a thousandth of the saved bytes

Knapsack = Callable[[float], Collection[int]]
"""Maps a fraction of all bytes to the items to save."""


@final
@dataclass(frozen=True)
class PyTorchKnapsack(Solver):
    """Saves the forward values that cost most to recompute, within a share of their bytes.

    Attributes:
        method: `dp`, PyTorch's default solver, or `ilp`.
        time_limit_s: of each integer program; a round number, not measured.
    """

    method: Literal["dp", "ilp"] = "dp"
    time_limit_s: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method not in ("dp", "ilp"):
            raise ValueError(f"method={self.method!r} was given; give 'dp' or 'ilp'")

    def solve(self, graph: Graph, *, budget_bytes: int) -> Solution:
        """Returns the cheapest schedule that fits, of all fractions tried.

        Raises:
            SolverError: an integer program hit its time limit without an answer.
        """
        return cheapest_that_fits(
            graph, budget_bytes, self.members(graph, budget_bytes), solver=repr(self)
        )

    def members(self, graph: Graph, budget_bytes: int) -> Iterator[list[int]]:
        """Yields the steps for each fraction tried; the last ones approach the budget."""
        items = _items(graph)
        size = np.array(
            [sum(graph.values[v].size_bytes for v in graph.operators[i].writes) for i in items],
            np.float64,
        )
        cost_s = np.array([graph.operators[i].cost_s for i in items], np.float64)
        share = size / max(size.sum(), 1.0)

        knapsack = (
            dp_knapsack(share, cost_s)
            if self.method == "dp"
            else ilp_knapsack(share, cost_s, self.time_limit_s)
        )

        def steps(fraction: float) -> list[int]:
            saved = (
                range(len(items)) if fraction == 1 else () if fraction == 0 else knapsack(fraction)
            )
            return steps_on_demand(
                graph, {v for i in saved for v in graph.operators[items[i]].writes}
            )

        yield from _members(graph, budget_bytes, steps)


def _items(graph: Graph) -> list[int]:
    """Returns the droppable forward operators that the backward needs, also indirectly."""
    boundary = forward_length(graph)
    always_kept = values_always_kept(graph)
    is_needed = [False] * graph.num_operators

    for index in reversed(range(graph.num_operators)):
        if index >= boundary or is_needed[index]:
            for value in graph.operators[index].reads:
                if value not in always_kept:
                    is_needed[graph.producer[value]] = True
    return [i for i in forward_operators(graph) if is_needed[i]]


def _members(
    graph: Graph, budget_bytes: int, steps: Callable[[float], list[int]]
) -> Iterator[list[int]]:
    """Yields the steps for each fraction tried; the last ones bisect for the highest that fits."""
    fits_at, too_much = -1.0, 1.0
    for part in reversed(range(_NUM_FRACTIONS + 1)):
        fraction = part / _NUM_FRACTIONS
        candidate = steps(fraction)
        yield candidate
        if fits_at < 0 and _peak_bytes(graph, candidate) <= budget_bytes:
            fits_at, too_much = fraction, fraction + 1 / _NUM_FRACTIONS

    if not 0 <= fits_at < 1:
        return

    for _ in range(_NUM_BISECTIONS):
        fraction = (fits_at + too_much) / 2
        candidate = steps(fraction)
        yield candidate
        if _peak_bytes(graph, candidate) <= budget_bytes:
            fits_at = fraction
        else:
            too_much = fraction


def _peak_bytes(graph: Graph, steps: list[int]) -> int:
    return simulate(graph, Schedule.from_steps(graph, steps)).peak_bytes


def dp_knapsack(share: NDArray[np.float64], cost_s: NDArray[np.float64]) -> Knapsack:
    """Returns PyTorch's `dp_knapsack`: dynamic programming over quantized bytes."""
    weight = np.rint(share * _QUANTA).astype(np.int64)
    best = np.zeros(_QUANTA + 1)
    is_taken = np.zeros((len(weight), _QUANTA + 1), np.bool_)
    for item, (w, c) in enumerate(zip(weight, cost_s, strict=True)):
        with_item = np.full(_QUANTA + 1, -1.0)
        with_item[w:] = best[: _QUANTA + 1 - w] + c
        is_taken[item] = with_item > best
        best = np.maximum(best, with_item)

    def saved(fraction: float) -> list[int]:
        room = round(fraction * _QUANTA)
        items: list[int] = []
        for item in reversed(range(len(weight))):
            if is_taken[item, room]:
                items.append(item)
                room -= int(weight[item])
        return items

    return saved


def ilp_knapsack(
    share: NDArray[np.float64], cost_s: NDArray[np.float64], time_limit_s: float
) -> Knapsack:
    """Returns PyTorch's `ilp_knapsack`: an integer program, solved by HiGHS as in PyTorch."""

    def saved(fraction: float) -> list[int]:
        if len(share) == 0:
            return []

        program = Program()
        columns = program.add_columns(-cost_s)
        program.add_row(columns, share, upper=fraction)
        outcome = program.minimise(is_relaxed=False, time_limit_s=time_limit_s)

        if outcome.point is None:
            raise SolverError(
                f"the knapsack of {len(share)} values was not solved in {time_limit_s:g} s; "
                "raise time_limit_s or use method='dp'"
            )
        return [int(i) for i in np.flatnonzero(outcome.point > 0.5)]

    return saved
