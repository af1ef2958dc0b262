"""How much compiling the search's inner loops helps: numba against plain Python.

    python -m experiments.compiled_search [--output FILE]

Measures annealing moves per second and the time of one greedy schedule with eviction, each way in
its own process, on random layered training graphs at 70 % of the peak. Times are CPU times of one
thread, without compilation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from experiments.command_line import parser_of
from experiments.environment import environment

HERE = Path(__file__).resolve()
SEED = 0
_NODES = (50, 200, 1_000)  # forward nodes n; a step has 2 n + 1 operators
_TIMES = 5  # timed evictions, of a millisecond each; their median is reported
_MOVES = {"compiled": 200_000, "plain": 500}


def measure(way: str) -> list[dict[str, Any]]:
    """Returns one row per graph, measured in this process, with numba or without."""
    import numpy as np

    from remat.core.schedule import Schedule, simulate
    from remat.solvers.search.annealing import LocalSearch, Round
    from remat.solvers.search.greedy_eviction import Rule, steps_with_eviction
    from remat.tracers.synthetic import random_layered

    rows = []
    for num_nodes in _NODES:
        graph = random_layered(num_nodes, seed=SEED)
        budget = simulate(graph, Schedule.keep_all(graph)).peak_bytes * 70 // 100

        start = np.arange(graph.num_operators)
        # compiles before the clock starts
        LocalSearch(graph, budget_bytes=budget, seed=SEED).run(start, Round(20, 1e-3, 1e-6))

        local, began = LocalSearch(graph, budget_bytes=budget, seed=SEED), time.process_time()
        local.run(start, Round(_MOVES[way], 1e-3, 1e-6))
        annealing_s = time.process_time() - began

        steps_with_eviction(graph, budget, Rule.CHEAP)
        eviction_s = []
        for _ in range(_TIMES):
            began = time.process_time()
            steps_with_eviction(graph, budget, Rule.CHEAP)
            eviction_s.append(time.process_time() - began)

        moves_a_s = _MOVES[way] / annealing_s
        rows.append(
            {
                "operators": graph.num_operators,
                "moves_a_s": moves_a_s,
                "eviction_s": statistics.median(eviction_s),
            }
        )

    return rows


def _in_a_process(way: str) -> list[dict[str, Any]]:
    run = subprocess.run(
        [sys.executable, "-m", "experiments.compiled_search", "--way", way],
        check=True,
        capture_output=True,
        text=True,
        cwd=HERE.parents[1],
    )

    rows: list[dict[str, Any]] = json.loads(run.stdout)
    return rows


def main() -> None:
    """Measures both ways, prints their ratio and writes the file."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--output", type=Path, default=HERE.parent / "results" / "compiled_search.json"
    )

    parser.add_argument("--way", choices=list(_MOVES), help=argparse.SUPPRESS)
    options = parser.parse_args()

    if options.way:
        if options.way == "plain":
            sys.modules["numba"] = None  # type: ignore[assignment]  # hidden from this process
        print(json.dumps(measure(options.way)))
        return

    result: dict[str, Any] = {
        "environment": environment(seed=SEED),
        **{way: _in_a_process(way) for way in _MOVES},
    }

    result["ratio"] = [
        {
            "operators": fast["operators"],
            "moves_a_s": round(fast["moves_a_s"] / slow["moves_a_s"], 1),
            "eviction_s": round(slow["eviction_s"] / fast["eviction_s"], 1),
        }
        for fast, slow in zip(result["compiled"], result["plain"], strict=True)
    ]

    print(json.dumps(result["ratio"], indent=1))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
