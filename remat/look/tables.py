"""The tables, JSON and progress that the command line writes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from remat.core.graph import Graph
from remat.core.operators import Phase
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution, Status
from remat.core.units import Units
from remat.narration.stages import stage
from remat.solvers.core.progress import ProgressCallback

_COLOUR = {
    Status.OPTIMAL: "green",
    Status.FEASIBLE: "cyan",
    Status.INFEASIBLE: "red",
    Status.NO_SOLUTION: "yellow",
}
_MEANING = {
    Status.OPTIMAL: "proved: the least cost within this budget, up to the requested gap",
    Status.FEASIBLE: "fits the budget; the gap says how far from optimal it can be",
    Status.INFEASIBLE: "proved: no schedule fits this budget",
    Status.NO_SOLUTION: "stopped before a schedule was found; one may exist",
}


@contextmanager
def progress(text: str, keep_all_cost_s: float = 0.0) -> Iterator[ProgressCallback]:
    """Shows `text`, the time and a solver's progress on stderr if it takes over a second.

    Yields the callback for the solver.
    """
    with stage(text) as told:
        yield lambda moment: told.say(moment.text(keep_all_cost_s))


def solution_record(solution: Solution) -> dict[str, Any]:
    """Returns the record of a solution for `--format json`; missing numbers are None."""
    is_solved = solution.is_solved

    return {
        "status": str(solution.status),
        "cost": solution.cost_s if is_solved else None,
        "peak": solution.peak_bytes if is_solved else None,
        "overhead_percent": 100 * solution.overhead if is_solved else None,
        "lower_bound": solution.lower_bound_s if solution.status is not Status.INFEASIBLE else None,
        "gap_percent": 100 * solution.gap if is_solved else None,
        "solver": solution.solver,
        "found_by": solution.found_by,
        "proved_by": solution.proved_by,
        "wall_s": solution.wall_s,
        "order": list(solution.schedule.steps) if solution.schedule else [],
    }


def write_json(record: Any) -> None:
    """Writes one JSON document to stdout."""
    Console(soft_wrap=True, highlight=False, markup=False, emoji=False).out(json.dumps(record))


def show_solution(graph: Graph, solution: Solution) -> None:
    """Writes one solution as a table: status, budget, peak, costs, solver."""
    units, status = Units.of(graph), solution.status
    rows = [
        ("status", f"[{_COLOUR[status]}]{status}[/] ({_MEANING[status]})"),
        ("budget", units.size_text(solution.budget_bytes)),
    ]

    if solution.schedule is not None:
        rows += _schedule_rows(solution, solution.schedule, units)
    if solution.minimum_bytes:
        least = units.size_text(solution.minimum_bytes)
        rows.append(("least budget", f"{least}, the smallest known to work"))

    if solution.techniques:
        rows.append(("techniques", solution.techniques))

    rows.append(("solver", f"{solution.solver} in {solution.wall_s:.2f} s"))
    if solution.cut_short:
        rows.append(("cut short", solution.cut_short))
    _show_pairs(rows)


def _schedule_rows(solution: Solution, schedule: Schedule, units: Units) -> list[tuple[str, str]]:
    peak, least = units.size_text(solution.peak_bytes), units.cost_text(solution.lower_bound_s)
    return [
        ("peak", f"{peak} ({solution.peak_bytes / solution.budget_bytes:.1%} of the budget)"),
        ("overhead", f"{_percent(solution.overhead)} over keeping everything"),
        ("cost", f"{units.cost_text(solution.cost_s)}, at least {least} is needed"),
        ("gap", _percent(solution.gap)),
        (
            "steps",
            f"{len(schedule.steps):,}, of which {schedule.num_recomputations:,} recompute",
        ),
    ]


def show_solutions(
    graph: Graph, labelled: Iterable[tuple[str, Solution]], *, title: str = ""
) -> None:
    """Writes several solutions as a table, one per row; a common budget goes into the title."""
    units, rows = Units.of(graph), list(labelled)
    budgets = {solution.budget_bytes for _, solution in rows}
    is_shared = len(budgets) == 1 and len(rows) > 1
    if is_shared:
        budget = units.size_text(budgets.pop())
        title = f"{title}: {budget}" if title else f"budget {budget}"

    table = Table(title=escape(title) or None, title_justify="left", box=None, pad_edge=False)
    names = ["", "status", "budget", "peak", "overhead", "at least", "gap", "time"]
    if is_shared:
        names.remove("budget")

    for name in names:
        table.add_column(name, justify="left" if name in ("", "status") else "right", no_wrap=True)

    for label, solution in rows:
        table.add_row(
            escape(label),
            f"[{_COLOUR[solution.status]}]{solution.status}[/]",
            *([] if is_shared else [units.size_text(solution.budget_bytes)]),
            *_numbers(solution, units),
            f"{solution.wall_s:.2f} s",
        )

    Console().print(table)


def _numbers(solution: Solution, units: Units) -> list[str]:
    """Returns peak, overhead, bound and gap for a row."""
    if not solution.is_solved:
        return ["-"] * 4

    shares = (solution.overhead, max(0.0, solution.overhead_bound), solution.gap)
    return [units.size_text(solution.peak_bytes), *map(_percent, shares)]


def show_graph(graph: Graph) -> None:
    """Writes a graph as a table: operators, cost, memory, pinned operators, largest values."""
    units = Units.of(graph)
    keep_all = simulate(graph, Schedule.keep_all(graph))
    forward = sum(op.phase is Phase.FORWARD for op in graph.operators)
    pinned = Counter(op.pinned for op in graph.operators if op.pinned)

    rows = [
        (
            "operators",
            f"{graph.num_operators:,} ({forward:,} forward, {graph.num_operators - forward:,} "
            "backward)",
        ),
        ("cost", f"{units.cost_text(graph.cost_s)} ({graph.costs or 'as given'})"),
        ("resident", f"{units.size_text(graph.resident_bytes)} of parameters, buffers and inputs"),
        ("peak", f"{units.size_text(keep_all.peak_bytes)} if everything is kept"),
        (
            "never recomputed",
            "; ".join(f"{count}: {reason}" for reason, count in pinned.most_common()) or "none",
        ),
        (
            "largest values",
            ", ".join(f"{v.name} ({units.size_text(v.size_bytes)})" for v in _largest(graph, 5))
            or "none",
        ),
    ]

    _show_pairs(rows)


def _largest(graph: Graph, count: int) -> Sequence[Any]:
    return sorted((v for v in graph.values if not v.is_resident), key=lambda v: -v.size_bytes)[
        :count
    ]


def _show_pairs(rows: Iterable[tuple[str, str]]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for name, text in rows:
        table.add_row(name, text if name == "status" else escape(text))
    Console().print(table)


def _percent(fraction: float) -> str:
    return f"{round(100 * fraction, 2) + 0.0:.2f} %"  # + 0.0: no "-0.00"
