"""Do ten minutes prove what a minute leaves open? Traced steps with a gap above 1 %.

`bench_real` gives each budget about a minute. Here each solve stops as soon as the cost is proved
to be within 1 % of the optimum. A point not proved in ten minutes is reported with the remaining
gap. Points outside of `POINTS` were not tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.bench_proof import is_proved
from experiments.bench_real import LEAST, budgets_of
from experiments.bench_rows import (
    CONSOLE,
    Row,
    Rows,
    mean_row,
    new_table,
    overrun_text,
    percent,
    solve,
)
from experiments.real_graphs import cached_graph
from remat.core.graph import Graph

TIME_LIMIT_S, GAP = 600.0, 0.01
POINTS = (("gpt2_48", LEAST), ("unet", "40%"), ("unet", LEAST))


def run(rows: Rows, *, folder: Path, time_limit_s: float, gap: float, names: Sequence[str]) -> None:
    """Solves the points, or only those of the graphs in `names`, until they are within `gap`."""
    for name, label in POINTS:
        if not names or name in names:
            graph = cached_graph(name, folder)
            budget = budgets_of(rows, name, graph)[label]
            key = {"graph": name, "kind": "auto", "budget": label}
            rows.row(
                key,
                lambda graph=graph, budget=budget: _point(graph, budget, time_limit_s, gap),  # type: ignore[misc]
            )


def _point(graph: Graph, budget_bytes: int, time_limit_s: float, gap: float) -> Row:
    return solve(graph, budget_bytes, time_limit_s=time_limit_s, gap=gap)[1] | {"gap": gap}


def show(rows: Sequence[Row], time_limit_s: float) -> None:
    """Prints the table, geometric means last."""
    own = [row for row in rows if row["kind"] == "auto"]
    table = new_table(
        f"Traced training steps, until the gap is proved, {time_limit_s:g} s at most: % over "
        "keeping everything",
        ("graph", "budget", "GiB", "overhead", "bound", "gap %", "asked %", "s", "is"),
        num_left=2,
    )

    for row in own:
        numbers = (
            percent(row["overhead_percent"]),
            percent(row["bound_percent"]),
            percent(row["gap_percent"], is_signed=False),
        )

        asked, state = (
            percent(100 * row["gap"], is_signed=False),
            "proved" if is_proved(row) else "not proved",
        )
        size = f"{row['budget_bytes'] / 2**30:.2f}"

        table.add_row(
            row["graph"], row["budget"], size, *numbers, asked, f"{row['seconds']:.1f}", state
        )

    mean_row(
        table,
        own,
        "mean",
        {
            "budget": "",
            "GiB": "",
            "overhead": "overhead",
            "bound": "bound",
            "gap": "gap",
            "s": "seconds",
        },
    )

    CONSOLE.print(table)
    CONSOLE.print(
        f"not proved: {sum(not is_proved(row) for row in own)} of {len(own)}; "
        f"{overrun_text(own, time_limit_s)}\n"
    )
