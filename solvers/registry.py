"""The solvers by name."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from .base import Solver

# name -> (module, class, fixed options); modules are imported when asked for, so that a missing
# backend of one method is no trouble to the others
_SOLVERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "auto": ("auto", "Auto", {}),
    "keep-all": ("keep_all", "KeepAll", {}),
    "chen-sqrt": ("chen", "ChenSqrt", {}),
    "chen-greedy": ("chen", "ChenGreedy", {}),
    "ap-sqrt": ("articulation", "ArticulationSqrt", {}),
    "ap-greedy": ("articulation", "ArticulationGreedy", {}),
    "linear-sqrt": ("linearized", "LinearizedSqrt", {}),
    "linear-greedy": ("linearized", "LinearizedGreedy", {}),
    "revolve": ("revolve", "Revolve", {}),
    "recompute-cheap": ("recompute_cheap", "RecomputeCheap", {}),
    "recompute-attention": ("recompute_attention", "RecomputeAttention", {}),
    "per-block": ("per_block", "PerBlock", {}),
    "pytorch-knapsack": ("pytorch_knapsack", "PyTorchKnapsack", {}),
    "milp": ("milp", "MILP", {}),
    "milp-pulp": ("milp_pulp", "PuLPMILP", {}),
    "lp-rounding": ("rounding", "LPRounding", {}),
    "free-order": ("free_order", "FreeOrder", {}),
}
FREE_ORDER = "free-order"
SOLVER_NAMES = tuple(name for name in _SOLVERS if name != FREE_ORDER)  # what free order finds is never compared with theirs


def make_solver(name: str, **options: Any) -> Solver:
    """Returns the solver called `name`.

    Options that the method has no use for (a time limit of a closed-form heuristic) are left out.

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
