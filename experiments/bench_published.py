"""Published instances and budgets: our cost, bound and time beside the published ones.

The referee that comes with the instances checks every schedule; it is independent of this package.
Only results in fixed order are compared. Where a paper prints an overhead with one digit, its cost
is known only to that digit.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from experiments.bench_rows import (
    CONSOLE,
    Row,
    Rows,
    geometric_mean,
    mean_row,
    new_table,
    overrun_text,
    percent,
    solve,
)
from remat.core.instance import read_instance
from remat.core.solution import Solution

TIME_LIMIT_S, GAP = 60.0, 0.0
# another class of schedules, or a heuristic
_NOT_COMPARED = ("free_order", "griewank", "checkpoint_all", "chen")
_LOG = logging.getLogger("bench")


@dataclass(frozen=True)
class Published:
    """The best published result for one instance and budget, in fixed order.

    Attributes:
        system: the solver that found it; empty if nothing is published.
        cost: in the instance's unit; None if it is proved that no schedule fits.
        is_rounded: the cost is known only from an overhead printed with one digit.
        seconds: the published time.
    """

    system: str = ""
    cost: float | None = None
    is_rounded: bool = False
    seconds: float | None = None


def best_published(instance: Mapping[str, Any], label: str) -> Published:
    """Returns an instance's cheapest comparable result at a budget; the fastest on ties."""
    found = []
    for system, result in instance["published"].get(label, {}).items():
        if any(word in system for word in _NOT_COMPARED):
            continue

        is_rounded = "cost" not in result
        cost = (
            instance["total_cost"] * (1 + result["overhead_percent"] / 100)
            if is_rounded
            else result["cost"]
        )

        found.append(
            Published(
                system, None if cost == "infeasible" else cost, is_rounded, result.get("seconds")
            )
        )

    return min(found, key=lambda one: (one.cost or 0.0, one.seconds or 0.0), default=Published())


def run(rows: Rows, *, folder: Path, time_limit_s: float, gap: float, names: Sequence[str]) -> None:
    """Solves the instances of `folder`, or only those in `names`, at every budget."""
    solve_all(
        rows,
        folder,
        {path.stem: gap for path in folder.glob("*.json") if not names or path.stem in names},
        time_limit_s,
    )


def solve_all(rows: Rows, folder: Path, gaps: Mapping[str, float], time_limit_s: float) -> None:
    """Solves the instances named in `gaps`, each to its gap, at every budget, largest first."""
    referee = _referee(folder.parent / "referee.py")
    for name in sorted(gaps):
        path = folder / f"{name}.json"
        instance = json.loads(path.read_text())
        for label in sorted(instance["budgets"], key=lambda label: -instance["budgets"][label]):
            point = partial(_point, path, instance, label, referee, time_limit_s, gaps[name])
            rows.row({"instance": name, "budget": label}, point)


def _point(
    path: Path,
    instance: Mapping[str, Any],
    label: str,
    referee: ModuleType | None,
    time_limit_s: float,
    gap: float,
) -> Row:
    graph, budget = read_instance(path), int(instance["budgets"][label])
    solution, row = solve(graph, budget, time_limit_s=time_limit_s, gap=gap)

    published = best_published(instance, label)
    row |= {
        "operators": graph.num_operators,
        "gap": gap,
        "published_by": published.system,
        "published_cost": published.cost,
        "is_published_rounded": published.is_rounded,
        "published_seconds": published.seconds,
        "referee": _judge(referee, instance, solution) if referee else "absent",
    }

    return row | {"order": list(solution.schedule.steps) if solution.schedule else []}


