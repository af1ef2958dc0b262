"""What the command line was given, turned into objects or refused in one line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from remat.core import serialize
from remat.core.budget import parse_budget
from remat.core.errors import RematError, ScheduleError
from remat.core.graph import Graph
from remat.core.instance import read_instance
from remat.core.schedule import Schedule, simulate
from remat.core.solution import Solution
from remat.solvers import Solver, make_solver
from remat.solvers.registry import FREE_ORDER


class Refused(RematError):
    """What was typed can't be used; the message is the one line that is shown."""


def solver_named(name: str, **options: Any) -> Solver:
    """Returns the solver called `name`, or refuses it with the list of those that exist."""
    with _refused("--solver"):
        return make_solver(name, **options)


def free_order_solver(name: str) -> str:
    """Returns the solver that leaves the graph's order, or refuses `name` where it is another
    one.
    """
    if name not in ("auto", FREE_ORDER):
        raise Refused(
            f"--free-order: {name!r} keeps the order of the file; leave --solver out, and "
            f"{FREE_ORDER!r} solves it"
        )
    return FREE_ORDER


def budget_bytes(budget: str, graph: Graph) -> int:
    """Returns the budget in bytes.

    A percentage is one of what keeping everything in `graph` needs.
    """
    with _refused("--budget"):
        return parse_budget(budget, keep_all_bytes=keep_all_bytes(graph) if "%" in budget else None)


def keep_all_bytes(graph: Graph) -> int:
    """Returns the peak of keeping everything."""
    return simulate(graph, Schedule.keep_all(graph)).peak_bytes


@contextmanager
def _refused(option: str) -> Iterator[None]:
    try:
        yield
    except ValueError as reason:
        raise Refused(f"{option}: {reason}") from None


@contextmanager
def installed_extra() -> Iterator[None]:
    """Refuses in one line what needs a package that is not installed; the error names the extra."""
    try:
        yield
    except ImportError as reason:
        raise Refused(str(reason)) from None


def check_folder(path: Path) -> None:
    """Refuses an output path whose folder does not exist, before any work is done for it."""
    if not path.resolve().parent.is_dir():
        raise Refused(f"--output {path}: there is no folder {path.resolve().parent}")


def load_solutions(path: Path, graph: Graph) -> list[Solution]:
    """Returns what `solve --output` or `frontier --output` saved for `graph`."""
    try:
        is_list = path.read_bytes()[:1] == b"["
        found = (
            serialize.load(list[Solution], path, ScheduleError)
            if is_list
            else [Solution.load(path)]
        )
    except OSError as reason:
        raise Refused(f"{path}: {reason.strerror}") from None
    except ScheduleError as reason:
        raise Refused(str(reason)) from None
    if any(s.fingerprint != graph.fingerprint for s in found):
        raise Refused(f"{path} was solved for another graph")
    return found


def bench_graphs(paths: list[Path]) -> list[tuple[str, Graph]]:
    """Returns the named graphs of the files, or a small transformer where there are none."""
    if paths:
        return [(path.stem, read_instance(path)) for path in paths]
    from remat.tracers.synthetic import transformer

    return [("transformer of 6 blocks", transformer(6))]


def import_callable(factory: str) -> Callable[[], tuple[Any, Any]]:
    """Returns what `module:callable` names; modules in the working folder are found."""
    module_name, colon, name = factory.partition(":")
    if not (module_name and colon and name):
        raise Refused(
            f"{factory!r} is not of the form MODULE:CALLABLE, such as my_project.model:make"
        )
    sys.path.insert(0, "")  # the script `remat` does not see the working folder by itself
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as reason:
        raise Refused(f"{factory}: {reason}") from None
    make: Any = getattr(module, name, None)
    if not callable(make):
        raise Refused(f"{factory}: {module_name} has no callable {name!r}")
    return make  # type: ignore[no-any-return]
