"""What every solver is: options in the constructor, the problem in the call, a `Solution` out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any

from remat.core.graph import Graph
from remat.core.solution import Solution
from remat.solvers.core.progress import Progress, ProgressCallback


@dataclass(frozen=True)
class Solver(ABC):
    """A method for solving rematerialization under a memory budget.

    Its `repr` is its configuration.
    """

    @abstractmethod
    def solve(self, graph: Graph, *, budget_bytes: int) -> Solution:
        """Returns the best schedule the method finds within `budget_bytes`.

        A method whose schedules all exceed the budget answers `Status.NO_SOLUTION`; only a proof
        answers `Status.INFEASIBLE`. The schedule was validated, its numbers are the simulator's.
        """

    def telling(self, tell: ProgressCallback) -> Solver:
        """Returns this solver, which also calls `tell` with how far it is, where it says so."""
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
