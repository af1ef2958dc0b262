"""The solvers by name."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from .core.base import Solver

# name -> (module, class, fixed options); a module is imported when its solver is made, so that a
# backend missing for one method does not affect the others
_SOLVERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "auto": ("auto.solver", "Auto", {}),
    "keep-all": ("baselines.keep_all", "KeepAll", {}),
    "chen-sqrt": ("baselines.chen", "ChenSqrt", {}),
    "chen-greedy": ("baselines.chen", "ChenGreedy", {}),
    "ap-sqrt": ("baselines.articulation", "ArticulationSqrt", {}),
    "ap-greedy": ("baselines.articulation", "ArticulationGreedy", {}),
    "linear-sqrt": ("baselines.linearized", "LinearizedSqrt", {}),
    "linear-greedy": ("baselines.linearized", "LinearizedGreedy", {}),
    "revolve": ("baselines.revolve", "Revolve", {}),
    "recompute-cheap": ("baselines.recompute_cheap", "RecomputeCheap", {}),
    "recompute-attention": ("baselines.recompute_attention", "RecomputeAttention", {}),
    "per-block": ("baselines.per_block", "PerBlock", {}),
    "pytorch-knapsack": ("baselines.pytorch_knapsack", "PyTorchKnapsack", {}),
    "milp": ("checkmate.milp", "MILP", {}),
    "milp-pulp": ("checkmate.milp_pulp", "PuLPMILP", {}),
    "lp-rounding": ("checkmate.lp_rounding", "LPRounding", {}),
    "exhaustive": ("exhaustive.solver", "Exhaustive", {}),
    "free-order": ("free_order.solver", "FreeOrder", {}),
}
FREE_ORDER = "free-order"
# free order is left out: its schedules are not comparable with those of the fixed order
SOLVER_NAMES = tuple(name for name in _SOLVERS if name != FREE_ORDER)


def make_solver(name: str, **options: Any) -> Solver:
    """Returns the solver called `name`.

    Options that the method does not have (a time limit for a closed-form heuristic) are ignored.

    Raises:
        ValueError: no solver is called `name`.
        SolverError: the solver's backend is not installed.
    """
    if name not in _SOLVERS:
        raise ValueError(f"no solver is called {name!r}; there are {', '.join(_SOLVERS)}")
    module, class_name, fixed = _SOLVERS[name]
    kind = getattr(importlib.import_module(f".{module}", __package__), class_name)
    known = {field.name for field in dataclasses.fields(kind)}
    solver: Solver = kind(**fixed, **{key: value for key, value in options.items() if key in known})
    return solver
