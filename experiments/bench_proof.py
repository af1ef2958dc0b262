"""How long proofs take on published networks at published budgets.

The time until the cost is proved to be within a given gap of the optimum.

`bench_published` gives each point a minute and asks for the optimum, which shows what a minute
proves. Here each point has ten minutes, and its solve stops as soon as the gap is proved. A point
not proved in ten minutes is reported with the remaining gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments import bench_published
from experiments.bench_rows import CONSOLE, Row, Rows, mean_row, new_table, overrun_text, percent

TIME_LIMIT_S, GAP = 600.0, 0.002
_WIDER = {"checkmate_unet": 0.005}  # networks that get a wider gap
_NETWORKS = "checkmate_"


def run(rows: Rows, *, folder: Path, time_limit_s: float, gap: float, names: Sequence[str]) -> None:
    """Solves the networks of `folder` (or in `names`) at every budget, until a gap is proved."""
    found = [
        path.stem for path in folder.glob(f"{_NETWORKS}*.json") if not names or path.stem in names
    ]
    bench_published.solve_all(
        rows, folder, {name: max(gap, _WIDER.get(name, 0.0)) for name in found}, time_limit_s
    )


def show(rows: Sequence[Row], time_limit_s: float) -> None:
    """Prints the table, geometric means last."""
    table = new_table(
        f"Published networks, until the gap is proved, {time_limit_s:g} s at most: % over keeping "
        "everything",
        ("instance", "budget", "overhead", "bound", "gap %", "asked %", "s", "cost", "is"),
        num_left=2,
    )

    for row in rows:
        name = row["instance"].removeprefix(_NETWORKS)
        numbers = (
            percent(row["overhead_percent"]),
            percent(row["bound_percent"]),
            percent(row["gap_percent"], is_signed=False),
        )

        cost = row["status"] if row["cost"] is None else bench_published.cost_text(row["cost"])
        asked = percent(100 * row["gap"], is_signed=False)
        table.add_row(
            name,
            row["budget"],
            *numbers,
            asked,
            f"{row['seconds']:.1f}",
            cost,
            "proved" if is_proved(row) else "not proved",
        )

    mean_row(
        table,
        rows,
        "mean",
        {"budget": "", "overhead": "overhead", "bound": "bound", "gap": "gap", "s": "seconds"},
    )

    CONSOLE.print(table)
    open_ = [row for row in rows if not is_proved(row)]
    CONSOLE.print(f"not proved: {len(open_)} of {len(rows)}; {overrun_text(rows, time_limit_s)}\n")


def is_proved(row: Row) -> bool:
    """True if the requested gap is reached, or no schedule can fit."""
    return row["status"] == "infeasible" or (
        row["cost"] is not None and row["gap_percent"] <= 100 * row["gap"]
    )
