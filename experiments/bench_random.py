"""Random layered graphs: three seeds of the generator and three of the solver."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

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
from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.tracers.synthetic import random_layered

TIME_LIMIT_S, GAP = 30.0, 0.0
# nodes drawn, and whether they are mirrored into a training step
_KINDS: Mapping[str, tuple[int, bool]] = {"layered": (100, False), "training": (125, True)}
_SHARES = (90, 80, 70)  # % of the peak of keeping everything
_SEEDS = (0, 1, 2)


def run(rows: Rows, *, folder: Path, time_limit_s: float, gap: float, names: Sequence[str]) -> None:
    """Solves every graph at every budget with every seed."""
    for kind, generator_seed, share, seed in product(_KINDS, _SEEDS, _SHARES, _SEEDS):
        count, is_training = _KINDS[kind]
        name = f"{kind}_{count}"

        if names and name not in names:
            continue
        graph = random_layered(count, seed=generator_seed, is_training=is_training)

        key = {
            "instance": name,
            "generator_seed": generator_seed,
            "budget": f"{share}%",
            "seed": seed,
        }

        rows.row(
            key,
            lambda graph=graph, share=share, seed=seed: _point(  # type: ignore[misc]
                graph, share, seed, time_limit_s, gap
            ),
        )


def _point(graph: Graph, share: int, seed: int, time_limit_s: float, gap: float) -> Row:
    keep_all_bytes = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    _, row = solve(
        graph, keep_all_bytes * share // 100, time_limit_s=time_limit_s, gap=gap, seed=seed
    )
    return row | {"operators": graph.num_operators}


def show(rows: Sequence[Row], time_limit_s: float) -> None:
    """Prints one row per graph and budget: median and spread over the solver's seeds."""
    table = new_table(
        f"Random layered graphs, {len(_SEEDS)} seeds of the solver, {time_limit_s:g} s each: "
        "% over keeping everything",
        ("instance", "graph", "budget", "overhead, median", "least", "most", "bound", "gap %", "s"),
    )

    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["instance"], row["generator_seed"], row["budget"]), []).append(row)

    for (name, generator_seed, budget), group in groups.items():
        table.add_row(name, str(generator_seed), budget, *_cells(group))

    mean_row(
        table,
        rows,
        f"mean of {len(rows)}",
        {
            "graph": "",
            "budget": "",
            "overhead": "overhead",
            "least": "",
            "most": "",
            "bound": "bound",
            "gap": "gap",
            "s": "seconds",
        },
    )

    CONSOLE.print(table)
    CONSOLE.print(f"{overrun_text(rows, time_limit_s)}\n")


def _cells(group: Sequence[Row]) -> Iterator[str]:
    """Yields median and spread over the solver's seeds; the status where none found a schedule."""
    solved = [row for row in group if row["cost"] is not None]
    if not solved:
        yield group[0]["status"]
        return

    overheads = [row["overhead_percent"] for row in solved]
    yield percent(statistics.median(overheads))
    yield percent(min(overheads))
    yield percent(max(overheads))

    bound, gap, seconds = (
        statistics.median(row[column] for row in solved)
        for column in ("bound_percent", "gap_percent", "seconds")
    )
    yield percent(bound)
    yield percent(gap, is_signed=False)
    yield f"{seconds:.1f}"
