"""Solvers take a graph and a budget and return a solution; `auto` is the one to use."""

from __future__ import annotations

if __name__ == "solvers":  # imported by the folder's name, from a checkout
    from remat.checkout import alias

    alias(__name__)
else:
    from .core.base import Solver
    from .registry import SOLVER_NAMES, make_solver

    __all__ = ["SOLVER_NAMES", "Solver", "make_solver"]
