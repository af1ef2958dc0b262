"""The closed-form families together: what the heuristics of the field give for a budget, in seconds at 20,000 operators.

`auto` takes them over where they fit, so that it is never above one of them, and starts from them; `minimum` takes the leanest.
Deep networks near their least budget need segments of several blocks, which neither a relaxation nor moves find.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from ..errors import SolverError
from ..graph import Graph
from .articulation import ArticulationGreedy
from .base import Solver
from .chen import ChenGreedy
from .linearized import LinearizedGreedy
from .per_block import PerBlock
from .pytorch_knapsack import PyTorchKnapsack

FAMILIES: tuple[Solver, ...] = (PerBlock(), ChenGreedy(), ArticulationGreedy(), LinearizedGreedy(), PyTorchKnapsack("dp"))
MOST_OPERATORS = 20_000  # each simulates up to a hundred schedules


def family_schedules(graph: Graph, budget_bytes: int) -> Iterator[tuple[int, ...]]:
    """Yields the cheapest steps of each family that fit; none on larger graphs, or outside a family's class."""
    for solver in FAMILIES if graph.num_operators <= MOST_OPERATORS else ():
        with suppress(SolverError):
            found = solver.solve(graph, budget_bytes=budget_bytes)
            if found.schedule is not None:
                yield found.schedule.steps


def leanest_schedules(graph: Graph, below_bytes: int) -> Iterator[tuple[int, ...]]:
    """Yields the steps of each family's member of the lowest peak, where it is below so many bytes, ever lower."""
    for solver in FAMILIES if graph.num_operators <= MOST_OPERATORS else ():
        with suppress(SolverError):
            found = solver.solve(graph, budget_bytes=below_bytes - 1)
            if found.schedule is None:
                continue
            leanest = solver.solve(graph, budget_bytes=found.minimum_bytes)
            if leanest.schedule is not None:
                below_bytes = leanest.peak_bytes
                yield leanest.schedule.steps
