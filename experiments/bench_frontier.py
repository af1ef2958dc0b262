"""The whole trade-off curve against single solves, and every method of the field along it.

`curve`: 20 budgets in one call of `frontier_solutions`; `separate`: the same budgets solved one by
one with the same options. The ratio of their times says what sharing saves. Most single solves end
long before their time limit, so the curve's time is also given as a multiple of that limit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.bench_rows import CONSOLE, Row, Rows, facts, geometric_mean, new_table, percent
from experiments.peers import PEERS, solve_as_peer
from experiments.real_graphs import cached_graph
from remat.core.graph import Graph
from remat.solvers.auto.frontier import frontier_solutions
from remat.solvers.auto.solver import Auto

TIME_LIMIT_S, GAP = 20.0, 0.005
DRAWN = "gpt2_12"  # the graph whose curve is drawn beside the other methods
_NAMES = (DRAWN, "resnet50", "unet")
_NUM_POINTS = 20
_COLUMNS = ("budget_bytes", "peak_bytes", "overhead_percent", "bound_percent")


def run(rows: Rows, *, folder: Path, time_limit_s: float, gap: float, names: Sequence[str]) -> None:
    """Makes the curves, the single solves, and the baselines' points on the drawn graph."""
    for name in names or _NAMES:
        graph = cached_graph(name, folder)
        solver = Auto(gap=gap, time_limit_s=time_limit_s)

        curve = rows.row(
            {"graph": name, "kind": "curve"},
            lambda graph=graph, solver=solver: _curve(graph, solver),  # type: ignore[misc]
        )

        for budget, *_ in curve["points"]:
            key = {"graph": name, "kind": "separate", "budget_bytes": budget}
            rows.row(
                key,
                lambda graph=graph, solver=solver, budget=budget: _separate(graph, solver, budget),  # type: ignore[misc]
            )

            for peer in PEERS if name == DRAWN else ():
                key = {"graph": name, "kind": "peer", "peer": peer, "budget_bytes": budget}
                rows.row(
                    key,
                    lambda graph=graph, peer=peer, budget=budget: _peer(  # type: ignore[misc]
                        graph, peer, budget, time_limit_s
                    ),
                )


def _curve(graph: Graph, solver: Auto) -> Row:
    began = time.perf_counter()
    solutions = frontier_solutions(graph, _NUM_POINTS, solver)
    seconds = time.perf_counter() - began

    points = [[facts(s)[column] for column in _COLUMNS] for s in solutions]
    costs, bounds = [s.cost_s for s in solutions], [s.lower_bound_s for s in solutions]
    is_monotone = costs == sorted(costs, reverse=True) and bounds == sorted(bounds, reverse=True)

    return {
        "operators": graph.num_operators,
        "seconds": round(seconds, 3),
        "is_monotone": is_monotone,
        "points": points,
    }


def _separate(graph: Graph, solver: Auto, budget_bytes: int) -> Row:
    began = time.perf_counter()
    solution = solver.solve(graph, budget_bytes=budget_bytes)
    return {column: facts(solution)[column] for column in _COLUMNS} | {
        "seconds": round(time.perf_counter() - began, 3)
    }


def _peer(graph: Graph, peer: str, budget_bytes: int, time_limit_s: float) -> Row:
    found, seconds, reason = solve_as_peer(peer, graph, budget_bytes, time_limit_s=time_limit_s)
    numbers = (
        {column: facts(found)[column] for column in _COLUMNS} if found else dict.fromkeys(_COLUMNS)
    )
    return numbers | {"budget_bytes": budget_bytes, "seconds": round(seconds, 3), "reason": reason}


def show(rows: Sequence[Row], time_limit_s: float) -> None:
    """Prints each curve's time and mean overhead beside those of the single solves."""
    table = new_table(
        f"Curves of {_NUM_POINTS} budgets, at most {time_limit_s:g} s per budget",
        (
            "graph",
            "curve, s",
            "in limits",
            "one by one, s",
            "ratio",
            "overhead",
            "one by one",
            "gap %",
            "monotone",
        ),
    )

    limits, ratios = [], []
    for curve in (row for row in rows if row["kind"] == "curve"):
        alone = [
            row for row in rows if row["kind"] == "separate" and row["graph"] == curve["graph"]
        ]

        total_s = sum(row["seconds"] for row in alone)
        limits.append(curve["seconds"] / time_limit_s)
        ratios.append(curve["seconds"] / total_s)

        price = (
            f"{curve['seconds']:.1f}",
            f"{limits[-1]:.1f}",
            f"{total_s:.1f}",
            f"{ratios[-1]:.2f}",
        )

        means = _means(curve["points"], alone)
        table.add_row(curve["graph"], *price, *means, "yes" if curve["is_monotone"] else "NO")

    CONSOLE.print(table)

    solves = (
        f"{geometric_mean(limits):.1f} time limits, or {geometric_mean(ratios):.2f} of the time of "
        "single solves"
    )
    CONSOLE.print(f"a curve takes {solves} (geometric means)\n")


def _means(points: Sequence[Sequence[Any]], alone: Sequence[Row]) -> tuple[str, str, str]:
    """Returns a curve's mean overhead, that of the single solves, and the curve's gap."""
    both = [
        (point, row)
        for point, row in zip(points, alone, strict=True)
        if None not in (point[2], row["overhead_percent"])
    ]

    overhead, bound = (
        geometric_mean(1 + point[column] / 100 for point, _ in both) for column in (2, 3)
    )
    other = geometric_mean(1 + row["overhead_percent"] / 100 for _, row in both)

    return (
        percent(100 * (overhead - 1)),
        percent(100 * (other - 1)),
        percent(100 * (1 - bound / overhead), is_signed=False),
    )
