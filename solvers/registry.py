"""The solvers by name."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from .core.base import Solver

# name -> (module, class); a module is imported when its solver is made, so that a
# backend missing for one method does not affect the others
_SOLVERS: dict[str, tuple[str, str]] = {
    "auto": ("auto.solver", "Auto"),
    "keep-all": ("baselines.keep_all", "KeepAll"),
    "chen-sqrt": ("baselines.chen", "ChenSqrt"),
    "chen-greedy": ("baselines.chen", "ChenGreedy"),
    "ap-sqrt": ("baselines.articulation", "ArticulationSqrt"),
    "ap-greedy": ("baselines.articulation", "ArticulationGreedy"),
    "linear-sqrt": ("baselines.linearized", "LinearizedSqrt"),
    "linear-greedy": ("baselines.linearized", "LinearizedGreedy"),
    "revolve": ("baselines.revolve", "Revolve"),
    "recompute-cheap": ("baselines.recompute_cheap", "RecomputeCheap"),
    "recompute-attention": ("baselines.recompute_attention", "RecomputeAttention"),
    "per-block": ("baselines.per_block", "PerBlock"),
    "pytorch-knapsack": ("baselines.pytorch_knapsack", "PyTorchKnapsack"),
    "milp": ("checkmate.milp", "MILP"),
    "milp-pulp": ("checkmate.milp_pulp", "PuLPMILP"),
    "lp-rounding": ("checkmate.lp_rounding", "LPRounding"),
    "exhaustive": ("exhaustive.solver", "Exhaustive"),
    "free-order": ("free_order.solver", "FreeOrder"),
}
FREE_ORDER = "free-order"
# options of solvers that search; other solvers ignore them
_OF_A_SEARCH = {"time_limit_s", "gap", "seed", "rounds", "threads", "progress"}
# free order is left out: its schedules are not comparable with those of the fixed order
SOLVER_NAMES = tuple(name for name in _SOLVERS if name != FREE_ORDER)


def make_solver(name: str, **options: Any) -> Solver:
    """Returns the solver called `name`.

    `time_limit_s`, `gap`, `seed`, `rounds`, `threads` and `progress` are ignored where the method
    has no use for them: a closed-form heuristic needs no time limit.

    Raises:
        ValueError: no solver is called `name`.
        TypeError: the method does not have one of the other options.
    """
    if name not in _SOLVERS:
        raise ValueError(f"no solver is called {name!r}; choose one of {', '.join(_SOLVERS)}")

    module, class_name = _SOLVERS[name]
    kind = getattr(importlib.import_module(f".{module}", __package__), class_name)
    known = {field.name for field in dataclasses.fields(kind)}
    if unknown := options.keys() - known - _OF_A_SEARCH:
        has = f"it has {', '.join(sorted(known))}" if known else "it has none"
        raise TypeError(f"solver {name!r} has no option {', '.join(sorted(unknown))}; {has}")

    solver: Solver = kind(**{key: value for key, value in options.items() if key in known})
    return solver
