"""What every solver is: options in the constructor, the problem in the call, a `Solution` out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from remat.core.graph import Graph
from remat.core.solution import Solution


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
