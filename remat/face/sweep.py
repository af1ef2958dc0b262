"""Solves many graphs under many budgets in parallel, through joblib.

It runs on this machine's cores, or on a Dask or Ray cluster. A task is one graph under one budget.
Graphs and solutions are sent as the package's own JSON, so they need not be pickled, and a worker
with another version of the package refuses them instead of misreading them.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import joblib
import msgspec

from remat.core.budget import Budget, parse_budget
from remat.core.graph import Graph
from remat.core.schedule import keep_all_peak
from remat.core.solution import Solution
from remat.solvers import Solver, make_solver


def sweep(
    graphs: Sequence[Graph],
    budgets: Sequence[Budget],
    *,
    solver: str | Solver = "auto",
    time_limit_s: float = 60.0,
    gap: float = 0.005,
    n_jobs: int = -1,
) -> list[list[Solution]]:
    """Returns one list per graph, with one solution per budget.

    If nothing was found, the solution's status says so.

    Runs in local processes, or inside `with joblib.parallel_config("dask")` (or `"ray"`) on that
    cluster. The time limit applies to each task. To share work between the budgets of one graph,
    see `frontier`.

    Args:
        graphs: from `trace`, `Graph.load` or `Graph.from_arrays`.
        budgets: for each graph: bytes, "8GiB", or "60%" of the peak of keeping everything in that
            graph.
        solver: a name or a solver.
        time_limit_s: time limit of each solve, for a solver given by name.
        gap: a solve stops once this gap is proved, for a solver given by name.
        n_jobs: number of solves at the same time; -1 for one per core, or per worker of the
            cluster.

    Raises:
        ValueError, TypeError: a malformed budget, an unknown solver; before any work.

    >>> graphs = [Graph.from_arrays([1] * 3, [1] * 3, [(0, 1), (1, 2), (0, 2)])]
    >>> [[s.cost_s for s in row] for row in sweep(graphs, [3, "200%"], n_jobs=1)]
    [[3.0, 3.0]]
    """
    method = (
        make_solver(solver, time_limit_s=time_limit_s, gap=gap)
        if isinstance(solver, str)
        else solver
    )

    tasks = []
    for graph in graphs:
        keep_all_bytes = keep_all_peak(graph)
        asked = [parse_budget(budget, keep_all_bytes=keep_all_bytes) for budget in budgets]
        content = msgspec.json.encode(graph)
        tasks += [joblib.delayed(_solve)(content, budget_bytes, method) for budget_bytes in asked]

    # a worker takes seconds to start
    n_jobs = min(joblib.effective_n_jobs(n_jobs), max(1, len(tasks)))
    with nullcontext() if n_jobs == 1 else _ending_workers():
        answers: Any = joblib.Parallel(n_jobs=n_jobs)(tasks)
    solutions = [msgspec.json.decode(answer, type=Solution) for answer in answers]
    count = len(budgets)
    return [solutions[index * count : (index + 1) * count] for index in range(len(graphs))]


@contextmanager
def _ending_workers() -> Iterator[None]:
    """Turns SIGTERM into `SystemExit`, so that joblib ends its workers.

    A handler that the program has installed itself is left alone.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, _: Any) -> None:
    raise SystemExit(128 + number)


def _solve(content: bytes, budget_bytes: int, solver: Solver) -> bytes:
    graph = msgspec.json.decode(content, type=Graph)
    return msgspec.json.encode(solver.solve(graph, budget_bytes=budget_bytes))
