"""Rows of a benchmark, one per solve.

Each is saved as soon as it is made, so that an interrupted run continues where it stopped.
"""

from __future__ import annotations

import csv
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.environment import environment
from remat.core.graph import Graph
from remat.core.solution import Solution, Status
from remat.solvers.auto.minimum import minimum
from remat.solvers.auto.solver import Auto
from remat.solvers.core.compiled import is_ready
from remat.solvers.core.progress import Progress
from remat.solvers.search.annealing import anneal
from remat.tracers.synthetic import random_layered

Row = dict[str, Any]
WIDTH = 112  # columns of the tables
CONSOLE = Console(width=WIDTH, highlight=False)
_MOST_MOMENTS = 200
_LOG = logging.getLogger("bench")


class Rows:
    """The rows of one set: `FOLDER/bench_NAME.json`, and a CSV of their plain columns.

    Rows may come from several runs at one commit: each records its date and processor. The file
    records the environment of the last run.

    Attributes:
        options: what all rows were made with: the options given, and the commit.
    """

    def __init__(
        self, folder: Path, name: str, options: Mapping[str, Any], *, is_fresh: bool
    ) -> None:
        """Keeps the rows that were made with the same options at this commit, unless `is_fresh`."""
        self._environment = environment()  # before the solves: a commit may follow meanwhile
        self._path = folder / f"bench_{name}.json"
        self.options = {**options, "commit": self._environment["commit"]}
        self.rows: list[Row] = []

        if not is_fresh and self._path.is_file():
            kept = json.loads(self._path.read_text())
            if kept["options"] == self.options:
                self.rows = kept["rows"]
                _LOG.info(
                    "%s: %d existing rows are kept (--fresh makes them again)",
                    self._path.name,
                    len(self.rows),
                )
            else:
                _LOG.info(
                    "%s was made with other options or at another commit (%s) and is made again",
                    self._path.name,
                    kept["options"],
                )

    def row(self, key: Mapping[str, Any], make: Callable[[], Row]) -> Row:
        """Returns the row of `key`; makes and writes it if it does not exist yet."""
        found = self.find(key)
        if found is not None:
            return found

        _LOG.info("%s", ", ".join(f"{name} {value}" for name, value in key.items()))
        self.rows.append(
            {
                **key,
                **make(),
                **{name: self._environment[name] for name in ("commit", "date", "processor")},
            }
        )
        self._write()
        return self.rows[-1]

    def find(self, key: Mapping[str, Any]) -> Row | None:
        """Returns the row of `key`; None if it does not exist yet."""
        for row in self.rows:
            if all(row.get(name) == value for name, value in key.items()):
                return row
        return None

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        environment, options = json.dumps(self._environment), json.dumps(self.options)
        head = f'{{"environment": {environment},\n"options": {options},\n"rows": [\n'
        _replace(self._path, head + ",\n".join(json.dumps(row) for row in self.rows) + "\n]}\n")
        self._write_csv(self._path.with_suffix(".csv"))

    def _write_csv(self, path: Path) -> None:
        columns = dict.fromkeys(
            name
            for row in self.rows
            for name, value in row.items()
            if not isinstance(value, list | dict)
        )

        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(columns), extrasaction="ignore")
            writer.writeheader()
            writer.writerows(self.rows)


