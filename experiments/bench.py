"""The benchmark: one table per set of instances, as JSON and CSV, and pictures.

    python -m experiments.bench                                  everything, an hour or more
    python -m experiments.bench published --time-limit 60        one set
    python -m experiments.bench real --names gpt2_12 unet        some graphs of a set
    python -m experiments.bench tables pictures                  from the existing results

Sets: `published` (instances from papers, beside the published results), `proof` (the networks among
them, until the cost is proved to be within 0.2 % of the optimum, U-Net within 0.5 %), `random`
(layered graphs, three seeds of the generator and of the solver), `real` (traced training steps,
beside every baseline of the field at the same simulated peak), `real_proof` (points of `real` that
a minute does not prove to within 1 %, with ten minutes each), `frontier` (20 budgets in the time of
a few solves), `scale` (time and memory against size, to 100,000 operators).

Each row is written when it is finished, and an interrupted run continues where it stopped. All rows
of a file come from one commit; at another commit, or with `--fresh`, they are made again.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import platformdirs

from experiments import (
    bench_frontier,
    bench_pictures,
    bench_proof,
    bench_published,
    bench_random,
    bench_real,
    bench_real_proof,
    bench_scale,
)
from experiments.bench_rows import Row, Rows, warm_up
from experiments.command_line import INSTANCES_VARIABLE, add_instances, parser_of

HERE = Path(__file__).resolve()
SETS: dict[str, Any] = {
    "published": bench_published,
    "proof": bench_proof,
    "random": bench_random,
    "real": bench_real,
    "real_proof": bench_real_proof,
    "frontier": bench_frontier,
    "scale": bench_scale,
}
_OF_PUBLISHED = ("published", "proof")
_LOG = logging.getLogger("bench")


def run_set(name: str, options: argparse.Namespace) -> bool:
    """Runs one set and prints its table; returns False if its instances are missing."""
    module = SETS[name]
    limit_s = options.time_limit if options.time_limit is not None else module.TIME_LIMIT_S
    gap = options.gap if options.gap is not None else module.GAP
    folder = options.instances if name in _OF_PUBLISHED else options.graphs

    if name in _OF_PUBLISHED and not any(folder.glob("*.json")):
        _LOG.error(
            "%s has no published instances; give their folder with --instances or %s",
            folder,
            INSTANCES_VARIABLE,
        )
        return False

    rows = Rows(options.output, name, {"time_limit_s": limit_s, "gap": gap}, is_fresh=options.fresh)
    module.run(rows, folder=folder, time_limit_s=limit_s, gap=gap, names=options.names)
    module.show(rows.rows, limit_s)

    return True


def show_results(folder: Path) -> None:
    """Prints the tables of the existing results."""
    for name, module in SETS.items():
        path = folder / f"bench_{name}.json"
        if path.is_file():
            result = json.loads(path.read_text())
            module.show(result["rows"], result["options"]["time_limit_s"])


def draw(folder: Path) -> None:
    """Draws the pictures of the existing results."""
    rows: dict[str, Sequence[Row]] = {}
    for name in SETS:
        path = folder / f"bench_{name}.json"
        rows[name] = json.loads(path.read_text())["rows"] if path.is_file() else []
    for path in bench_pictures.draw(rows, folder):
        _LOG.info("drew %s", path)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument(
        "what",
        nargs="*",
        metavar="WHAT",
        help=f"any of {', '.join([*SETS, 'tables', 'pictures'])} (default: everything)",
    )
    parser.add_argument(
        "--time-limit", type=float, help="seconds per solve (default: the set's own)"
    )
    parser.add_argument(
        "--gap", type=float, help="fraction at which a solve stops (default: the set's own)"
    )
    parser.add_argument("--names", nargs="+", default=[], help="only these instances of the sets")

    add_instances(parser)
    parser.add_argument(
        "--graphs",
        type=Path,
        default=platformdirs.user_cache_path("remat") / "bench",
        help="folder that keeps traced graphs",
    )
    parser.add_argument(
        "--output", type=Path, default=HERE.parent / "results", help="folder of the results"
    )

    parser.add_argument("--fresh", action="store_true", help="make existing rows again")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the requested sets; returns 2 if the instances of a set are missing."""
    parser = _parser()
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    _LOG.setLevel(logging.INFO)

    steps: dict[str, Callable[[], object]] = {
        "tables": lambda: show_results(options.output),
        "pictures": lambda: draw(options.output),
    }

    asked = options.what or [*SETS, "pictures"]
    if unknown := sorted(set(asked) - {*SETS, *steps}):
        parser.error(f"{', '.join(unknown)}: not one of {', '.join([*SETS, *steps])}")

    if any(name in SETS for name in asked):
        warm_up()

    is_complete = True
    for name in asked:
        is_complete &= run_set(name, options) if name in SETS else steps[name]() is None

    return 0 if is_complete else 2


if __name__ == "__main__":
    sys.exit(main())
