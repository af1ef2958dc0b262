"""Every solver against brute force on many random graphs.

Runs `tests/promises/test_many_graphs.py` with a large number of examples.

    python -m experiments.many_graphs [--examples 10000] [--output FILE]

Writes the outcome, with where and when it was run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from experiments.command_line import parser_of
from experiments.environment import environment
from remat.solvers import SOLVER_NAMES
from remat.solvers.registry import FREE_ORDER

HERE = Path(__file__).resolve()


def main() -> int:
    """Runs the test and writes the file; returns the test's exit status."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--examples", type=int, default=10_000, help="random graphs (default: 10000)"
    )
    parser.add_argument("--output", type=Path, default=HERE.parent / "results" / "many_graphs.json")
    options = parser.parse_args()

    made, began = environment(), time.monotonic()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "tests/promises/test_many_graphs.py",
        "--hypothesis-show-statistics",
    ]

    run = subprocess.run(
        command,
        cwd=HERE.parents[1],
        env={**os.environ, "REMAT_EXAMPLES": str(options.examples)},
        text=True,
        stdout=subprocess.PIPE,
    )

    print(run.stdout)
    seen = [
        line.strip(" -")
        for line in run.stdout.splitlines()
        if "passing" in line or "Stopped because" in line
    ]

    result = {
        "environment": made,
        "examples": options.examples,
        "solvers": [*SOLVER_NAMES, FREE_ORDER],
        "is_without_violation": run.returncode == 0,
        "hypothesis": seen,
        "seconds": round(time.monotonic() - began, 1),
    }

    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())
