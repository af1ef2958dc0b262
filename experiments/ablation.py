"""What each technique of `auto` is worth: hard points are solved with and without it.

    python -m experiments.ablation FOLDER [--instances DIR] [--only NAME ...] [--seconds 20]

FOLDER keeps the traced graphs between runs (`real_graphs`), DIR has published instances. A
technique is switched off only at points where it ran in the full solve; elsewhere it changes
nothing. Each seed runs in its own process on its own core, so two seeds run at the same time
without disturbing each other. Each row is written when it is made, and an interrupted run continues
where it stopped. All rows of a file come from one commit; at another commit they are made again. At
each point, the median cost, gap and time over the seeds without the technique are compared with
those of the full solve.

A technique *helps* at a point if without it the cost is 0.1 % higher or the gap is 0.3 points
wider; it *harms* if the opposite holds. A technique that helps at fewer than three points is
dropped.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from threading import Lock
from typing import Any

from experiments.bench_real import budgets_of
from experiments.bench_rows import Row, Rows, facts, warm_up
from experiments.command_line import parser_of
from experiments.real_graphs import BENCHMARKED, cached_graph
from remat.core.graph import Graph
from remat.core.instance import read_instance
from remat.core.schedule import Schedule, simulate
from remat.solvers.auto.solver import NAMES, PARTS, Auto
from remat.solvers.auto.technique import Technique
from remat.tracers.synthetic import random_layered

SEEDS = (0, 1)
COST, GAP = 0.1, 0.3  # percent of the cost and points of the gap: smaller changes don't count
LEAST_HELPED = 3  # points where a technique must help to be kept
NOTHING = "nothing"  # stands for the full solve, in which nothing is switched off
# techniques that were measured and are gone, and the commit that removed them and says why
REMOVED = {"tree": "5b4296d"}
ALWAYS = ("keep-all", "window", "families", "annealing")  # every other technique needs these

# points that were open after five seconds in `bench_published`, `bench_real` and `bench_random`
PUBLISHED = {
    "checkmate_resnet50": ("7GB", "6GB", "5GB"),
    "checkmate_unet": ("7GB", "6GB", "5GB"),
    "random_layered_100": ("70%",),
    "random_layered_500": ("80%", "70%"),
}
TRACED = {
    "gpt2_12": ("50%", "least"),
    "bert_large": ("least",),
    "t5_large": ("50%", "40%", "least"),
    "vit_large": ("least",),
    "resnet50": ("least",),
    "densenet121": ("50%", "40%", "least"),
    "unet": ("60%", "40%", "least"),
    "mobilenet_v2": ("30%", "least"),
}
RANDOM = (1, 2)  # seeds of layered graphs of 100 nodes, at 70 % of keeping everything


@dataclass(frozen=True)
class Point:
    """A graph and a budget."""

    name: str
    graph: Graph
    budget_bytes: int


def points(folder: Path, instances: Path | None, rows: Rows) -> Iterator[Point]:
    """Yields the points, one graph after the other."""
    for name, labels in PUBLISHED.items():
        if instances is None:
            break

        path = instances / f"{name}.json"
        graph, budgets = read_instance(path), _published_budgets(path)
        for label in labels:
            yield Point(f"{name} {label}", graph, budgets[label])

    for seed in RANDOM:
        graph = random_layered(100, seed=seed)
        peak_bytes = simulate(graph, Schedule.keep_all(graph)).peak_bytes
        yield Point(f"layered_100 seed {seed} 70%", graph, peak_bytes * 70 // 100)

    for name, labels in TRACED.items():
        assert name in BENCHMARKED
        graph = cached_graph(name, folder)
        budgets = budgets_of(rows, name, graph)
        for label in labels:
            yield Point(f"{name} {label}", graph, budgets[label])


def _published_budgets(path: Path) -> dict[str, int]:
    return {label: int(size) for label, size in json.loads(path.read_text())["budgets"].items()}


class _Started(logging.Handler):
    """Collects the names of the techniques that start."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.names: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.names.add(record.getMessage())


@contextmanager
def _starting() -> Iterator[set[str]]:
    """Yields a set that gets the names of techniques as they start."""
    handler, logger = _Started(), logging.getLogger(Technique.__module__)
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield handler.names
    finally:
        logger.removeHandler(handler)


def has_run(name: str, ran: Sequence[str]) -> bool:
    """True if a technique ran, or another one that it is a part of."""
    return not {name, *PARTS.get(name, ())}.isdisjoint(ran)


def _solve(point: Point, without: str, seed: int, time_limit_s: float) -> Row:
    solver = Auto(
        gap=0.0,
        time_limit_s=time_limit_s,
        seed=seed,
        without=() if without == NOTHING else (without,),
    )

    with _starting() as ran:
        solution = solver.solve(point.graph, budget_bytes=point.budget_bytes)

    return facts(solution) | {
        "seconds": round(solution.wall_s, 3),
        "found_by": solution.found_by,
        "proved_by": solution.proved_by,
        "ran": sorted(ran),
    }


