"""Tables and pictures of the facts that a GPU run wrote."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from remat.look.plot import save
from remat.look.plot_style import new_figure, quiet

Fact = dict[str, Any]
_MIB = 2**20
_COUNTS = ("requested", "allocated", "reserved")
AT_THE_PEAK_OF = " at the peak of "  # in the name of a plan with another way's peak as its budget
_WIDTH = 120  # columns of a table in a file or a log


def read(path: Path) -> list[Fact]:
    """Returns the facts of a file, one per line."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def compared(facts: Sequence[Fact]) -> list[Fact]:
    """The last run of each way of running a model."""
    rows = {
        (fact["model"], fact["way"]): fact
        for fact in facts
        if {"step_s", "way", "model"} <= fact.keys()
    }
    return list(rows.values())


def show(path: Path) -> None:
    """Prints tables, and draws `NAME_peak.png` and `NAME_time.png` beside the file.

    Exits if there is no file.
    """
    if not path.is_file():
        sys.exit(f"gpu_run: there are no facts in {path}; run it on a machine with a GPU first")

    facts = read(path)
    rows = compared(facts)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        console.print(_table(model, mine))
        for line in equal_peaks(mine):
            console.print(line)
    for fact in facts:
        if "error" in fact:
            named = " ".join(str(fact[key]) for key in ("section", "model", "way") if key in fact)
            console.print(f"failed: {named}: {fact['error']}")

    on_a_gpu = [row for row in rows if row.get("allocated")]
    if on_a_gpu:
        _draw_peaks(on_a_gpu, path.with_name(f"{path.stem}_peak.png"))
        _draw_times(on_a_gpu, path.with_name(f"{path.stem}_time.png"))


def equal_peaks(rows: Sequence[Fact]) -> list[str]:
    """One line per plan with another way's peak as its budget: its step time over the other's."""
    of_way = {row["way"]: row for row in rows}
    found = []
    for way, row in of_way.items():
        _, separator, other = way.partition(AT_THE_PEAK_OF)
        if separator and other in of_way:
            share = row["step_s"] / of_way[other]["step_s"]
            found.append(f"{way}: {share:.2f} times its step")
    return found


def _table(model: str, rows: Sequence[Fact]) -> Table:
    table = Table(title=f"{model} (MiB)", title_justify="left", box=None)
    table.add_column("", no_wrap=True)
    for heading in ("predicted", *_COUNTS, "step", "gradient difference"):
        table.add_column(heading, justify="right", no_wrap=True)

    plain_s = next((row["step_s"] for row in rows if row["way"].startswith("plain")), None)
    for row in rows:
        peaks = [_predicted(row), *(_peak(row, name) for name in _COUNTS)]
        sizes = [f"{peak / _MIB:,.1f}" if peak > 0 else "-" for peak in peaks]
        pace = f" {row['step_s'] / plain_s:.2f}x" if plain_s else ""

        table.add_row(
            row["way"],
            *sizes,
            f"{1000 * row['step_s']:.1f} ms{pace}",
            f"{row['gradient']:.1e}" if "gradient" in row else "-",
        )

    return table


def _predicted(row: Fact) -> int:
    """The plan's predicted peak, or that of the kernels if Inductor made them."""
    promised: int = row.get("kernels_peak") or row.get("predicted") or 0
    return promised


def _peak(row: Fact, count: str) -> int:
    """The peak of the step alone, without earlier allocations (cuBLAS's workspace)."""
    return int(row[count] - row["base"])


def _draw_peaks(rows: Sequence[Fact], path: Path) -> None:
    """Measured against predicted peaks."""
    planned = [row for row in rows if "predicted" in row]
    figure = new_figure("Peak on the GPU: measured against predicted")
    axes = figure.subplots()

    for model in dict.fromkeys(row["model"] for row in planned):
        mine = [row for row in planned if row["model"] == model]
        axes.plot(
            [_predicted(row) / _MIB for row in mine],
            [_peak(row, "allocated") / _MIB for row in mine],
            "o",
            label=model,
        )

    largest = max((_predicted(row) / _MIB for row in planned), default=1.0)
    axes.plot([0, largest], [0, largest], ":", color="grey", label="equal")
    quiet(axes, x_label="predicted, MiB", y_label="allocated, MiB", grid="both")
    axes.legend(frameon=False)
    save(figure, path)


def _draw_times(rows: Sequence[Fact], path: Path) -> None:
    """Measured step time against peak, relative to plain's: dots are plans, crosses others."""
    figure = new_figure("Step time against peak, both over plain PyTorch's; dots are plans")
    axes = figure.subplots()

    for number, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
        mine = [row for row in rows if row["model"] == model]
        plain = [row for row in mine if row["way"].startswith("plain")]
        if not plain:
            continue

        plain_s, plain_bytes = min(row["step_s"] for row in plain), _peak(plain[0], "allocated")
        for is_plan, marker in ((True, "o"), (False, "x")):
            shown = [row for row in mine if _is_plan(row) == is_plan and row not in plain]
            axes.plot(
                [_peak(row, "allocated") / plain_bytes for row in shown],
                [row["step_s"] / plain_s for row in shown],
                marker,
                color=f"C{number}",
                label=model if is_plan else None,
            )

    quiet(axes, x_label="peak over plain's", y_label="step time over plain's", grid="both")
    axes.legend(frameon=False, loc="upper right")
    save(figure, path)


def _is_plan(row: Fact) -> bool:
    return "predicted" in row
