"""Turns arguments of the command line into objects, or refuses them in one line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from remat.cli.options import Autocast
from remat.core.budget import parse_budget
from remat.core.errors import BudgetError, RematError, ScheduleError
from remat.core.graph import Graph
from remat.core.instance import read_instance
from remat.core.schedule import keep_all_peak
from remat.core.solution import Solution
from remat.solvers import Solver, make_solver
from remat.solvers.registry import FREE_ORDER


class Refused(RematError):
    """An argument can't be used; the message is the line that is shown."""


def solver_named(name: str, **options: Any) -> Solver:
    """Returns the solver called `name`, or refuses it with a list of the known names."""
    with refused("--without" if options.get("without") else "--solver"):
        return make_solver(name, **options)


def free_order_solver(name: str) -> str:
    """Returns the name of the free-order solver; refuses all other names but `auto`."""
    if name not in ("auto", FREE_ORDER):
        raise Refused(
            f"--free-order: the solver {name!r} keeps the order of the file; leave --solver out "
            f"to use {FREE_ORDER!r}"
        )
    return FREE_ORDER


def dtype_of(autocast: Autocast | None) -> Any:
    """Returns torch's type for the option `--autocast`, or None without it."""
    if autocast is None:
        return None
    import torch  # takes seconds; most commands do without

    return getattr(torch, autocast)


def budget_bytes(budget: str, graph: Graph) -> int:
    """Returns the budget in bytes; a percentage refers to the peak of keeping everything."""
    with refused("--budget"):
        return parse_budget(budget, keep_all_bytes=keep_all_peak(graph))


@contextmanager
def refused(option: str) -> Iterator[None]:
    """Turns a `ValueError` about the value of `option` into `Refused`."""
    try:
        yield
    except ValueError as reason:
        raise Refused(f"{option}: {reason}") from None


@contextmanager
def installed_extra() -> Iterator[None]:
    """Turns an `ImportError`, whose message names the extra to install, into `Refused`."""
    try:
        yield
    except ImportError as reason:
        raise Refused(str(reason)) from None


def check_output(path: Path) -> None:
    """Refuses an output path that can't be written, before any work is done."""
    place = Path(os.path.realpath(path))
    if path.is_dir():
        raise Refused(f"--output {path}: this is a folder; a file is needed")
    if path.exists() and not path.is_file():
        return  # a pipe or a device

    if not place.parent.is_dir():
        raise Refused(f"--output {path}: the folder {place.parent} does not exist")
    if not os.access(place.parent, os.W_OK):
        raise Refused(f"--output {path}: you may not write to {place.parent}")


def load_solutions(path: Path, graph: Graph) -> list[Solution]:
    """Returns the solutions in a file, with peak and costs computed again for `graph`."""
    found = Solution.load_all(path)
    try:
        return [solution.on(graph) for solution in found]
    except (ScheduleError, BudgetError) as reason:
        raise Refused(f"{path}: {reason}") from None


def bench_graphs(paths: list[Path]) -> list[tuple[str, Graph]]:
    """Returns the names and graphs of the files; without files, a small transformer."""
    if paths:
        return [(path.stem, read_instance(path)) for path in paths]
    from remat.tracers.synthetic import transformer

    return [("transformer of 6 blocks", transformer(6))]
