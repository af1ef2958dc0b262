"""Options and exit statuses that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from remat.core.solution import Status
from remat.solvers import SOLVER_NAMES
from remat.solvers.registry import FREE_ORDER

EXIT_CODES = {Status.OPTIMAL: 0, Status.FEASIBLE: 0, Status.INFEASIBLE: 3, Status.NO_SOLUTION: 4}
MOST_POINTS = 1000  # of a curve; more would take hours, and can't be told apart in a picture


class Format(StrEnum):
    """How results are written to stdout."""

    TABLE = "table"
    JSON = "json"


class Autocast(StrEnum):
    """The types of `torch.autocast`."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Picture(StrEnum):
    """The pictures that `plot` draws."""

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
        help='Bytes, "8GiB", "7.5GB", or "60%" of the peak of keeping everything.',
    ),
]
SolverOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"One of: {', '.join(SOLVER_NAMES)}; or {FREE_ORDER}, which may reorder.",
    ),
]
ExecutorOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="eager for operators; inductor for fused kernels, on a device of this machine.",
    ),
]
AutocastOption = Annotated[
    Autocast | None,
    typer.Option(help="The type of torch.autocast that the step runs under on --device."),
]
TimeLimitOption = Annotated[
    float,
    typer.Option(
        min=0.001, metavar="S", help="Seconds after which the best solution so far is returned."
    ),
]
GapOption = Annotated[
    float,
    typer.Option(
        min=0.0,
        metavar="FRACTION",
        help="Stop once the cost is proved to be within this fraction of the optimum.",
    ),
]
WithoutOption = Annotated[
    list[str],
    typer.Option(
        metavar="TECHNIQUE",
        help="Switch off a technique of `auto`, such as `window`; may be repeated. An unknown name "
        "prints the list.",
    ),
]
FormatOption = Annotated[
    Format, typer.Option("--format", help="A table to read, or JSON for programs.")
]
