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


# Accelerate (1.15, `should_reduce_batch_size`) and Lightning (2.6, `is_oom_error`) look into
# `args[0]` before they try a smaller batch: for " out of memory.", and for "CUDA".
_COUNTS_AS = "A search for a batch size takes this as CUDA out of memory."


class BudgetError(RematError, RuntimeError):
    """A memory budget can't be met.

    To `accelerate.utils.find_executable_batch_size`, to the `Trainer`'s `auto_find_batch_size` and
    to Lightning's `scale_batch_size` it is a step out of memory: they try a smaller batch.

    Attributes:
        budget_bytes: the budget that was asked for.
        minimum_bytes: the smallest budget for which a schedule is known.
        is_proved: True where no schedule at all fits in `budget_bytes`; False where the
            search stopped without finding one.
    """

    def __init__(
        self, message: str, *, budget_bytes: int, minimum_bytes: int, is_proved: bool
    ) -> None:
        super().__init__(f"{message} {_COUNTS_AS}")
        self._message = message
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes
        self.is_proved = is_proved

    def __str__(self) -> str:
        return self._message
