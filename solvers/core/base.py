"""The solvers' base class: options in the constructor, problem in the call, a `Solution` out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from remat.core.graph import Graph
from remat.core.solution import Solution
from remat.solvers.core.progress import Progress, ProgressCallback

# the least value of options that several methods have; for `threads`, 0 is "as many as it likes"
_LEAST = {"gap": 0, "threads": 0, "rounds": 1, "num_samples": 1, "most_states": 1}


@dataclass(frozen=True)
class Solver(ABC):
    """A method for solving rematerialization under a memory budget.

    Its `repr` is its configuration.
    """

    def __post_init__(self) -> None:
        """Raises `ValueError` for an option out of range, if several methods have that option."""
        for option in fields(self):
            value: Any = getattr(self, option.name)
            if not isinstance(value, int | float):
                continue
            if option.name == "time_limit_s" and not value > 0:
                raise ValueError(f"time_limit_s={value} was given; give a time above 0 in seconds")
            if option.name in _LEAST and not value >= _LEAST[option.name]:
                least = _LEAST[option.name]
                raise ValueError(f"{option.name}={value} was given; give at least {least}")

    @abstractmethod
    def solve(self, graph: Graph, *, budget_bytes: int) -> Solution:
        """Returns the best schedule the method finds within `budget_bytes`.

        Where all of the method's schedules exceed the budget the status is `Status.NO_SOLUTION`;
        `Status.INFEASIBLE` always has a proof. The schedule is validated, and its numbers come from
        the simulator.
        """

    def solve_near(self, graph: Graph, near: Sequence[Solution], *, budget_bytes: int) -> Solution:
        """Does the same as `solve`; some methods start from solutions for other budgets."""
        del near
        return self.solve(graph, budget_bytes=budget_bytes)

    def telling(self, tell: ProgressCallback) -> Solver:
        """Returns a copy that also calls `tell` with its progress; itself if it reports none."""
        if "progress" not in {option.name for option in fields(self)}:
            return self

        solver: Any = self
        before: ProgressCallback | None = solver.progress

        def tell_both(moment: Progress) -> None:
            tell(moment)
            if before is not None:
                before(moment)

        told: Solver = replace(solver, progress=tell_both)
        return told
