"""The Checkmate MILP on the graphs of the Checkmate paper, against the published costs.

usage: python -m experiments.checkmate_published [--instances FOLDER] [--time-limit SECONDS]
[--output FILE]

VGG-19 with costs in FLOP for one 224x224 image (Checkmate's own notebook) and VGG-16 at batch 176
on a P100 (the logs of utsaslab/monet-schedules). Each is solved at the budgets of the logs, where
Gurobi proved the optimum on 12 threads. Writes one JSON file: for each point our cost, bound,
status and seconds beside the published ones, and where and when it was run.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from experiments.command_line import add_instances, has_instances, parser_of
from experiments.environment import environment
from remat.core.graph import Graph
from remat.solvers.checkmate.milp import MILP

log = logging.getLogger("checkmate_published")

POINTS = (
    ("checkmate_vgg19", "51380224"),
    ("checkmate_vgg16", "8GB"),
    ("checkmate_vgg16", "9GB"),
    ("checkmate_vgg16", "10GB"),
)
PUBLISHED_BY = "checkmate_milp_gurobi_12_threads"
HERE = Path(__file__).resolve()


def run(instance: dict[str, Any], label: str, *, time_limit_s: float) -> dict[str, Any]:
    """Returns one row of the table: the MILP on one instance at one budget."""
    graph = Graph.from_arrays(
        instance["cost"],
        instance["size"],
        instance["edges"],
        first_backward=instance.get("first_backward"),
    )

    budget = instance["budgets"][label]
    began = time.perf_counter()
    solution = MILP(time_limit_s=time_limit_s).solve(graph, budget_bytes=budget)
    seconds = time.perf_counter() - began
    published = instance["published"][label][PUBLISHED_BY]

    return {
        "instance": instance["name"],
        "budget": label,
        "budget_in_size_unit": budget,
        "size_unit": instance["size_unit"],
        "cost_unit": instance["cost_unit"],
        "status": str(solution.status),
        "cost": solution.cost_s if solution.is_solved else None,
        "bound": solution.lower_bound_s,
        "peak": solution.peak_bytes,
        "overhead_percent": round(100 * solution.overhead, 4),
        "seconds": round(seconds, 3),
        "published_cost": published["cost"],
        "published_seconds": published["seconds"],
        "solver": solution.solver,
        "steps": solution.schedule.steps if solution.schedule else None,
    }


def run_all(folder: Path, time_limit_s: float) -> list[dict[str, Any]]:
    """Returns the rows of the table."""
    rows = []
    for name, label in POINTS:
        instance = json.loads((folder / f"{name}.json").read_text())
        row = run(instance, label, time_limit_s=time_limit_s)
        rows.append(row)

        log.info(
            "%s %s: %s, cost %s (published %s), bound %s, %.2f s (published %s s)",
            *(
                row[key]
                for key in (
                    "instance",
                    "budget",
                    "status",
                    "cost",
                    "published_cost",
                    "bound",
                    "seconds",
                    "published_seconds",
                )
            ),
        )

    return rows


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_instances(parser)
    parser.add_argument(
        "--time-limit", type=float, default=3600.0, help="seconds per point (default: 3600)"
    )
    parser.add_argument(
        "--output", type=Path, default=HERE.parent / "results" / "checkmate_published.json"
    )

    return parser.parse_args()


def main() -> int:
    """Runs all points and writes the file; returns 2 if the instances are missing."""
    options = _options()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    if not has_instances(options.instances, (name for name, _ in POINTS)):
        return 2

    rows = run_all(options.instances, options.time_limit)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(
        json.dumps(
            {"environment": environment(), "time_limit_s": options.time_limit, "rows": rows},
            indent=1,
        )
        + "\n"
    )

    return 0


if __name__ == "__main__":
    sys.exit(main())
