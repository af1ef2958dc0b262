"""The errors of `remat`: what was given, what is needed, what to do."""

from __future__ import annotations


class RematError(Exception):
    """Root of every error that `remat` raises on purpose."""


class GraphError(RematError):
    """A graph or an instance file breaks an invariant; the message names the first one."""


class TraceError(RematError):
    """A training step could not be captured as one graph, or can't be run from it."""


class ScheduleError(RematError):
    """A schedule breaks a rule, or belongs to another graph."""


class SolverError(RematError):
    """A solver can't be used here: a missing backend, or a graph outside its class."""


class BudgetError(RematError):
    """A memory budget can't be met.

    Attributes:
        budget_bytes: the budget that was asked for.
        minimum_bytes: the smallest budget for which a schedule is known.
        is_proved: True where no schedule at all fits in `budget_bytes`; False where the
            search stopped without finding one.
    """

    def __init__(
        self, message: str, *, budget_bytes: int, minimum_bytes: int, is_proved: bool
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes
        self.is_proved = is_proved
