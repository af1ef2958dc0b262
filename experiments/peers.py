"""The field's baselines: each tries the methods that a user would; the cheapest counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from remat.core.errors import SolverError
from remat.core.graph import Graph
from remat.core.solution import Solution
from remat.solvers import make_solver
from remat.solvers.baselines.pytorch_knapsack import PyTorchKnapsack
from remat.solvers.checkmate.lp_rounding import LPRounding
from remat.solvers.core.base import Solver

_CHEN = ("chen-sqrt", "chen-greedy", "ap-sqrt", "ap-greedy", "linear-sqrt", "linear-greedy")

PEERS: Mapping[str, Callable[[float], list[Solver]]] = {
    "per block": lambda _: [make_solver("per-block")],
    "Chen": lambda _: [make_solver(name) for name in _CHEN],
    "knapsack dp": lambda _: [PyTorchKnapsack("dp")],
    "knapsack ilp": lambda limit_s: [PyTorchKnapsack("ilp", time_limit_s=min(limit_s, 5.0))],
    "rounding": lambda limit_s: [LPRounding(time_limit_s=limit_s)],
}
"""Baselines by name, each made from a time limit in seconds.

`torch.utils.checkpoint` per block; Chen's two methods and Checkmate's four generalisations;
PyTorch's `activation_memory_budget` with both of its solvers; Checkmate's two-phase rounding.
"""


def solve_as_peer(
    name: str, graph: Graph, budget_bytes: int, *, time_limit_s: float
) -> tuple[Solution | None, float, str]:
    """Returns a baseline's cheapest schedule that fits, its seconds, and why if there is none."""
    began, best, reason = time.perf_counter(), None, "does not fit"
    for solver in PEERS[name](time_limit_s):
        try:
            found = solver.solve(graph, budget_bytes=budget_bytes)
        # the graph is outside the method's class, or the method's model is too large
        except SolverError as error:
            reason = " ".join(str(error).split())
            continue

        if found.is_solved and (best is None or found.cost_s < best.cost_s):
            best = found

    return best, time.perf_counter() - began, "" if best else reason