def _replace(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    fresh = path.with_suffix(".tmp")
    fresh.write_text(text)
    os.replace(fresh, path)


def warm_up() -> None:
    """Waits for the compiler, so that no row includes its time.

    A graph of a few operators is not enough: it is solved exactly, and nothing is compiled.
    """
    if not is_ready(anneal):
        minimum(random_layered(8, seed=0))


def solve(
    graph: Graph, budget_bytes: int, *, time_limit_s: float, gap: float, seed: int = 0
) -> tuple[Solution, Row]:
    """Runs `Auto` and returns its solution with the row that describes the solve."""
    moments: list[Progress] = []
    began, cpu = time.perf_counter(), time.process_time()

    solution = Auto(gap=gap, time_limit_s=time_limit_s, seed=seed, progress=moments.append).solve(
        graph, budget_bytes=budget_bytes
    )
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu

    row = facts(solution) | {
        "seconds": round(wall_s, 3),
        "cpu_seconds": round(cpu_s, 3),
        "solver": solution.solver,
    }

    found = [m.elapsed_s for m in moments if m.cost_s is not None]
    row["seconds_to_first"] = round(found[0], 3) if found else None

    return solution, row | {
        "moments": [_moment(m) for m in moments[:: 1 + len(moments) // _MOST_MOMENTS]]
    }


def _moment(moment: Progress) -> list[float | None]:
    """Seconds, best cost and bound."""
    return [round(moment.elapsed_s, 3), moment.cost_s, moment.bound_s]


def facts(solution: Solution) -> Row:
    """Returns the numbers of a solution; None for those it does not have."""
    is_solved = solution.is_solved
    has_bound = solution.status is not Status.INFEASIBLE and math.isfinite(solution.lower_bound_s)

    return {
        "status": str(solution.status),
        "cost": solution.cost_s if is_solved else None,
        "overhead_percent": round(100 * solution.overhead, 5) if is_solved else None,
        "bound": solution.lower_bound_s if has_bound else None,
        "bound_percent": round(100 * solution.overhead_bound, 5) if has_bound else None,
        "gap_percent": round(100 * solution.gap, 5) if is_solved else None,
        "budget_bytes": solution.budget_bytes,
        "peak_bytes": solution.peak_bytes if is_solved else None,
        "recomputations": solution.schedule.num_recomputations if solution.schedule else None,
    }


def geometric_mean(numbers: Iterable[float]) -> float:
    """Returns the geometric mean of positive numbers; nan without any."""
    logs = [math.log(number) for number in numbers]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan


def mean_seconds(rows: Iterable[Mapping[str, Any]]) -> float:
    """Returns the geometric mean of the rows' seconds.

    Seconds are rounded to milliseconds; zero counts as one millisecond.
    """
    return geometric_mean(max(row["seconds"], 1e-3) for row in rows)


def percent(number: float | None, *, is_signed: bool = True) -> str:
    """Returns a percentage for a table."""
    return (
        "-"
        if number is None
        else f"{round(number, 3) + 0.0:+.3f}"
        if is_signed
        else f"{number:.3f}"
    )


def overrun_text(rows: Sequence[Row], limit_s: float) -> str:
    """Says whether all solves kept their time limit (the row's, or else `limit_s`)."""
    limits = [
        (row["seconds"], row.get("time_limit_s", limit_s))
        for row in rows
        if row.get("seconds") is not None
    ]

    seconds, limit_s = max(limits, key=lambda pair: pair[0] / pair[1], default=(0.0, limit_s))
    is_kept = seconds <= 1.1 * limit_s

    return (
        f"longest solve {seconds:.1f} s of {limit_s:.3g} s: the limit is "
        f"{'kept within 10 %' if is_kept else 'NOT kept within 10 %'}"
    )


def mean_row(table: Table, rows: Sequence[Row], label: str, columns: Mapping[str, str]) -> None:
    """Ends a table with a row of means.

    Times and costs over keeping everything have geometric means, the gap an arithmetic mean.

    Args:
        table: the table to which the row is added; it has `columns` in this order.
        rows: the rows to average; those without a schedule are left out.
        label: the text of the first column.
        columns: what each further column shows: `overhead`, `bound`, `gap`, `seconds` or nothing.
    """
    solved = [row for row in rows if row["cost"] is not None]
    if not solved:
        return

    numbers = {
        "overhead": percent(
            100 * (geometric_mean(1 + row["overhead_percent"] / 100 for row in solved) - 1)
        ),
        "bound": percent(
            100 * (geometric_mean(1 + row["bound_percent"] / 100 for row in solved) - 1)
        ),
        "gap": percent(sum(row["gap_percent"] for row in solved) / len(solved), is_signed=False),
        "seconds": f"{mean_seconds(solved):.2f}",
        "": "",
    }

    table.add_section()
    table.add_row(label, *(numbers[kind] for kind in columns.values()), style="bold")


def new_table(title: str, columns: Sequence[str], *, num_left: int = 1) -> Table:
    """Returns an empty table as wide as the others; numbers are right-aligned."""
    table = Table(
        title=title, title_justify="left", box=None, pad_edge=False, width=WIDTH, title_style="bold"
    )
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < num_left else "right", no_wrap=True)
    return table
