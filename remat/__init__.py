"""Train PyTorch models inside a memory budget, at provably near-minimal extra compute.

>>> import remat
>>> graph = remat.Graph.from_arrays([1, 1, 1], [1, 1, 1], [(0, 1), (1, 2), (0, 2)])
>>> remat.solve(graph, 3).cost_s
3.0
"""

from __future__ import annotations

import importlib
import random
from typing import TYPE_CHECKING, Any

from .core.budget import format_bytes, parse_budget
from .core.errors import BudgetError, GraphError, RematError, ScheduleError, SolverError, TraceError
from .core.graph import Graph
from .core.operators import Operator, Phase, Value, ValueKind
from .core.schedule import Schedule, Simulation, simulate
from .core.solution import Solution, Status
from .core.validate import Violation, validate

if TYPE_CHECKING:
    from .face.api import checkpoint, frontier, report, solve, trace, unwrap, wrap
    from .face.sweep import sweep
    from .fit.answer import Fit
    from .fit.fits import fits
    from .fit.max_batch import Batches, max_batch
    from .look.report import Report
    from .run.measure import Measurement, measure
    from .solvers import SOLVER_NAMES, make_solver
    from .solvers.auto.minimum import minimum

__version__ = "0.1.0"

# Names that need torch or a solver are imported on first use, so that `remat solve` on a plain
# graph starts without torch.
_LAZY = {
    **dict.fromkeys(
        ("checkpoint", "frontier", "report", "solve", "trace", "unwrap", "wrap"), "face.api"
    ),
    "Fit": "fit.answer",
    "fits": "fit.fits",
    **dict.fromkeys(("Batches", "max_batch"), "fit.max_batch"),
    **dict.fromkeys(("Measurement", "measure"), "run.measure"),
    "Report": "look.report",
    **dict.fromkeys(("SOLVER_NAMES", "make_solver"), "solvers"),
    "minimum": "solvers.auto.minimum",
    "sweep": "face.sweep",
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
    state = random.getstate()  # libraries draw while they are imported (rich)
    try:
        value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    finally:
        random.setstate(state)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
