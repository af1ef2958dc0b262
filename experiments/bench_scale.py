"""Time and memory against size.

Synthetic training steps up to 100,000 operators, and one traced architecture up to 200 layers.

Each solve runs in its own process, so that the peak resident memory is that of the solve.
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path

from experiments.bench_rows import (
    CONSOLE,
    Row,
    Rows,
    geometric_mean,
    new_table,
    overrun_text,
    percent,
    solve,
    warm_up,
)
from experiments.real_graphs import DEEP, cached_graph
from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.tracers.synthetic import random_layered, transformer

TIME_LIMIT_S, GAP = 60.0, 0.01
_SHARE = 70  # % of the peak of keeping everything
_BLOCKS = (5, 14, 45, 140, 450, 1400, 4550)  # of a synthetic transformer, about 22 operators each
_LAYERED = (50, 150, 500, 1500, 5000)  # forward nodes


def run(rows: Rows, *, folder: Path, time_limit_s: float, gap: float, names: Sequence[str]) -> None:
    """Solves each graph once, from small to large."""
    kinds: dict[str, tuple[int, ...] | tuple[str, ...]] = {
        "transformer": _BLOCKS,
        "layered": _LAYERED,
        "gpt2": DEEP,
    }

    for kind, sizes in kinds.items():
        for size in sizes if not names or kind in names else ():
            if kind == "gpt2":
                # traced here, so that the measured process does not trace
                cached_graph(str(size), folder)

            key = {"family": kind, "size": size, "budget": f"{_SHARE}%"}
            rows.row(key, partial(_alone, kind, size, folder, time_limit_s, gap))


def _alone(kind: str, size: int | str, folder: Path, time_limit_s: float, gap: float) -> Row:
    """Solves in a fresh process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        return executor.submit(_point, kind, size, folder, time_limit_s, gap).result()


def _graph(kind: str, size: int | str, folder: Path) -> Graph:
    if kind == "gpt2":
        return cached_graph(str(size), folder)
    return transformer(int(size)) if kind == "transformer" else random_layered(int(size), seed=0)


def _point(kind: str, size: int | str, folder: Path, time_limit_s: float, gap: float) -> Row:
    warm_up()
    graph = _graph(kind, size, folder)
    budget_bytes = simulate(graph, Schedule.keep_all(graph)).peak_bytes * _SHARE // 100
    _, row = solve(graph, budget_bytes, time_limit_s=time_limit_s, gap=gap)

    memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return row | {
        "operators": graph.num_operators,
        "process_bytes": memory_bytes,
        "seconds_to_1_percent": _seconds_within(row, 0.01),
    }


def _seconds_within(row: Row, gap: float) -> float | None:
    """Returns when a progress report first had cost and bound within a gap."""
    reached = [
        seconds
        for seconds, cost, bound in row["moments"]
        if cost is not None and cost - bound <= gap * cost
    ]
    return reached[0] if reached else None


def show(rows: Sequence[Row], time_limit_s: float) -> None:
    """Prints time and memory against size, and how time grows."""
    table = new_table(
        f"Scale: {_SHARE} % of the peak, {time_limit_s:g} s each, % over keeping everything",
        (
            "family",
            "operators",
            "first in s",
            "1 % in s",
            "ends in s",
            "overhead",
            "bound",
            "gap %",
            "memory",
        ),
    )

    for row in sorted(rows, key=lambda row: (row["family"], row["operators"])):
        seconds = [
            f"{row[name]:.2f}" if row[name] is not None else "-"
            for name in ("seconds_to_first", "seconds_to_1_percent", "seconds")
        ]

        numbers = (
            percent(row["overhead_percent"]),
            percent(row["bound_percent"]),
            percent(row["gap_percent"], is_signed=False),
        )

        table.add_row(
            row["family"],
            f"{row['operators']:,}",
            *seconds,
            *numbers,
            f"{row['process_bytes'] / 2**30:.2f} GiB",
        )

    CONSOLE.print(table)
    _show_growth(rows)
    CONSOLE.print(f"{overrun_text(rows, time_limit_s)}\n")


def _show_growth(rows: Sequence[Row]) -> None:
    for family in dict.fromkeys(row["family"] for row in rows):
        mine = sorted(
            (row for row in rows if row["family"] == family and row["seconds_to_first"]),
            key=lambda row: row["operators"],
        )

        if len(mine) > 1:
            growth, size = (
                geometric_mean(b[name] / a[name] for a, b in pairwise(mine))
                for name in ("seconds_to_first", "operators")
            )
            CONSOLE.print(
                f"{family}: {size:.1f} times the operators take {growth:.1f} times as long to a "
                "first schedule"
            )