def _referee(path: Path) -> ModuleType | None:
    if not path.is_file():
        _LOG.warning("%s is missing: only the package's own validator checks the schedules", path)
        return None
    spec = importlib.util.spec_from_file_location("referee", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _judge(referee: ModuleType, instance: Mapping[str, Any], solution: Solution) -> str:
    """Returns `valid`, or the referee's objection to the schedule."""
    if solution.schedule is None:
        return "no schedule"

    try:
        peak, cost = referee.referee(
            instance["cost"], instance["size"], instance["edges"], list(solution.schedule.steps)
        )
    except ValueError as reason:
        return str(reason)

    if peak > solution.budget_bytes:
        return f"peak {peak} is above the budget {solution.budget_bytes}"

    is_same = peak == solution.peak_bytes and abs(cost - solution.cost_s) <= 1e-9 * cost
    return "valid" if is_same else f"peak {peak} and cost {cost} are not those of the solver"


def show(rows: Sequence[Row], time_limit_s: float) -> None:
    """Prints the table, geometric means last."""
    table = new_table(
        f"Published instances, {time_limit_s:g} s each: % over keeping everything, peak in % "
        "of the budget",
        (
            "instance",
            "budget",
            "overhead",
            "bound",
            "gap %",
            "s",
            "peak %",
            "cost",
            "published",
            "in s",
            "ours is",
        ),
        num_left=2,
    )

    for row in rows:
        table.add_row(*_own_cells(row), *_published_cells(row))

    mean_row(
        table,
        rows,
        "mean",
        {"budget": "", "overhead": "overhead", "bound": "bound", "gap": "gap", "s": "seconds"},
    )

    CONSOLE.print(table)
    _show_totals(rows, time_limit_s)


def _show_totals(rows: Sequence[Row], time_limit_s: float) -> None:
    ratios = [
        row["cost"] / row["published_cost"] for row in rows if row["cost"] and row["published_cost"]
    ]
    above = [
        row for row in rows if row["cost"] and row["published_cost"] and row["cost"] > _allowed(row)
    ]

    CONSOLE.print(
        f"cost over the published cost, geometric mean of {len(ratios)}: "
        f"{geometric_mean(ratios):.5f}; above it: {len(above)}"
    )

    refused = [row for row in rows if row["referee"] not in ("valid", "no schedule", "absent")]
    CONSOLE.print(f"refused by the referee: {len(refused)}; {overrun_text(rows, time_limit_s)}\n")


def _own_cells(row: Row) -> Iterator[str]:
    is_solved = row["cost"] is not None
    yield row["instance"].removeprefix("checkmate_").replace("random_layered", "layered")
    yield row["budget"]

    yield percent(row["overhead_percent"])
    yield percent(row["bound_percent"])
    yield percent(row["gap_percent"], is_signed=False)

    yield f"{row['seconds']:.1f}"
    yield f"{100 * row['peak_bytes'] / row['budget_bytes']:.1f}" if is_solved else "-"
    yield cost_text(row["cost"]) if is_solved else row["status"]


def _published_cells(row: Row) -> Iterator[str]:
    if not row["published_by"]:
        yield from ("-", "-", "new" if row["cost"] else "")
        return

    seconds = f"{row['published_seconds']:,.0f}" if row["published_seconds"] is not None else "-"
    if row["published_cost"] is None or row["cost"] is None:
        is_same = row["published_cost"] is None and row["status"] == "infeasible"
        yield from (
            "infeasible" if row["published_cost"] is None else cost_text(row["published_cost"]),
            seconds,
            "equal" if is_same else "?",
        )
        return

    mark = "~" if row["is_published_rounded"] else ""
    yield mark + cost_text(row["published_cost"])
    yield seconds

    change = 100 * (row["cost"] / row["published_cost"] - 1)
    is_equal = row["cost"] == row["published_cost"] or (
        row["is_published_rounded"] and abs(change) < 0.05
    )
    yield "equal" if is_equal else f"{change:+.2f} %"


def _allowed(row: Row) -> float:
    """The published cost, plus half a digit if it is rounded."""
    return float(row["published_cost"]) * (1.0005 if row["is_published_rounded"] else 1.0)


def cost_text(cost: float) -> str:
    """A cost in the instance's unit."""
    return f"{cost:,.0f}" if cost < 1e8 else f"{cost:.5g}"
