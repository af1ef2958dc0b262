"""What options and arguments the commands share: their types, and what their help says."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from remat.solvers import SOLVER_NAMES

MOST_POINTS = 1000  # of a curve: more are no picture, and take hours


class Format(StrEnum):
    """How results are written to stdout."""

    TABLE = "table"
    JSON = "json"


class Picture(StrEnum):
    """What `plot` draws."""

    MEMORY = "memory"
    SCHEDULE = "schedule"
    TRADEOFF = "tradeoff"


InstanceArgument = Annotated[
    Path,
    typer.Argument(
        metavar="INSTANCE.json", help="A saved graph, or an object with cost, size and edges."
    ),
]
BudgetOption = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help='Bytes, or a text such as "8GiB", "7.5GB" or "60%" of keeping everything.',
    ),
]
SolverOption = Annotated[
    str, typer.Option(metavar="NAME", help=f"One of: {', '.join(SOLVER_NAMES)}.")
]
TimeLimitOption = Annotated[
    float,
    typer.Option(
        min=0.0, metavar="S", help="Seconds after which the best found so far is returned."
    ),
]
GapOption = Annotated[
    float,
    typer.Option(
        min=0.0,
        metavar="FRACTION",
        help="Stop as soon as the cost is proved this close to the least.",
    ),
]
WithoutOption = Annotated[
    list[str],
    typer.Option(metavar="TECHNIQUE", help="Switch a technique of `auto` off; may be repeated."),
]
FormatOption = Annotated[
    Format, typer.Option("--format", help="A table to read, or JSON for programs.")
]
