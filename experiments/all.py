"""Runs the scripts that make the field's figures and the front page: `make experiments`.

    python -m experiments.all [--only NAME ...]

The scripts run one after the other; each one's time is printed, and their sum. If a script fails,
the others still run, and the exit status is 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.browser import installed_browser
from experiments.command_line import parser_of
from experiments.environment import environment
from experiments.figures import RESULTS
from remat.cli.demo import SEED
from remat.core.files import write_whole

FIGURES = (
    "lecture_chain", "static_memory", "transformer_arithmetic", "reverse_price", "attention",
    "depth_growth", "sharding", "side_by_side",
    "checkmate_figures",
)  # fmt: skip
FRONT_PAGE = ("demo", "front_page", "speed")
IN_A_BROWSER = ("report_page",)
ALL = (*FIGURES, *FRONT_PAGE, *IN_A_BROWSER)


@dataclass(frozen=True)
class Took:
    """Wall seconds of a script, CPU seconds of its processes, and whether it succeeded."""

    wall_s: float
    cpu_s: float
    is_done: bool = True

    def line(self, name: str) -> str:
        """Returns a line of the summary."""
        return (
            f"{name:<24}{self.wall_s:>9.1f} s{self.cpu_s:>9.1f} s of "
            f"CPU{'' if self.is_done else '   FAILED'}"
        )


def timed(name: str) -> Took:
    """Runs a script and returns the time it took."""
    start, before = time.perf_counter(), os.times()
    where = environment(seed=SEED)  # of the demo; before its run: a commit may follow meanwhile
    folder = RESULTS / "demo"
    is_demo = name == "demo"
    command = ["remat", "demo", "--output", str(folder)] if is_demo else [f"experiments.{name}"]

    done = subprocess.run([sys.executable, "-m", *command], check=False)
    after = os.times()
    if is_demo and done.returncode == 0:
        add_environment(folder / "demo.json", where)
    cpu_s = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )

    return Took(round(time.perf_counter() - start, 1), round(cpu_s, 1), done.returncode == 0)


def add_environment(path: Path, where: Mapping[str, Any]) -> None:
    """Adds where and at which commit a result was made, which `remat demo` itself can't know."""
    record = {"environment": dict(where), **json.loads(path.read_text())}
    write_whole(path, f"{json.dumps(record, indent=1)}\n".encode())


def main() -> int:
    """Runs the scripts and prints their times."""
    parser = parser_of(__doc__)
    every = (*FIGURES, *FRONT_PAGE, *(IN_A_BROWSER if installed_browser() else ()))
    parser.add_argument(
        "--only", nargs="+", choices=ALL, metavar="NAME", default=every, help="run only these"
    )

    took = {}
    for name in parser.parse_args().only:
        print(f"== {name}", flush=True)
        took[name] = timed(name)
        print(took[name].line(name), flush=True)

    total = Took(
        round(sum(t.wall_s for t in took.values()), 1),
        round(sum(t.cpu_s for t in took.values()), 1),
    )

    print(
        "== how long they took",
        *(t.line(name) for name, t in took.items()),
        total.line("all"),
        sep="\n",
    )

    return 0 if all(t.is_done for t in took.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
