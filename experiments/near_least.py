"""Solves thousands of random graphs near their least budgets, under short time limits.

    python -m experiments.near_least [--graphs 5000] [--first 0] [--output FILE]

Budgets are 0.9 to 1.1 times the least. A schedule or a `BudgetError` is right; any other
exception, or a bound that is not a number, is wrong (`tests/support/near_least.py` has the problems
and the checks). Writes how often each outcome occurred, with where and when it was run, and the
problems that went wrong.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path

from experiments.command_line import parser_of
from experiments.environment import environment
from tests.support.near_least import Problem, outcome

HERE = Path(__file__).resolve()
_BETWEEN_WRITES = 50  # graphs; a stopped run keeps the results up to the last write


def main() -> int:
    """Solves the graphs and writes the file; returns 1 if one went wrong."""
    parser = parser_of(__doc__)
    parser.add_argument("--graphs", type=int, default=5_000, help="graphs (default: 5000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--output", type=Path, default=HERE.parent / "results" / "near_least.json")
    options = parser.parse_args()

    made, began = environment(), time.monotonic()
    outcomes, kinds = Counter[str](), Counter[str]()
    wrong: dict[str, str] = {}
    for done, seed in enumerate(range(options.first, options.first + options.graphs), 1):
        problem = Problem(seed)
        kinds[problem.kind] += 1
        try:
            outcomes[outcome(problem)] += 1
        except Exception as error:  # noqa: BLE001 - this script looks for any exception
            wrong[repr(problem)] = f"{type(error).__name__}: {error}"
            print(problem, wrong[repr(problem)], file=sys.stderr)

        if done % _BETWEEN_WRITES == 0 or done == options.graphs:
            result = {
                "environment": made,
                "graphs": done,
                "first_seed": options.first,
                "kinds": dict(sorted(kinds.items())),
                "outcomes": dict(sorted(outcomes.items())),
                "wrong": wrong,
                "seconds": round(time.monotonic() - began, 1),
            }
            options.output.write_text(json.dumps(result, indent=1) + "\n")

    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
