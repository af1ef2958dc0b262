"""What reordering the operators saves.

Annealing of the order and the recomputations, against FastSA and against the graph's own order.

usage: python -m experiments.free_order [--instances FOLDER] [--output FILE] [--time-limit SECONDS]

1. The random layered graphs of FastSA's published results (free order), at 90, 80 and 70 % of
   keeping everything in the file's order. Three seeds, each within FastSA's own time: when
   FastSA's cost was reached, and the final cost.
2. Training steps of GPT, ResNet-50 and MobileNetV2 (roofline costs of an H100): the cost that
   `auto` finds in the traced order, against the cost in any order that the dependencies allow; each
   with its bound, within the same time.

Writes one JSON file, with where and when it was run. `remat` runs a traced step in its own order;
the second table says what another order would save.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
from pathlib import Path
from typing import Any

import remat
from experiments.command_line import add_instances, has_instances, parser_of
from experiments.environment import environment
from experiments.models import make
from remat.core.graph import Graph
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution
from remat.solvers.auto.solver import Auto
from remat.solvers.core.progress import Progress
from remat.solvers.free_order.solver import FreeOrder
from remat.tracers.synthetic import random_layered

log = logging.getLogger("free_order")

INSTANCES = ("random_layered_100", "random_layered_500")
MODELS = ("GPT", "ResNet-50", "MobileNetV2")
BUDGETS = ("70%", "50%")
PUBLISHED_BY = "fastsa_free_order"
SEEDS = (0, 1, 2)
HERE = Path(__file__).resolve()


def anneal_published(instance: dict[str, Any], label: str, time_limit_s: float) -> dict[str, Any]:
    """Returns one row of the first table: one instance at one budget, all seeds."""
    graph = Graph.from_arrays(instance["cost"], instance["size"], instance["edges"])
    published = instance["published"].get(label, {}).get(PUBLISHED_BY)
    limit_s = published["seconds"] if published else time_limit_s
    target_s = graph.cost_s * (1 + published["overhead_percent"] / 100) if published else None

    runs = [_run(graph, instance["budgets"][label], limit_s, target_s, seed) for seed in SEEDS]
    overheads = [run["overhead_percent"] for run in runs]

    row = {
        "instance": instance["name"],
        "budget": label,
        "budget_in_size_unit": instance["budgets"][label],
        "fastsa": published,
    }
    row |= {
        "overhead_percent_median": statistics.median(overheads),
        "overhead_percent_range": [min(overheads), max(overheads)],
    }

    return row | {"time_limit_s": limit_s, "runs": runs}


def _run(
    graph: Graph, budget_bytes: int, limit_s: float, target_s: float | None, seed: int
) -> dict[str, Any]:
    moments: list[Progress] = []
    solution = FreeOrder(gap=0.0, time_limit_s=limit_s, seed=seed, progress=moments.append).solve(
        graph, budget_bytes=budget_bytes
    )

    reached = [
        m.elapsed_s
        for m in moments
        if target_s is not None and m.cost_s is not None and m.cost_s <= target_s * (1 + 1e-12)
    ]

    return {
        "seed": seed,
        "seconds_to_fastsa": round(reached[0], 2) if reached else None,
        **_facts(solution),
    }


def compare_orders(name: str, graph: Graph, label: str, time_limit_s: float) -> dict[str, Any]:
    """Returns one row of the second table: a step at one budget, in its own and in any order."""
    keep_all_bytes = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    budget_bytes = remat.parse_budget(label, keep_all_bytes=keep_all_bytes)

    fixed = Auto(gap=0.0, time_limit_s=time_limit_s).solve(graph, budget_bytes=budget_bytes)
    free = FreeOrder(gap=0.0, time_limit_s=time_limit_s).solve(graph, budget_bytes=budget_bytes)
    saved = 100 * (1 - free.cost_s / fixed.cost_s) if fixed.is_solved and free.is_solved else None

    row = {
        "model": name,
        "operators": graph.num_operators,
        "budget": label,
        "budget_bytes": budget_bytes,
    }

    return row | {
        "own_order": _facts(fixed),
        "any_order": _facts(free),
        "any_order_saves_percent_of_the_step": saved,
    }


def _facts(solution: Solution) -> dict[str, Any]:
    return {
        "status": str(solution.status),
        "cost": solution.cost_s if solution.is_solved else None,
        "overhead_percent": round(100 * solution.overhead, 4) if solution.is_solved else None,
        "bound_percent": round(100 * solution.overhead_bound, 4),
        "peak": solution.peak_bytes,
        "seconds": round(solution.wall_s, 2),
        "recomputations": solution.schedule.num_recomputations if solution.schedule else None,
        "solver": solution.solver,
    }


def published_graphs(folder: Path, time_limit_s: float) -> list[dict[str, Any]]:
    """Returns the rows of the first table."""
    rows = []
    for name in INSTANCES:
        instance = json.loads((folder / f"{name}.json").read_text())
        for label in instance["budgets"]:
            rows.append(anneal_published(instance, label, time_limit_s))
            fastsa = rows[-1]["fastsa"]

            log.info(
                "%s %s: +%s %% (%s), FastSA %s in %s s, reached in %s s",
                *(
                    rows[-1][key]
                    for key in (
                        "instance",
                        "budget",
                        "overhead_percent_median",
                        "overhead_percent_range",
                    )
                ),
                *((fastsa["overhead_percent"], fastsa["seconds"]) if fastsa else ("-", "-")),
                [run["seconds_to_fastsa"] for run in rows[-1]["runs"]],
            )

    return rows


def training_steps(time_limit_s: float) -> list[dict[str, Any]]:
    """Returns the rows of the second table."""
    rows = []
    for name in MODELS:
        workload = make(name)
        graph = remat.trace(workload.model, kwargs=workload.kwargs, costs="roofline:H100")
        for label in BUDGETS:
            rows.append(compare_orders(name, graph, label, time_limit_s))
            own, free = rows[-1]["own_order"], rows[-1]["any_order"]

            log.info(
                "%s %s: own order +%s %% (bound %s %%), any order +%s %% (bound %s %%)", name,
                label,
                own["overhead_percent"], own["bound_percent"], free["overhead_percent"],
                free["bound_percent"],
            )  # fmt: skip

    return rows


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_instances(parser)
    parser.add_argument(
        "--time-limit",
        type=float,
        default=40.0,
        help="seconds per solve if nothing is published (default: 40)",
    )
    parser.add_argument("--output", type=Path, default=HERE.parent / "results" / "free_order.json")

    return parser.parse_args()


def main() -> int:
    """Makes both tables and writes the file; returns 2 if the instances are missing."""
    options = _options()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    if not has_instances(options.instances, INSTANCES):
        return 2

    made = environment()  # before the solves: a commit may follow meanwhile
    compare_orders("warm-up", random_layered(24, seed=0), "60%", 120.0)  # compiles

    result = {
        "environment": made,
        "time_limit_s": options.time_limit,
        "seeds": SEEDS,
        "published_graphs": published_graphs(options.instances, options.time_limit),
        "training_steps": training_steps(options.time_limit),
    }

    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
