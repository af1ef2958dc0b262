"""Solvers: a graph and a budget in, a solution out. One method a file; `auto` is the one to use.

`import solvers` from a checkout gives the same module objects as `import remat.solvers`.
"""

from __future__ import annotations

import importlib
import sys

if __name__ == "solvers":  # imported by its folder's name: hand over to the one real package
    _real = importlib.import_module("remat.solvers")
    sys.modules[__name__] = _real
else:
    from .base import Solver
    from .registry import SOLVER_NAMES, make_solver

    __all__ = ["SOLVER_NAMES", "Solver", "make_solver"]
