"""Train PyTorch models inside a memory budget, at provably near-minimal extra compute.

>>> import remat
>>> graph = remat.Graph.from_arrays([1, 1, 1], [1, 1, 1], [(0, 1), (1, 2), (0, 2)])
>>> remat.solve(graph, 3).cost_s
3.0
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .budget import format_bytes, parse_budget
from .errors import BudgetError, GraphError, RematError, ScheduleError, SolverError, TraceError
from .graph import Graph, Operator, Phase, Value, ValueKind
from .schedule import Schedule, Simulation, simulate
from .solution import Solution, Status
from .validate import Violation, validate

if TYPE_CHECKING:
    from .api import checkpoint, frontier, report, solve, trace, unwrap, wrap
    from .fits import Fit, fits
    from .max_batch import Batches, max_batch
    from .measure import Measurement, measure
    from .report import Report
    from .solvers import SOLVER_NAMES, make_solver
    from .solvers.minimum import minimum
    from .sweep import sweep

__version__ = "0.1.0"

# What needs torch or a solver is imported when it is first asked for: `remat solve` on a plain graph starts without torch.
_LAZY = {
    **dict.fromkeys(("checkpoint", "frontier", "report", "solve", "trace", "unwrap", "wrap"), "api"),
    **dict.fromkeys(("Fit", "fits"), "fits"),
    **dict.fromkeys(("Batches", "max_batch"), "max_batch"),
    **dict.fromkeys(("Measurement", "measure"), "measure"),
    "Report": "report",
    **dict.fromkeys(("SOLVER_NAMES", "make_solver"), "solvers"),
    "minimum": "solvers.minimum",
    "sweep": "sweep",
}

__all__ = [
    "SOLVER_NAMES",
    "Batches",
    "BudgetError",
    "Fit",
    "Graph",
    "GraphError",
    "Measurement",
    "Operator",
    "Phase",
    "RematError",
    "Report",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "Solution",
    "SolverError",
    "Status",
    "TraceError",
    "Value",
    "ValueKind",
    "Violation",
    "checkpoint",
    "fits",
    "format_bytes",
    "frontier",
    "make_solver",
    "max_batch",
    "measure",
    "minimum",
    "parse_budget",
    "report",
    "simulate",
    "solve",
    "sweep",
    "trace",
    "unwrap",
    "validate",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


class _Package(ModuleType):
    """Keeps `remat.measure` and `remat.report` the functions, though submodules have the same names."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _LAZY and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