def _begin(number: int) -> None:
    """Prepares a process for its solves, on one core."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})
    warm_up()


def _run(
    measured: Sequence[Point],
    names: Sequence[str],
    time_limit_s: float,
    rows: Rows,
    writing: Lock,
    seed: int,
) -> None:
    """Makes the rows of a seed, in one process on a core of its own."""
    with ProcessPoolExecutor(1, get_context("spawn"), _begin, (SEEDS.index(seed),)) as process:

        def row(point: Point, without: str) -> Row:
            key = {"point": point.name, "seed": seed, "without": without}
            with writing:
                found = rows.find(key)
            if found is None:
                made = process.submit(_solve, point, without, seed, time_limit_s).result()
                with writing:
                    found = rows.row(key, lambda: made)
            return found

        for point in measured:
            ran = row(point, NOTHING)["ran"]
            for name in names:
                if has_run(name, ran):
                    row(point, name)


@dataclass(frozen=True)
class Change:
    """How one point changes without a technique: positive where the technique helped.

    Attributes:
        cost_percent: change of the cost, in percent of the full solve's; infinite if no schedule
            was found.
        gap_points: change of the gap, in percentage points.
        seconds: change of the solve's wall time.
    """

    cost_percent: float
    gap_points: float
    seconds: float

    @property
    def helps(self) -> bool:
        """True if the technique helps at this point."""
        return self.cost_percent >= COST or self.gap_points >= GAP

    @property
    def harms(self) -> bool:
        """True if the solve is better without it."""
        return not self.helps and (self.cost_percent <= -COST or self.gap_points <= -GAP)


def change_of(full: Sequence[Row], without: Sequence[Row]) -> Change:
    """Returns what a technique changes, by medians over the seeds."""

    def median(rows: Sequence[Row], field: str) -> float:
        return statistics.median(float("inf") if row[field] is None else row[field] for row in rows)

    cost, cost_without = median(full, "cost"), median(without, "cost")
    return Change(
        100 * (cost_without / cost - 1),
        median(without, "gap_percent") - median(full, "gap_percent"),
        median(without, "seconds") - median(full, "seconds"),
    )


def changes(rows: Sequence[Row]) -> dict[str, list[Change]]:
    """Returns the changes of each technique, one per point where both were solved."""
    found: dict[str, list[Change]] = {}
    solved = [row for row in rows if "without" in row]

    for name in dict.fromkeys(row["point"] for row in solved):
        here = [row for row in solved if row["point"] == name]
        full = [row for row in here if row["without"] == NOTHING and row["cost"] is not None]

        for technique in dict.fromkeys(row["without"] for row in here):
            without = [row for row in here if row["without"] == technique]
            if technique != NOTHING and full:
                found.setdefault(technique, []).append(change_of(full, without))

    return found


def page(rows: Sequence[Row], options: Mapping[str, Any]) -> str:
    """Returns the table with a caption: where the rows come from, and what its columns mean."""
    solved = [row for row in rows if "without" in row]
    points, seeds = ({row[field] for row in solved} for field in ("point", "seed"))
    removed = [
        f" `{name}` was removed afterwards ({commit} says why)."
        for name, commit in REMOVED.items()
        if any(row["without"] == name for row in solved)
    ]

    return (
        f"Each technique of `auto` switched off, at commit {options['commit']}: {len(points)} hard "
        f"points, {len(seeds)} seeds, {options['time_limit_s']:.3g} s per solve, one core each. A "
        f"technique *helps* at a point if without it the cost is {COST:g} % higher or the gap "
        f"{GAP:g} points wider, by medians over the seeds, and *harms* if the opposite holds. It "
        f"*goes* if it helps at fewer than {LEAST_HELPED} points and no other needs it; "
        f"`docs/architecture.md` names those that stayed nevertheless.{''.join(removed)}\n\n"
        f"{table(rows)}"
    )


def table(rows: Sequence[Row]) -> str:
    """Returns one line per technique: points helped and harmed, and the largest changes."""
    lines = [
        "| without | points | helps | harms | largest change of cost "
        "| largest change of gap, in points | median change of seconds | verdict |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]

    for technique, all_changes in changes(rows).items():
        helps = sum(change.helps for change in all_changes)
        harms = sum(change.harms for change in all_changes)
        is_kept = technique in ALWAYS or helps >= LEAST_HELPED

        cells = (
            technique,
            str(len(all_changes)),
            str(helps),
            str(harms),
            f"{max(change.cost_percent for change in all_changes):+.2f} %",
            f"{max(change.gap_points for change in all_changes):+.2f}",
            f"{statistics.median(change.seconds for change in all_changes):+.1f}",
            "stays" if is_kept else "goes",
        )
        lines.append(f"| {' | '.join(cells)} |")

    return "\n".join(lines) + "\n"


def main() -> None:
    """Solves, writes and prints."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="folder that keeps traced graphs")
    parser.add_argument("--instances", type=Path, help="folder of published instances")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument("--seconds", type=float, default=20.0, help="time limit of each solve")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    rows = Rows(asked.output, "ablation", {"time_limit_s": asked.seconds}, is_fresh=False)
    warm_up()
    measured = list(points(asked.folder, asked.instances, rows))
    run = partial(_run, measured, asked.only, asked.seconds, rows, Lock())
    with ThreadPoolExecutor(len(SEEDS)) as threads:
        list(threads.map(run, SEEDS))

    text = page(rows.rows, rows.options)
    (asked.output / "bench_ablation.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
